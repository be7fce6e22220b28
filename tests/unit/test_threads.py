"""What is to be done later needs a thread, which cannot always start: no message fails for that."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from celery_singleton_lock import DuplicateTask
from tests.bench import Bench
from tests.patience import LIMIT

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
