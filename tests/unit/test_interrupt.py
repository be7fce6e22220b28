"""A body that does not stop, or is told to as it begins. Other bodies: `test_newest.py`."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
from celery.app.task import Context

from celery_singleton_lock import Aborted, clock
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.task import interrupt
from celery_singleton_lock.task.interrupt import Body

#: Long enough that the grace (a tenth of it) never ends in a test: there is nothing to kill here.
TTL = 600.0
LIMIT = 10.0


def lease() -> Lease:
    return Lease("k", "o", ttl=TTL, fence=1, sent_at=clock.now())


def test_body_that_was_struck_at_its_start_leaves_nothing_behind() -> None:
    """`Aborted` comes in `__enter__` itself, so `__exit__` is never called: the next signal is somebody else's."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    body = Body(lease(), Context())
    try:
        body.__enter__()
        with pytest.raises(Aborted):
            body.interrupt()
            time.sleep(LIMIT)
        body.end()
        body.end()
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]


def test_abort_that_arrives_as_the_body_ends_is_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls a handler as the next function is called: here, the one that has the body end."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    body = Body(lease(), Context())
    leave, on_its_way = body._way.leave, [signal.SIGUSR1]

    def leave_struck(it: Body) -> None:
        if on_its_way:
            signal.raise_signal(on_its_way.pop())
        leave(it)

    monkeypatch.setattr(body._way, "leave", leave_struck)
    try:
        with body:
            monkeypatch.setattr(body._way, "interrupt", lambda it: None)
            body.interrupt()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (got, on_its_way) == ([], [])


def test_process_is_not_killed_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace starts when it has sent."""
    now, killed = itertools.count(step=100.0), list[Lease]()
    monkeypatch.setattr(interrupt, "_kill_this_child", killed.append)
    monkeypatch.setattr(interrupt, "clock", SimpleNamespace(now=lambda: next(now)))
    body = Body(Lease("k", "o", ttl=TTL, fence=1, sent_at=0.0), Context())
    with suppress(Aborted), body:
        with body.sending():
            for _ in range(3):
                body.interrupt()
        assert killed == []
        for _ in range(2):
            with suppress(Aborted):
                body.interrupt()
                time.sleep(LIMIT)
    assert len(killed) == 1


@pytest.fixture
def nobody_can_log() -> Iterator[None]:
    """The body may hang as it writes to a log that nobody reads, and has the lock of that log."""
    handler = logging.StreamHandler()
    interrupt.logger.addHandler(handler)
    handler.acquire()
    yield
    handler.release()
    interrupt.logger.removeHandler(handler)


@pytest.mark.usefixtures("nobody_can_log")
def test_process_is_killed_also_if_it_cannot_log(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    monkeypatch.setattr(interrupt, "is_child_of_a_pool", lambda: True)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.set())
    threading.Thread(target=interrupt._kill_this_child, args=(lease(),), daemon=True).start()
    assert killed.wait(LIMIT)


@pytest.mark.usefixtures("nobody_can_log")
def test_other_bodies_are_stopped_also_if_nobody_can_log() -> None:
    """A pool that cannot kill a body says so: not in the thread that stops the others."""
    heartbeat = threading.Thread(target=interrupt._kill_this_child, args=(lease(),), daemon=True)
    heartbeat.start()
    heartbeat.join(LIMIT)
    assert not heartbeat.is_alive()
