"""The locks and ledgers on one server, as it shows them; nothing here blocks it.

If there may be many keys, they are searched step by step, and what a step has found is read in one round trip. If there
is no answer, or an error, each function raises `RedisError` or `OSError`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from redis.exceptions import ResponseError

from celery_singleton_lock import cleaned
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.redis import keyspace, lock_answers
from celery_singleton_lock.stores.redis.connection import alone, unless_error
from celery_singleton_lock.stores.redis.server import Server
from celery_singleton_lock.stores.store import MOST_RECORDS, KeyState

#: Seconds after which a waiter that has not asked again is not counted.
FRESH = 6.0


#: Keys, or entries, that the server looks at in one step.
_STEP = 500

#: The end of the key of a lock.
_RUN = ":run"


def held(server: Server, key: str) -> list[Held]:
    """The holders of the key.

    Raises:
        ResponseError: what is there is not a lock.
    """
    return _held_and_waiters(server, key)[0]


def all_held(server: Server, prefix: str) -> Iterator[tuple[str, Held]]:
    """The locks whose key begins with `prefix` and a colon. Values of others may be there, which are nobody's lock."""
    for names in _named(server, f"{prefix}:*{_RUN}"):
        keys = [name.removesuffix(_RUN) for name in names]
        for key, (found, _) in zip(keys, _looked_up(server, keys), strict=True):
            if not is_strange(found):
                yield from ((key, held) for held in unless_error(found))


def inspect(server: Server, key: str) -> KeyState:
    """All that there is of one key."""
    done = key + keyspace.DONE
    remaining: dict[str, int] = {}
    for names in _named(server, f"{_literally(done)}*"):
        left = server.command_each([("PTTL", name) for name in names])
        remaining.update(zip(names, map(unless_error, left), strict=True))
    latest = sorted(remaining, key=lambda name: remaining[name], reverse=True)[:MOST_RECORDS]
    shown, waiters = _held_and_waiters(server, key)
    # A record may hold a return value of some KiB.
    about = [("GET", key + keyspace.FENCE), *(("GETRANGE", name, 0, 127) for name in latest)]
    fence, *records = server.command_each(about)
    return KeyState(
        tuple(shown),
        max((it for it in (cleaned.whole(fence), *(each.fence for each in shown)) if it is not None), default=None),
        waiters,
        tuple(
            Record(name.removeprefix(done), record, remaining[name] / 1000)
            for name, record in zip(latest, records, strict=True)
            if isinstance(record, bytes) and remaining[name] > 0
        ),
    )


def _held_and_waiters(server: Server, key: str) -> tuple[list[Held], int]:
    ((found, waiters),) = _looked_up(server, [key])
    if is_strange(found):
        raise ResponseError(f"the value at {keyspace.run_key(key)} is not a lock: {found}")
    return unless_error(found), waiters


def agreed(each: Iterable[Iterable[tuple[str, Held]]], quorum: int) -> Iterator[tuple[str, Held]]:
    """The locks that at least this many nodes of a Redlock show."""
    by_owner: defaultdict[tuple[str, str], list[Held]] = defaultdict(list)
    for of_node in each:
        # A search may find a key twice.
        once = {(key, held.owner): held for key, held in of_node}
        for place, held in once.items():
            by_owner[place].append(held)
    for (key, _), alike in by_owner.items():
        if len(alike) >= quorum:
            yield (
                key,
                replace(
                    alike[0],
                    holder=next((held.holder for held in alike if held.holder is not None), None),
                    remaining=max(held.remaining for held in alike),
                    waiters=max(held.waiters for held in alike),
                    fence=max((held.fence for held in alike if held.fence is not None), default=None),
                ),
            )


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


def _looked_up(server: Server, keys: Sequence[str]) -> list[tuple[list[Held] | ResponseError, int]]:
    """The holders of each of the locks, in the order in which they took it, or why that is not known; and how many
    wait for it.
    """
    names = [keyspace.run_key(key) for key in keys]
    each = zip(keys, names, strict=True)
    asked = [(("GET", name), ("PTTL", name), ("HVALS", key + keyspace.ASKED)) for key, name in each]
    time, *answers = server.command_each([("TIME",), *chain.from_iterable(asked)])
    values = dict(zip(names, answers[::3], strict=True))
    sets = [name for name, value in values.items() if is_strange(value)]
    elements = server.command_each([("ZRANGE", name, 0, -1, "WITHSCORES") for name in sets]) if sets else []
    values |= zip(sets, elements, strict=True)
    return [
        _found(values[name], pttl, _counted(waits, time))
        for name, pttl, waits in zip(names, answers[1::3], answers[2::3], strict=True)
    ]


def _found(value: object, pttl: Any, waiters: int) -> tuple[list[Held] | ResponseError, int]:
    try:
        holds = lock_answers.parse_holds(unless_error(value), unless_error(pttl))
    except ResponseError as error:
        return alone(error), waiters
    return [replace(held, waiters=waiters) for held in holds], waiters


def _counted(asked: object, time: object) -> int:
    """How many wait; an error, for lack of a right for example, counts as none."""
    if not isinstance(asked, list) or not isinstance(time, list):
        return 0
    fresh = ((cleaned.whole(time[0]) or 0) - FRESH) * 1000
    pairs = [[cleaned.whole(part) or 0 for part in said.split(b" ")] for said in asked if isinstance(said, bytes)]
    return sum(max(copies, 0) for at, copies, *_ in (pair for pair in pairs if len(pair) > 1) if at >= fresh)


def is_strange(value: object) -> bool:
    """Whether a value is of another type than was expected."""
    return isinstance(value, Exception) and str(value).startswith("WRONGTYPE")


def _literally(text: str) -> str:
    """A Redis pattern that only this text matches."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)
