from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from celery.exceptions import Retry

from celery_singleton_lock import Aborted, clock
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.task import abort
from celery_singleton_lock.task.abort import Body

#: Long enough that the grace (a tenth of it) never ends in a test: there is nothing to kill here.
TTL = 600.0
LIMIT = 10.0


def lease() -> Lease:
    return Lease("k", "o", ttl=TTL, fence=1, sent_at=clock.now())


def strike_soon(body: Body, *, after: float = 0.05) -> threading.Timer:
    timer = threading.Timer(after, body.strike)
    timer.start()
    return timer


def test_main_thread_is_stopped_in_a_blocking_call() -> None:
    body = Body(lease())
    started = clock.now()
    with pytest.raises(Aborted), body:
        strike_soon(body)
        time.sleep(LIMIT)
    assert clock.now() - started < LIMIT
    assert body.struck


def test_body_that_ended_is_left_alone() -> None:
    body = Body(lease())
    with body:
        pass
    body.strike()
    assert not body.struck


def test_except_exception_does_not_keep_a_lost_run_alive() -> None:
    body, rounds = Body(lease()), 0
    with pytest.raises(Aborted), body:
        strike_soon(body)
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # noqa: BLE001 - as users' loops do
                rounds += 1
    assert rounds == 0


def test_other_thread_is_stopped_at_its_next_bytecode() -> None:
    stopped = threading.Event()

    def work() -> None:
        body = Body(lease())
        try:
            with body:
                strike_soon(body)
                while True:
                    time.sleep(0.005)
        except Aborted:
            stopped.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert stopped.wait(LIMIT)
    thread.join()


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_strike_that_races_the_end_never_arrives_late(in_main_thread: bool) -> None:
    """Bodies that end just as they are struck: `Aborted` comes within `with` or not at all."""
    late: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                body = Body(lease())
                go = threading.Event()
                striker = threading.Thread(target=lambda body=body, go=go: (go.wait(), body.strike()))
                striker.start()
                try:
                    with body:
                        go.set()
                        for _ in range(50):
                            pass
                except Aborted:
                    pass
                striker.join()
                for _ in range(50):
                    pass
        except BaseException as error:  # noqa: BLE001
            late.append(error)

    if in_main_thread:
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert late == []


def test_foreign_signal_reaches_its_handler() -> None:
    """Celery's soft time limit and its stack dumps use the same signal."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        with Body(lease()):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1]


def test_body_that_was_struck_at_its_start_leaves_nothing_behind() -> None:
    """`Aborted` comes in `__enter__` itself, so `__exit__` is never called: the next signal is somebody else's."""
    body = Body(lease())
    body.__enter__()
    with pytest.raises(Aborted):
        body.strike()
        time.sleep(LIMIT)
    body.end()
    body.end()
    test_foreign_signal_reaches_its_handler()


def test_body_has_time_to_clean_up_before_it_is_struck_again() -> None:
    cleaned = False
    body = Body(lease())
    with pytest.raises(Aborted), body:
        try:
            strike_soon(body)
            time.sleep(LIMIT)
        finally:
            for _ in range(5):
                body.strike()
            time.sleep(0.05)
            cleaned = True
    assert cleaned


def test_nested_body_is_stopped_with_the_outer_one() -> None:
    outer, inner = Body(lease()), Body(lease())
    with pytest.raises(Aborted), outer, inner:
        strike_soon(outer)
        time.sleep(LIMIT)
    assert outer.struck
    assert not inner.struck


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_sending_the_next_attempt_is_not_interrupted(in_main_thread: bool) -> None:
    sent: list[str] = []

    def work() -> None:
        body = Body(lease())
        with suppress(Aborted), body:
            with suppress(Retry), body.sending():
                body.strike()
                for _ in range(1000):
                    time.sleep(0)
                sent.append("retry")
                raise Retry
            body.strike()
            time.sleep(LIMIT)
        assert body.struck
        sent.append("retry is known" if body.sent else "")

    thread = threading.Thread(target=work)
    if in_main_thread:
        work()
    else:
        thread.start()
        thread.join()
    assert sent == ["retry", "retry is known"]


def test_late_signal_for_a_body_that_sends_reaches_no_other_handler() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    body = Body(lease())
    try:
        with body, body.sending():
            body.strike()
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == []


def test_process_is_not_killed_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grace starts when it has sent."""
    now, killed = itertools.count(step=100.0), list[Lease]()
    monkeypatch.setattr(abort, "_kill_this_child", killed.append)
    monkeypatch.setattr(abort, "clock", SimpleNamespace(now=lambda: next(now)))
    body = Body(Lease("k", "o", ttl=TTL, fence=1, sent_at=0.0))
    with suppress(Aborted), body:
        with body.sending():
            for _ in range(3):
                body.strike()
        assert killed == []
        for _ in range(2):
            with suppress(Aborted):
                body.strike()
                time.sleep(LIMIT)
    assert len(killed) == 1


def test_process_is_killed_also_if_it_cannot_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body may hang as it writes to a log that nobody reads, and has the lock of that log."""
    handler, killed = logging.StreamHandler(), threading.Event()
    monkeypatch.setattr(abort, "is_child_of_a_pool", lambda: True)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.set())
    abort.logger.addHandler(handler)
    handler.acquire()
    try:
        threading.Thread(target=abort._kill_this_child, args=(lease(),), daemon=True).start()
        assert killed.wait(LIMIT)
    finally:
        handler.release()
        abort.logger.removeHandler(handler)
