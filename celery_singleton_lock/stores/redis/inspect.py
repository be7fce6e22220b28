"""The locks and ledgers on one server, as it shows them; nothing here blocks it.

If there may be many keys, they are searched step by step, and what a step has found is read in one round trip. If there
is no answer, or an error, each function raises `RedisError` or `OSError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from redis.exceptions import ResponseError

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.redis import keyspace, lock_answers
from celery_singleton_lock.stores.redis.lock_commands import WAITING_TTL
from celery_singleton_lock.stores.redis.script import Command, ms
from celery_singleton_lock.stores.redis.server import Endpoint
from celery_singleton_lock.stores.store import MOST_RECORDS, KeyState

#: Seconds after which a process that has written nothing is surely gone.
LONG_GONE = 10 * WAITING_TTL


def written(copies: int, since: float) -> str:
    """What a main process writes whose first copy met its first conflict at `since`, seconds since the epoch."""
    return f"{copies}:{ms(since)}:{ms(clock.wall())}"


def asking(key: str) -> Sequence[Command]:
    """Asks how many wait for a lock; see `counted`."""
    return ("ZCOUNT", keyspace.waiting_key(key), _fresh(), "+inf"), ("HVALS", keyspace.line_key(key))


def those_there(key: str) -> Sequence[Command]:
    """Asks how many waiters and processes there are, without those waiters that were killed: their places stay."""
    return ("ZCOUNT", keyspace.waiting_key(key), _fresh(), "+inf"), ("HLEN", keyspace.line_key(key))


def counted(recent: object, lines: object) -> int:
    """How many wait, from the answers to `asking`; an error, for lack of a right for example, counts as none."""
    count = recent if isinstance(recent, int) else 0
    for line in lines if isinstance(lines, Iterable) else ():
        copies, since, at = _read(line)
        if at >= _fresh():
            # A young place was counted once, as a waiter's.
            count += copies - (since >= _fresh())
    return max(count, 0)


def left_behind(line: object) -> Sequence[bytes]:
    """The processes that ended long ago without leaving, from the fields of `:line` and their values."""
    if not isinstance(line, Sequence):
        return ()
    before = ms(clock.wall() - LONG_GONE)
    return [name for name, written in zip(line[::2], line[1::2], strict=True) if _read(written)[2] < before]


def _fresh() -> int:
    """From when on somebody still waits, milliseconds."""
    return int(ms(clock.wall() - WAITING_TTL))


def _read(line: object) -> tuple[int, int, int]:
    """Copies, since when, and when that was written; it ends with what a later version may add."""
    parts = [cleaned.whole(part) or 0 for part in line.split(b":")] if isinstance(line, bytes) else []
    copies, since, at = (max(part, 0) for part in (*parts, 0, 0, 0)[:3])
    return copies, since, at


#: Keys, or entries, that the server looks at in one step.
_STEP = 500


def held(server: Endpoint, key: str, limit: int) -> list[Held]:
    """The holders of the key, also in slots beyond the limit."""
    (in_use,) = server.command_each([("GET", keyspace.slots_key(key))])
    slots = max(limit, min(cleaned.whole(in_use) or 0, lock_answers.MAX_SLOTS))
    return [held for held in _looked_up(server, [_Place(key, slot) for slot in range(slots)]) if held is not None]


def all_held(server: Endpoint, prefix: str) -> Iterator[tuple[str, Held]]:
    """The locks whose key begins with `prefix` and a colon."""
    for names in _named(server, f"{prefix}:*:run*"):
        places = [place for name in names if (place := _Place.of(name)) is not None]
        for place, held in zip(places, _looked_up(server, places, others=True), strict=True):
            if held is not None:
                yield place.key, held


def inspect(server: Endpoint, everywhere: Sequence[Endpoint], key: str) -> KeyState:
    """All that there is of one key; `everywhere` is searched for its records."""
    done = keyspace.done_key(key, "")
    places: set[_Place] = set()
    remaining: dict[str, int] = {}
    for names in chain.from_iterable(_named(each, f"{_literally(key)}:*") for each in everywhere):
        places.update(place for name in names if (place := _Place.of(name)) is not None and place.key == key)
        messages = [name for name in names if name.startswith(done)]
        remaining.update(
            zip(messages, _numbers(server.command_each([("PTTL", name) for name in messages])), strict=True)
        )
    latest = sorted(remaining, key=lambda name: remaining[name], reverse=True)[:MOST_RECORDS]
    held = _looked_up(server, sorted(places, key=lambda place: place.slot))
    shown = tuple(it for it in held if it is not None)
    about: list[Command] = [("GET", keyspace.fence_key(key)), *asking(key)]
    # A record may hold a return value of some KiB.
    fence, recent, lines, *records = server.command_each([*about, *(("GETRANGE", name, 0, 127) for name in latest)])
    return KeyState(
        shown,
        max((it for it in (cleaned.whole(fence), *(each.fence for each in shown)) if it is not None), default=None),
        counted(recent, lines),
        tuple(
            Record(name.removeprefix(done), record, remaining[name] / 1000)
            for name, record in zip(latest, records, strict=True)
            if isinstance(record, bytes) and remaining[name] > 0
        ),
    )


def entries(server: Endpoint, key: str) -> Iterator[tuple[bytes, int]]:
    """The entries that a ledger knows, and their last runs (0 if that is not a number); some perhaps twice."""
    for pairs in scanned(server, "HSCAN", keyspace.ledger_key(key)):
        for entry, last in zip(pairs[::2], pairs[1::2], strict=True):
            yield entry, cleaned.whole(last) or 0


def scanned(server: Endpoint, *command: object, match: str = "*") -> Iterator[list[bytes]]:
    """What a SCAN or HSCAN finds, step by step; some perhaps more than once."""
    cursor = b"0"
    while True:
        cursor, found = server.command(*command, cursor, "MATCH", match, "COUNT", _STEP)
        yield found
        if cursor == b"0":
            return


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a lock may be."""

    key: str
    slot: int

    @classmethod
    def of(cls, name: str) -> _Place | None:
        """The place of this name; None if no lock of this package can be there."""
        key, found, slot = name.rpartition(":run")
        if not found or (slot and not re.fullmatch(":[1-9][0-9]{0,3}", slot, re.ASCII)):
            return None
        return cls(key, int(slot[1:] or 0))


def _named(server: Endpoint, pattern: str) -> Iterator[list[str]]:
    for names in scanned(server, "SCAN", match=pattern):
        yield [name.decode(errors="replace") for name in names]


def _looked_up(server: Endpoint, places: Sequence[_Place], *, others: bool = False) -> list[Held | None]:
    """The holder of each of the places, None if there is none.

    Args:
        server: where they are.
        places: where to look.
        others: whether values of another type may be there, which are nobody's lock; if not, they are an error.
    """
    ways = [(place, keyspace.run_key(place.key, place.slot)) for place in places]
    asked: list[Sequence[Command]] = [(("GET", name), ("PTTL", name), *asking(it.key)) for it, name in ways]
    answers = server.command_each([*chain.from_iterable(asked)])
    by_question = (answers[question::4] for question in range(4))
    found: list[Held | None] = []
    for (place, name), value, pttl, recent, lines in zip(ways, *by_question, strict=True):
        if isinstance(value, Exception) and not others:
            if str(value).startswith("WRONGTYPE"):
                raise ResponseError(f"the value at {name} is not a lock: {value}")
            raise value
        if not isinstance(value, bytes):
            found.append(None)  # It is gone by now, or of another type.
            continue
        (remaining,) = _numbers([pttl])
        held, fence = lock_answers.parse_held(value, remaining), lock_answers.fence_of(value)
        found.append(replace(held, slot=place.slot, waiters=counted(recent, lines), fence=fence))
    return found


def _numbers(answers: Iterable[Any]) -> list[int]:
    """The answers; an error among them, such as a missing permission, is raised."""
    found = [*answers]
    for answer in found:
        if isinstance(answer, Exception):
            raise answer
    return found


def _literally(text: str) -> str:
    """A Redis pattern that only this text matches."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)
