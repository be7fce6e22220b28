"""The locks and ledgers on one server, as it shows them; nothing here blocks it.

If there may be many keys, they are searched step by step, and what a step has found is read in one round trip. If there
is no answer, or an error, each function raises `RedisError` or `OSError`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from celery_singleton_lock import cleaned
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.redis import keyspace, lock_answers
from celery_singleton_lock.stores.redis.script import Command
from celery_singleton_lock.stores.redis.server import Server
from celery_singleton_lock.stores.store import MOST_RECORDS, KeyState

#: The name of a key.
Name = TypeVar("Name", str, bytes)

#: Seconds after which a waiter that has not asked again is not counted.
FRESH = 6.0


def asking(key: str) -> Sequence[Command]:
    """Asks how many wait for a lock; see `counted`."""
    return ("HVALS", key + keyspace.ASKED), ("TIME",)


def counted(asked: object, time: object) -> int:
    """How many wait, from the answers to `asking`; an error, for lack of a right for example, counts as none."""
    if not isinstance(asked, list) or not isinstance(time, list):
        return 0
    fresh = ((cleaned.whole(time[0]) or 0) - FRESH) * 1000
    pairs = [[cleaned.whole(part) or 0 for part in said.split(b" ")] for said in asked if isinstance(said, bytes)]
    return sum(max(copies, 0) for at, copies, *_ in (pair for pair in pairs if len(pair) > 1) if at >= fresh)


#: Keys, or entries, that the server looks at in one step.
_STEP = 500

#: The end of the key of a lock.
_RUN = ":run"


def held(server: Server, key: str) -> list[Held]:
    """The holders of the key."""
    (found,) = _looked_up(server, [key])
    return found


def all_held(server: Server, prefix: str) -> Iterator[tuple[str, Held]]:
    """The locks whose key begins with `prefix` and a colon."""
    for names in _named(server, f"{prefix}:*{_RUN}"):
        keys = [name.removesuffix(_RUN) for name in names]
        for key, found in zip(keys, _looked_up(server, keys, others=True), strict=True):
            yield from ((key, held) for held in found)


def inspect(server: Server, everywhere: Sequence[Server], key: str) -> KeyState:
    """All that there is of one key; `everywhere` is searched for its records."""
    done = key + keyspace.DONE
    remaining: dict[str, int] = {}
    for messages in chain.from_iterable(_named(each, f"{_literally(done)}*") for each in everywhere):
        remaining.update(
            zip(messages, unless_refused(server.command_each([("PTTL", name) for name in messages])), strict=True)
        )
    latest = sorted(remaining, key=lambda name: remaining[name], reverse=True)[:MOST_RECORDS]
    shown = held(server, key)
    about: list[Command] = [("GET", key + keyspace.FENCE), *asking(key)]
    # A record may hold a return value of some KiB.
    fence, asked, time, *records = server.command_each([*about, *(("GETRANGE", name, 0, 127) for name in latest)])
    return KeyState(
        tuple(shown),
        max((it for it in (cleaned.whole(fence), *(each.fence for each in shown)) if it is not None), default=None),
        counted(asked, time),
        tuple(
            Record(name.removeprefix(done), record, remaining[name] / 1000)
            for name, record in zip(latest, records, strict=True)
            if isinstance(record, bytes) and remaining[name] > 0
        ),
    )


def agreed(each: Iterable[Iterable[tuple[str, Held]]], quorum: int) -> Iterator[tuple[str, Held]]:
    """The locks that at least this many nodes of a Redlock show."""
    by_owner: defaultdict[tuple[str, str], list[Held]] = defaultdict(list)
    for of_node in each:
        # A search may find a key twice.
        once = {(key, held.owner): held for key, held in of_node}
        for place, held in once.items():
            by_owner[place].append(held)
    for (key, owner), alike in by_owner.items():
        if len(alike) >= quorum:
            holder = next((held.holder for held in alike if held.holder is not None), None)
            remaining, waiters = max(held.remaining for held in alike), max(held.waiters for held in alike)
            yield key, Held(holder, owner, remaining, waiters)


def merged(states: Sequence[KeyState], quorum: int) -> KeyState:
    """What the nodes of a Redlock have of one key."""
    records = {each.message: each for it in states for each in sorted(it.records, key=lambda each: each.seconds)}
    return KeyState(
        tuple(held for _, held in agreed([[("", held) for held in it.held] for it in states], quorum)),
        max((it.fence for it in states if it.fence is not None), default=None),
        max(it.waiters for it in states),
        tuple(sorted(records.values(), key=lambda each: each.seconds, reverse=True)[:MOST_RECORDS]),
    )


def entries(server: Server, key: str) -> Iterator[tuple[bytes, int]]:
    """The entries that a ledger knows, and their last runs (0 if that is not a number); some perhaps twice."""
    for pairs in scanned(server, "HSCAN", key + keyspace.LEDGER):
        for entry, last in zip(pairs[::2], pairs[1::2], strict=True):
            yield entry, cleaned.whole(last) or 0


def scanned(server: Server, *command: object, match: str = "*") -> Iterator[list[bytes]]:
    """What a SCAN or HSCAN finds, step by step; some perhaps more than once."""
    cursor = b"0"
    while True:
        cursor, found = server.command(*command, cursor, "MATCH", match, "COUNT", _STEP)
        yield found
        if cursor == b"0":
            return


def _named(server: Server, pattern: str) -> Iterator[list[str]]:
    for names in scanned(server, "SCAN", match=pattern):
        yield [name.decode(errors="replace") for name in names]


def _looked_up(server: Server, keys: Sequence[str], *, others: bool = False) -> list[list[Held]]:
    """The holders of each of the locks, in the order in which they took it.

    Args:
        server: where they are.
        keys: the locks.
        others: whether values of others may be there, which are nobody's lock; if not, they are an error.
    """
    names = [keyspace.run_key(key) for key in keys]
    each = zip(keys, names, strict=True)
    asked: list[Sequence[Command]] = [(("GET", name), ("PTTL", name), *asking(key)) for key, name in each]
    answers = server.command_each([*chain.from_iterable(asked)])
    by_question = [answers[question::4] for question in range(4)]
    sets = sets_among(server, dict(zip(names, by_question[0], strict=True)))
    found = []
    for name, only, its_pttl, waits, time in zip(names, *by_question, strict=True):
        value, pttl = sets.get(name, (only, its_pttl))
        (remaining,) = unless_refused([pttl])
        try:
            (value,) = unless_refused([value])
            holds = lock_answers.parse_holds(value, remaining)
        except ResponseError as error:
            holds = []
            if not others:
                raise _no_lock(name, error) from error
        found.append([replace(held, waiters=counted(waits, time)) for held in holds])
    return found


def _no_lock(name: str, error: ResponseError) -> ResponseError:
    return ResponseError(f"the value at {name} is not a lock: {error}") if _is_strange(error) else error


def sets_among(server: Server, values: Mapping[Name, object]) -> dict[Name, tuple[Any, Any]]:
    """What is in those keys that are sets, by their values or errors; with their remaining milliseconds."""
    asked = [name for name, value in values.items() if _is_strange(value)]
    commands: list[Sequence[Command]] = [(("ZRANGE", name, 0, -1, "WITHSCORES"), ("PTTL", name)) for name in asked]
    answers = server.command_each([*chain.from_iterable(commands)]) if asked else []
    return dict(zip(asked, zip(answers[::2], answers[1::2], strict=True), strict=True))


def _is_strange(value: object) -> bool:
    """Whether a value is of another type than was expected."""
    return isinstance(value, Exception) and str(value).startswith("WRONGTYPE")


def unless_refused(answers: Iterable[Any]) -> list[Any]:
    """The answers; an error among them, such as a missing permission, is raised."""
    found = [*answers]
    for answer in found:
        if isinstance(answer, Exception):
            raise answer
    return found


def _literally(text: str) -> str:
    """A Redis pattern that only this text matches."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)
