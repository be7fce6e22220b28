"""Locks that another thread holds when a process forks are free in the child."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable

import pytest

from celery_singleton_lock import forks
from celery_singleton_lock.background import Aside
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.task import reports
from tests.patience import LIMIT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def test_mutex_is_free_in_a_child() -> None:
    mutex = Mutex()

    def use() -> None:
        with mutex.lock:
            pass

    assert child_ends(lambda: mutex.lock, use)


def test_background_work_is_free_in_a_child() -> None:
    aside, done = Aside("aside"), threading.Event()

    def use() -> None:
        aside.do(done.set)
        assert done.wait(LIMIT)

    assert child_ends(lambda: aside._job._mutex, use)


def test_reports_are_free_in_a_child() -> None:
    assert child_ends(lambda: reports._mutex.lock, reports.receive)


class Counted:
    """Counts how often it was restarted."""

    def __init__(self) -> None:
        self.times = 0
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self.times += 1


def test_only_the_child_restarts() -> None:
    counted = Counted()
    pid = os.fork()
    if not pid:
        os._exit(counted.times)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert counted.times == 0


def test_restart_after_a_fork_keeps_nothing_alive() -> None:
    counted = Counted()
    gone = weakref.ref(counted)
    del counted
    gc.collect()
    assert gone() is None


def child_ends(lock: Callable[[], object], use: Callable[[], object]) -> bool:
    """Whether a child ends that uses a lock which another thread held during the fork."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock():  # type: ignore[attr-defined]
            held.set()
            over.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LIMIT)
    try:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                signal.alarm(30)  # Kills a child that hangs.
                use()
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        over.set()
        thread.join()
