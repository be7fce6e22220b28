from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock import later
from celery_singleton_lock.background import Aside
from celery_singleton_lock.journal.writer import JournalWriter
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.later import Later
from celery_singleton_lock.record_writer import RecordWriter
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.memory import MemoryStore
from tests.patience import LIMIT
from tests.servers import until


class Counting:
    """Work that counts its calls; returns or raises the given answers, and then says that nothing is left."""

    def __init__(self, *answers: float | BaseException | None) -> None:
        self.calls = 0
        self._answers: Iterator[float | BaseException | None] = iter(answers)
        self.went_in, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def __call__(self) -> float | None:
        self.calls += 1
        self.went_in.set()
        assert self.may_go_on.wait(LIMIT)
        answer = next(self._answers, None)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def has_ended(it: Later) -> bool:
    return it._thread is None


def is_free(mutex: Any) -> bool:
    """Whether another thread can acquire it."""
    found: list[bool] = []

    def take() -> None:
        found.append(mutex.acquire(blocking=False))
        if found[0]:
            mutex.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def test_thread_ends_when_nothing_is_left_and_is_started_again() -> None:
    work = Counting()
    it = Later("a", work)
    for calls in (1, 2):
        it.want()
        until(lambda: has_ended(it), "the thread has ended")
        assert work.calls == calls


def test_work_that_comes_meanwhile_is_done_next() -> None:
    work = Counting()
    work.may_go_on.clear()
    it = Later("a", work)
    it.want()
    assert work.went_in.wait(LIMIT)
    it.want()
    work.may_go_on.set()
    until(lambda: has_ended(it), "the thread has ended")
    assert work.calls == 2


def test_remaining_work_is_done_without_another_request() -> None:
    work = Counting(0.0, 0.0)
    it = Later("a", work)
    it.want()
    until(lambda: has_ended(it), "the thread has ended")
    assert work.calls == 3


@pytest.mark.parametrize("error", [ZeroDivisionError("no such thing"), SystemExit(1)], ids=repr)
def test_failed_work_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(later, "RETRY_AFTER", 0.0)
    work = Counting(error)
    it = Later("a", work)
    it.want()
    until(lambda: has_ended(it), "the thread has ended")
    assert work.calls == 2


def test_killed_thread_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """gevent kills a greenlet in this way: nothing in the thread can prevent it."""

    class Killed(BaseException): ...

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    work = Counting(Killed())
    it = Later("a", work)
    it.want()
    until(lambda: work.calls == 1 and not it._thread.is_alive(), "the thread is gone")
    it.want()
    until(lambda: work.calls == 2, "another one works")


@pytest.mark.parametrize("where", ["made", "about to start", "started"])
def test_interrupted_start_loses_nothing_and_starts_no_second_thread(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """After Ctrl-C or a time limit, the next caller finds all the work, and the existing thread."""
    made, start = threading.Thread.__init__, threading.Thread.start
    started: list[threading.Thread] = []

    def make(thread: threading.Thread, **options: Any) -> None:
        made(thread, **options)
        if where == "made":
            raise KeyboardInterrupt

    def interrupted(thread: threading.Thread) -> None:
        if where == "started":
            start(thread)
            started.append(thread)
        raise KeyboardInterrupt

    work = Counting()
    work.may_go_on.clear()
    it = Later("a", work)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "__init__", make)
        patch.setattr(threading.Thread, "start", interrupted)
        it.want()
    assert is_free(it._mutex)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    it.want()
    work.may_go_on.set()
    until(lambda: has_ended(it), "the thread has ended")
    assert len(started) == 1
    assert work.calls >= 1


@pytest.mark.parametrize("step", ["start", "is_alive"])
def test_signal_handler_may_add_work_meanwhile(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """It runs in the interrupted thread: with a plain lock it would wait for itself."""
    noted, done = ["a caller's"], list[str]()

    def work() -> None:
        while noted:
            done.append(noted.pop())

    it = Later("a", work, linger=LIMIT)
    undisturbed = getattr(threading.Thread, step)

    def interrupted(thread: threading.Thread) -> Any:
        if len(noted) == 1:
            noted.append("the handler's")
            it.want()
        return undisturbed(thread)

    if step == "is_alive":
        it.want()
        until(lambda: done, "the thread lingers")
        noted.append("another caller's")
    monkeypatch.setattr(threading.Thread, step, interrupted)
    it.want()
    until(lambda: not noted, "all of it is done")
    assert "the handler's" in done


def test_many_threads_lose_nothing() -> None:
    noted: list[int] = []
    done: list[int] = []

    def work() -> None:
        while noted:
            done.append(noted.pop())

    it = Later("a", work)

    def note() -> None:
        for number in range(500):
            noted.append(number)
            it.want()

    threads = [threading.Thread(target=note) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: has_ended(it), "the thread has ended")
    assert len(done) == 4000


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_work_may_be_wanted_in_the_hub_of_greenlets(library: str) -> None:
    """In the handler of a signal, for example, which cannot wait there for the thread to begin."""
    in_hub = {
        "gevent": "gevent.get_hub().loop.run_callback(want)",
        "eventlet": "eventlet.hubs.get_hub().schedule_call_global(0, want)",
    }
    program = f"""
import {library}
if "{library}" == "gevent":
    import gevent.monkey
    gevent.monkey.patch_all()
else:
    eventlet.monkey_patch()
import time
from celery_singleton_lock.later import Later
done = []
later = Later("later", lambda: done.append("work"))
def want():
    later.want()
    done.append("wanted")
{in_hub[library]}
until = time.monotonic() + 10
while len(done) < 2 and time.monotonic() < until:
    time.sleep(0.01)
print(sorted(done))
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert ran.stdout == "['wanted', 'work']\n"


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        yield patch


class TestWithoutThreads:
    """A task that has ended must not fail because no thread can start."""

    def test_journal_is_written_when_threads_can_start_again(self, no_threads: pytest.MonkeyPatch) -> None:
        journal = MemoryStore().journal("p", size=100)
        writer = JournalWriter(journal, lambda: None, 0)  # type: ignore[arg-type]
        writer._later._after = 0.0
        entry = Entry("run", "t", "k", "id", "node", 1, 1.0, 2.0)
        writer.add(entry)
        no_threads.undo()
        writer.add(entry)
        until(lambda: len(list(journal.entries(since=0.0))) == 2, "both are written")

    def test_records_are_written_when_threads_can_start_again(self, no_threads: pytest.MonkeyPatch) -> None:
        writer = RecordWriter(MemoryStore())
        writer._later._after = 0.0
        writer.replace("k", Record("m", b"", 1.0))
        no_threads.undo()
        writer.replace("k", Record("n", b"", 1.0))
        until(lambda: not writer._records, "both are written")

    def test_background_work_is_done_when_threads_can_start_again(self, no_threads: pytest.MonkeyPatch) -> None:
        aside, done = Aside("aside"), threading.Event()
        aside.do(done.set)
        no_threads.undo()
        aside.do(lambda: None)
        assert done.wait(LIMIT)
