"""What is to be done later needs a thread, which cannot always start: no message fails for that."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import pytest

from celery_singleton_lock import DuplicateTask, clock
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.memory import MemoryStore
from tests.bench import Bench
from tests.patience import LIMIT, until

#: Leases that are lost at once.
MANY = 50

IN_HUB = {
    "gevent": "import gevent.monkey; gevent.monkey.patch_all(); in_hub = gevent.get_hub().loop.run_callback",
    "eventlet": "eventlet.monkey_patch(); in_hub = lambda do: eventlet.hubs.get_hub().schedule_call_global(0, do)",
}


@pytest.mark.parametrize("library", IN_HUB)
def test_message_is_sent_in_the_hub_of_greenlets(library: str) -> None:
    """In the handler of a signal, for example, which cannot wait there for a thread to begin."""
    program = f"""
import {library}
{IN_HUB[library]}
import time
from celery import Celery
from celery_singleton_lock import SingletonTask
app = Celery("hub", broker="memory://", singleton_lock_backend="memory://")
@app.task(base=SingletonTask, name="report", lock_scope="until_executed")
def report(): ...
sent = []
in_hub(lambda: sent.append(report.delay().id))
until = time.monotonic() + 60
while not sent and time.monotonic() < until:
    time.sleep(0.01)
print(len(sent))
"""
    ran = subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT, capture_output=True, text=True)
    assert ran.stdout == "1\n"


def test_messages_end_and_are_sent_where_no_thread_can_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    task = bench.task(lambda: monkeypatch.setattr(threading.Thread, "start", fail))  # Its own lease is renewed by then.
    other = bench.task(lock_scope="until_executed", on_duplicate="raise")
    assert bench.deliver(bench.send(task)) is None
    sent = bench.send(other)
    with pytest.raises(DuplicateTask):
        other.delay()
    monkeypatch.undo()
    assert bench.deliver(sent) == "ran"


def test_all_bodies_are_stopped_before_threads_start_to_tell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts when busy bodies let it: hundreds take longer than their leases last."""
    starts, beating, stopped, told = threading.Thread.start, Heartbeat(MemoryStore()), set[str](), list[str]()
    keys = [f"k{number}" for number in range(MANY)]

    def start(thread: threading.Thread) -> None:
        if thread.name == "singleton-lock-lost" and threading.current_thread().name == "singleton-lock-watchdog":
            assert stopped == {*keys}
        starts(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    leases = [Lease(key, new_owner(), ttl=6.0, fence=1, sent_at=clock.now()) for key in keys]  # The store has none.
    for lease in leases:
        beating.start(lease, lambda lost: told.append(lost.key), stop=partial(stopped.add, lease.key))
    beating.renew_now()
    until(lambda: {*told} == {*keys}, "all are told")
    assert len(told) == MANY
    for lease in leases:
        beating.stop(lease)


class Execution:
    """It is gone as soon as it was stopped."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def on_lost(self, lease: Lease) -> None:
        self.told.append(lease.key)


def test_loss_of_an_execution_that_ends_at_once_is_told() -> None:
    beating, told, running = Heartbeat(MemoryStore()), list[str](), list[Execution]()
    running.append(Execution(told))
    lease = Lease("k", new_owner(), ttl=6.0, fence=1, sent_at=clock.now())  # The store has none.
    beating.start(lease, running[0].on_lost, stop=running.clear)
    beating.renew_now()
    until(lambda: told == ["k"], "it is told")
    beating.stop(lease)
