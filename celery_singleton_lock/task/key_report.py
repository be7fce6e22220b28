"""An execution reports to its worker's main process which lock it is about to ask for.

The main process renews and frees locks for the processes of its pool. It could make the same key from the same
message, but that would run the user's code (`lock_key`, and whatever an argument's class does). That code may take long
or hang, and every other lock depends on the main process. So the execution reports its key before it asks for the lock:
through a pipe that the processes of the pool have, or directly if it runs in the main process itself. A process that
dies after that has reported what it may hold.

While it runs under its lease, the execution also reports until when it trusts the lease.

A report is one line, short enough to be written whole. Writing it never waits: if the pipe is full, the report is lost,
and only the child looks after that lock. The main process reads reports when it needs one, and as deliveries begin.
"""

from __future__ import annotations

import json
import math
import os
import select
import threading
from contextlib import suppress
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

from celery_singleton_lock import cleaned
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.holder import OWNER_LENGTH, is_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.options.rules import MAX_LIMIT, TTL, is_whole

#: The most bytes of a report: up to this, a write is all or nothing (POSIX guarantees 512, Linux 4096).
MAX_SIZE = min(getattr(select, "PIPE_BUF", 512), 4096)

#: Bytes that are read at once.
_CHUNK = 65536

#: How many deliveries begin until the pipe is emptied; it has room for more reports than that.
_SELDOM = 8

#: Quotes a text for JSON.
_quoted = json.encoder.encode_basestring_ascii

#: Where in a line the delivery's owner is.
_OWNER = slice(2, 2 + OWNER_LENGTH)


class Report(NamedTuple):
    """The lock that an execution is about to ask for.

    Attributes:
        owner: the owner that the main process gave the delivery.
        key: the lock's key.
        ttl: seconds that each renewal is good for.
        limit: how many may hold the key at once.
        asks_as: the owner under which it asks: the same, or another if that was given up.
        label: a few words about what the digest in the key was made from; empty if unknown.
    """

    owner: str
    key: str
    ttl: float
    limit: int
    asks_as: str
    label: str = ""

    def dumps(self) -> bytes:
        # As a JSON encoder would write it, in a third of the time.
        rest = f'{self.ttl}, {self.limit}, "{self.asks_as}", {_quoted(self.label)}'
        return f'["{self.owner}", {_quoted(self.key)}, {rest}]\n'.encode()

    @classmethod
    def loads(cls, line: bytes) -> Report | None:
        """Read a line; None if it is not whole, or was not written here: the user's code has the pipe too."""
        fields = cleaned.array(line)
        if fields is None or len(fields) != len(cls._fields):
            return None
        report = cls(*fields)
        texts = isinstance(report.key, str) and isinstance(report.label, str)
        named = texts and is_owner(report.owner) and is_owner(report.asks_as)
        return report if named and TTL.allows(report.ttl) and is_whole(report.limit, 1, MAX_LIMIT) else None

    def hold(self) -> Hold:
        """What the execution holds, if it got the lock."""
        return Hold(self.key, self.asks_as, ttl=self.ttl, limit=self.limit)


class End(NamedTuple):
    """When an execution gives its lease up unless it is renewed.

    Attributes:
        owner: the owner that the main process gave the delivery.
        give_up_at: on `clock.now()`, which the processes of a host share.
    """

    owner: str
    give_up_at: float

    def dumps(self) -> bytes:
        return f'["{self.owner}", {self.give_up_at}]\n'.encode()

    @classmethod
    def loads(cls, line: bytes) -> End | None:
        """Read a line; None if it is something else."""
        fields = cleaned.array(line)
        if fields is None or len(fields) != len(cls._fields):
            return None
        end = cls(*fields)
        is_time = isinstance(end.give_up_at, float) and math.isfinite(end.give_up_at)
        return end if is_time and is_owner(end.owner) else None


class Reported:
    """In the main process, as long as the delivery is there: its last reports; None before the first."""

    report: Report | None = None
    give_up_at: float | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()


class _Channel:
    """The way from the processes of a pool to their main process.

    Attributes:
        pid: the process that reads; None in one that was not forked from it.
        writer: where to write.
    """

    def __init__(self, writer: int | None = None) -> None:
        self.pid = os.getpid() if writer is None else None
        if writer is None:
            self._reader, writer = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(writer, False)
        self.writer = writer
        self._rest = b""
        self._deliveries = count(1)

    def fills(self) -> bool:
        """Count a delivery that begins; whether the pipe is to be emptied now."""
        return next(self._deliveries) % _SELDOM == 0

    def write(self, report: Report | End) -> None:
        """In a process of the pool."""
        line = report.dumps()
        if len(line) <= MAX_SIZE:
            with suppress(OSError):  # It is full; or the main process is gone, and so are we in a moment.
                os.write(self.writer, line)

    def read(self) -> list[bytes]:
        """In the main process, by one thread at a time: the lines that have come."""
        parts = [self._rest]
        with suppress(BlockingIOError):
            while chunk := os.read(self._reader, _CHUNK):
                parts.append(chunk)
                if len(chunk) < _CHUNK:
                    break
        *lines, self._rest = b"".join(parts).split(b"\n")
        return lines


#: By owner: the last reports of the deliveries that this process still has.
_reported: WeakValueDictionary[str, Reported] = WeakValueDictionary()

_channel: _Channel | None = None

#: Held for moments, and never while the user's code runs. A cold shutdown's handler may have interrupted `receive`.
_mutex = Mutex(threading.RLock)


def open_channel() -> int:
    """In the main process, before the pool starts its processes; a second call changes nothing. Where they write."""
    global _channel  # noqa: PLW0603 - there is one per process
    with _mutex.lock:
        if _channel is None or _channel.pid != os.getpid():
            _channel = _Channel()
        return _channel.writer


def report_to(writer: int) -> None:
    """In a process of the pool that was not forked, before it does anything else: where to write."""
    global _channel  # noqa: PLW0603
    _channel = _Channel(writer)


def expect(owner: str) -> Reported:
    """In the main process, before the pool gets the delivery with this owner: where its reports will be."""
    return _reported.setdefault(owner, Reported())


def send(report: Report | End) -> bool:
    """Say which lock is asked for next, or until when a lease is trusted; False if this process has got the delivery
    from another one, and no way to report to that.
    """
    if _channel is not None and _channel.pid != os.getpid():
        _channel.write(report)
        return True
    return _give(report)


def receive() -> None:
    """In the main process: hand the reports to the deliveries that are still there."""
    with _mutex.lock:
        lines = _channel.read() if _channel is not None and _channel.pid == os.getpid() else []
    for line in lines:
        # Most deliveries have gone by now: their reports are not even parsed.
        if line[_OWNER].decode(errors="replace") not in _reported:
            continue
        if (report := Report.loads(line) or End.loads(line)) is not None:
            _give(report)


def make_room() -> None:
    """In the main process, as a delivery begins: receive now and then, so that the pipe is never full."""
    if _channel is not None and _channel.fills():
        receive()


def _give(report: Report | End) -> bool:
    reported = _reported.get(report.owner)
    if reported is None or reported.pid != os.getpid():
        return False
    if isinstance(report, End):
        reported.give_up_at = report.give_up_at
    else:  # It asks for another lock, or again: until that is answered, it has no lease.
        reported.report, reported.give_up_at = report, None
    return True
