"""How many wait for a lock: waiters in slots, and copies in workers' main processes.

A waiter asks again every few seconds, and its score in `:waiting` says when it last did. The score of a main process is
its place in the line, however old, so it writes in `:line` how many copies it has, and when it wrote that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.lock_commands import WAITING_TTL
from celery_singleton_lock.stores.redis.script import Command, ms

#: Seconds after which a process that has written nothing is surely gone.
LONG_GONE = 10 * WAITING_TTL


def written(copies: int, since: float) -> str:
    """What a main process writes whose first copy met its first conflict at `since`, seconds since the epoch."""
    return f"{copies}:{ms(since)}:{ms(clock.wall())}"


def asked(key: str) -> Sequence[Command]:
    """Asks how many wait for a lock; see `counted`."""
    return ("ZCOUNT", keyspace.waiting_key(key), _fresh(), "+inf"), ("HVALS", keyspace.line_key(key))


def those_there(key: str) -> Sequence[Command]:
    """Asks how many waiters and processes there are, without those waiters that were killed: their places stay."""
    return ("ZCOUNT", keyspace.waiting_key(key), _fresh(), "+inf"), ("HLEN", keyspace.line_key(key))


def counted(recent: object, lines: object) -> int:
    """How many wait, from the answers to `asked`; an error, for lack of a right for example, counts as none."""
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
