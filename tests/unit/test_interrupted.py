"""Signal handlers at any line: those that raise (a soft time limit, Ctrl-C, an abort), and a cold shutdown's."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from unittest.mock import Mock

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.in_bulk import Records
from celery_singleton_lock.journal.writer import JournalWriter
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task import reports
from celery_singleton_lock.worker.children import Children
from celery_singleton_lock.worker.line import Line

#: The number of interruptions.
TIMES = 2000

#: Seconds until the next signal, if what the first one raises is lost: Python ignores it in a callback of the garbage
#: collector, and hypothesis has one.
AGAIN = 0.5


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupt() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Call something repeatedly until a signal interrupts it."""

    def raise_it(*_: object) -> None:
        raise Interrupted

    def interrupt(work: Callable[[], object]) -> None:
        with suppress(Interrupted):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-6, 120e-6), AGAIN)
                while True:
                    work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, raise_it)
    yield interrupt
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Execution:
    def lost(self, lease: Lease) -> None:
        pass


def test_heartbeat_is_never_left_locked(interrupt: Callable[[Callable[[], object]], None]) -> None:
    beating, execution = Heartbeat(MemoryStore()), Execution()
    kept = Lease("kept", new_owner(), ttl=1e6, fence=1, sent_at=clock.now())
    beating.start(kept, execution.lost)
    other = Lease("k", new_owner(), ttl=1e6, fence=1, sent_at=clock.now())
    for _ in range(TIMES):
        interrupt(lambda: beating.stop(other))
    with ThreadPoolExecutor(1) as another:  # This thread could acquire the mutex again even if it held it.
        for job in (beating._renewer, beating._watchdog):
            assert another.submit(job._mutex.acquire, timeout=10).result()
            another.submit(job._mutex.release).result()
    beating.stop(kept)


def test_interrupted_packing_of_a_command_does_not_crash_the_process() -> None:
    """hiredis crashes if a handler raises while it packs a number."""
    program = f"""
import random, signal
from celery_singleton_lock.stores.redis.connection import packed
def handler(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
for _ in range({TIMES}):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-6, 60e-6))
        while True: packed(("EVALSHA", "x" * 40, 3, b"key", *range(10), 1.5))
    except KeyboardInterrupt: pass
    signal.setitimer(signal.ITIMER_REAL, 0)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("which", ["reports", "children", "line", "records", "journal"])
def test_cold_shutdown_uses_what_it_has_interrupted(which: str) -> None:
    """Celery cancels tasks, and hears of their ends, in the handler of the signal: in the worker's main thread."""
    store = MemoryStore()
    if which == "reports":
        ends = is_used_within(reports._mutex.lock, reports.receive)
    elif which == "children":
        family = Children(store, JournalWriter(None, lambda: None, 0), Heartbeat(store).outage)
        ends = is_used_within(family._mutex.lock, lambda: family.free_when_gone(Mock()))
    elif which == "line":
        line = Line(store, lambda _: False, lambda: False, in_loop=True)
        ends = is_used_within(line._mutex.lock, lambda: line.park(Mock(has_begun=True), "k", 0.0, 1))
    elif which == "records":
        records = Records(store)
        ends = is_used_within(records._mutex, lambda: records.replace("k", Record("m", b"", 1.0)))
    else:
        journal = JournalWriter(None, lambda: None, 0)
        entry = Entry("free", "report", "k", None, None, 0, 0.0, 0.0)
        ends = is_used_within(journal._mutex, lambda: journal.add(entry))
    assert ends


def is_used_within(lock: AbstractContextManager[bool], use: Callable[[], object]) -> bool:
    """Whether the call ends in a thread that has the lock already."""

    def interrupted() -> None:
        with lock:
            use()

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()
