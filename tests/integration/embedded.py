"""Starts and stops a worker in this process several times, and prints what is left after each.

Run as a program: `python -m tests.integration.embedded POOL URL`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from contextlib import suppress
from weakref import ref

from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.result import allow_join_result
from celery.worker import state
from redis import Redis

from celery_singleton_lock import SingletonTask, clock
from celery_singleton_lock.testing import hold_lock
from tests.patience import LIMIT

LIVES = 3


def left(apps: list[ref[Celery]]) -> dict[str, object]:
    """What there is, as soon as no thread of this package is left."""
    deadline = clock.now() + LIMIT
    while (threads := _threads()) and clock.now() < deadline:
        clock.sleep(0.05)
    gc.collect()
    alive = sum(app() is not None for app in apps)
    return {"threads": threads, "pipes": _pipes(), "apps": alive}


def live(pool: str, url: str, apps: list[ref[Celery]]) -> None:
    """One run, and a copy that waits for its lock as the worker ends."""
    app = Celery("embedded", broker=url, backend=url)
    app.conf.worker_hijack_root_logger = False
    apps.append(ref(app))

    @app.task(base=SingletonTask, on_conflict="retry", bind=True)
    def work(task: SingletonTask, job: str) -> str:
        return job

    with (
        Redis.from_url(url) as client,
        # Until the worker has stopped: a copy that is begun as it stops is waited for, by billiard, for 30 seconds.
        hold_lock(work, "held"),
        start_worker(app, pool=pool, perform_ping_check=False, loglevel="CRITICAL", shutdown_timeout=LIMIT),
    ):
        with allow_join_result():
            assert work.delay("done").get(timeout=LIMIT) == "done"
        work.delay("held").forget()
        deadline = clock.now() + LIMIT
        # Celery's pool hangs if it is stopped while a child writes to it what came of a message.
        while state.active_requests or not [*client.scan_iter("*:waiting")]:
            assert clock.now() < deadline
            clock.sleep(0.05)
    app.backend.result_consumer.stop()
    app.close()


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("singleton-lock"))


def _pipes() -> int:
    """Sockets are Celery's as well, whose clients keep some more or less."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The one of the listing itself.
            found += os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
    return found


if __name__ == "__main__":
    _, pool, url = sys.argv
    apps: list[ref[Celery]] = []
    for _ in range(LIVES):
        live(pool, url, apps)
        with Redis.from_url(url) as client:
            client.flushdb()
        print(json.dumps(left(apps)), flush=True)
