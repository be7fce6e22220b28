"""An execution reports to its worker's main process which lock it is about to ask for.

The main process renews and frees locks for the processes of its pool. It could make the same key from the same
message, but that would run the user's code (`lock_key`, and whatever an argument's class does). That code may take long
or hang, and every other lock depends on the main process. So the execution reports its key before it asks for the lock:
through a pipe that the processes of the pool have, or directly if it runs in the main process itself. A process that
dies after that has reported what it may hold.

A report is one line, short enough to be written whole. Writing it never waits: if the pipe is full, the report is lost,
and only the child looks after that lock. The main process reads reports when it needs one, and as deliveries begin.
"""

from __future__ import annotations

import json
import os
import select
import threading
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary, finalize

from celery_singleton_lock import cleaned
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.holder import OWNER_LENGTH, is_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.options.rules import MAX_LIMIT, TTL, is_whole

#: The most bytes of a report: up to this, a write is all or nothing (POSIX guarantees 512, Linux 4096).
MAX_SIZE = min(getattr(select, "PIPE_BUF", 512), 4096)

#: Bytes that are read at once.
_CHUNK = 65536

#: Quotes a text for JSON.
_quoted = json.encoder.encode_basestring_ascii

#: Where in a line the delivery's owner is.
_OWNER = slice(2, 2 + OWNER_LENGTH)


class Pipe:
    """A pipe to one thread of this process, from its other threads and from processes that it starts. Never waits.

    Closed when nobody has it any more: the number of a closed descriptor may be reused, and be written to.

    Attributes:
        descriptor: the descriptor to watch; readable from a write on, until what was written is read.
        writer: where to write.
    """

    def __init__(self) -> None:
        self.descriptor, self.writer = os.pipe()
        for each in self.descriptor, self.writer:
            os.set_blocking(each, False)
            finalize(self, os.close, each).atexit = False

    def give(self, content: bytes = b".") -> None:
        """Wake the thread that watches; may be called in a signal handler. What finds the pipe full is lost."""
        _write(self.writer, content)

    def take(self) -> bytes:
        """All that was written."""
        content = b""
        with suppress(BlockingIOError):
            while len(part := os.read(self.descriptor, _CHUNK)) == _CHUNK:
                content += part
            return content + part
        return content


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


class Reported:
    """In the main process, as long as the delivery is there: its last report; None before the first."""

    report: Report | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()


class _Channel(NamedTuple):
    """The way from the processes of a pool to their main process.

    Attributes:
        writer: where to write.
        pid: the process that reads; None in one that was not forked from it.
        pipe: what that process reads.
    """

    writer: int
    pid: int | None = None
    pipe: Pipe | None = None


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
            pipe = Pipe()
            _channel = _Channel(pipe.writer, os.getpid(), pipe)
        return _channel.writer


def report_to(writer: int) -> None:
    """In a process of the pool that was not forked, before it does anything else: where to write."""
    global _channel  # noqa: PLW0603
    _channel = _Channel(writer)


def expect(owner: str) -> Reported:
    """In the main process, before the pool gets the delivery with this owner: where its reports will be."""
    return _reported.setdefault(owner, Reported())


def send(report: Report) -> bool:
    """Say which lock is asked for next; False if this process has got the delivery from another one, and no way to
    report to that.
    """
    if _channel is None or _channel.pid == os.getpid():
        return _give(report)
    if len(line := report.dumps()) <= MAX_SIZE:
        _write(_channel.writer, line)
    return True


def receive() -> None:
    """In the main process: hand the reports to the deliveries that are still there."""
    with _mutex.lock:
        pipe = _channel.pipe if _channel is not None and _channel.pid == os.getpid() else None
        lines = [] if pipe is None else pipe.take().splitlines()
    for line in lines:
        # Most deliveries have gone by now: their reports are not even parsed.
        if line[_OWNER].decode(errors="replace") in _reported and (report := Report.loads(line)) is not None:
            _give(report)


def _give(report: Report) -> bool:
    reported = _reported.get(report.owner)
    if reported is None or reported.pid != os.getpid():
        return False
    reported.report = report
    return True


def _write(writer: int, content: bytes) -> None:
    with suppress(OSError):  # It is full; or the process that reads is gone, and so are we in a moment.
        os.write(writer, content)
