from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.background import BackgroundJob, logger
from tests.patience import LIMIT, until


def test_work_that_comes_meanwhile_is_done_next() -> None:
    calls, went_in, may_go_on = [0], threading.Event(), threading.Event()

    def work() -> None:
        calls[0] += 1
        went_in.set()
        assert may_go_on.wait(LIMIT)

    it = BackgroundJob("a", work)
    it.schedule()
    assert went_in.wait(LIMIT)
    it.schedule()
    may_go_on.set()
    until(lambda: calls == [2])


def test_thread_that_was_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a pool of greenlets, which ends some with an exception of their own; there was more to do."""

    class Killed(BaseException):
        pass

    ended, again = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())

    def work() -> None:
        if ended.is_set():
            again.set()
            return
        it.schedule()
        raise Killed

    it = BackgroundJob("a", work)
    it.schedule()
    assert ended.wait(LIMIT)
    it.schedule()
    assert again.wait(LIMIT)


def test_thread_whose_start_was_interrupted_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a time limit, say: another one is started, and then both run."""

    class Interrupted(Exception):
        pass

    class InterruptedThread(threading.Thread):
        def start(self) -> None:
            raise Interrupted

    asked, may_begin, done = threading.Event(), threading.Event(), threading.Event()
    it = BackgroundJob("a", done.set)
    monkeypatch.setattr(threading, "Thread", InterruptedThread)
    with pytest.raises(Interrupted):
        it.schedule()
    late = it._thread
    assert late is not None
    monkeypatch.undo()
    wait = it._wait

    def wait_for_the_late_one() -> bool:
        if threading.current_thread() is not late:
            asked.set()
            assert may_begin.wait(LIMIT)
        return wait()

    monkeypatch.setattr(it, "_wait", wait_for_the_late_one)
    it.schedule()
    assert asked.wait(LIMIT)
    threading.Thread.start(late)
    late.join(LIMIT)
    may_begin.set()
    assert done.wait(LIMIT)


def test_work_that_comes_just_as_nothing_is_left_is_done() -> None:
    asked, again = threading.Event(), threading.Event()

    def work() -> None:
        if asked.is_set():
            again.set()
        else:
            asked.set()
            it.schedule()

    it = BackgroundJob("a", work)
    it.schedule()
    assert again.wait(LIMIT)


def test_no_thread_is_started_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are collected then may have calls to repeat; the start of a thread would never return."""
    it = BackgroundJob("a", lambda: None)
    monkeypatch.setattr("sys.is_finalizing", lambda: True)
    it.schedule()
    assert it._thread is None


def test_log_that_fails_ends_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of the user's may do so; whoever depends on the thread has nobody else."""
    calls: list[None] = []

    def work() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise MemoryError

    def fail(*_: object) -> bool:
        raise RuntimeError("no log")

    monkeypatch.setattr("celery_singleton_lock.background.RETRY_AFTER", 0.01)
    monkeypatch.setattr(logger, "filters", [fail])
    BackgroundJob("a", work).schedule()
    until(lambda: len(calls) == 2)
