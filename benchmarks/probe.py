"""One side of `benchmarks.compare`: measures what the package on PYTHONPATH costs, whenever it reads a line.

A separate program, run by its path: the same for both sides, whatever benchmarks the other commit has.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer
from celery.beat import Scheduler
from redis import Redis

#: Seconds for which one operation is repeated; entries of beat's schedule, and seconds between their runs.
BUDGET, ENTRIES, INTERVAL = 0.05, 200, 3600.0

#: Seconds that every lock lasts.
TTL = 30.0

#: Prints what it takes to import the package, once its dependencies are imported.
IMPORT = """
import celery.app.task, celery.beat, celery.worker, kombu, redis, time
wall, cpu = time.perf_counter(), time.process_time()
import celery_singleton_lock
celery_singleton_lock.SingletonTask
print(time.perf_counter() - wall, time.process_time() - cpu)
"""

#: Does something that many times, and returns how often it was done.
Work = Callable[[], int]
Turn = Callable[[], Mapping[str, float]]


def main() -> None:
    """Report what can be measured here; then measure all of it for each line that is read."""
    url, *names = sys.argv[1:]
    turns: dict[str, Turn] = {}
    failed: dict[str, str] = {}
    for name in names or FIGURES:
        try:
            turns[name] = FIGURES[name](url)
            turns[name]()
        except Exception:  # noqa: BLE001
            # This commit works in another way; the rest can be compared all the same.
            failed[name] = traceback.format_exc(limit=-1)
            turns.pop(name, None)
    print(json.dumps({"failed": failed}), flush=True)
    for _ in sys.stdin:
        found = {f"{name}, {what}": cost for name, turn in turns.items() for what, cost in turn().items()}
        print(json.dumps(found), flush=True)


def _lock(url: str) -> Turn:
    from celery_singleton_lock import Lock

    client = Redis.from_url(url)

    def pair() -> None:
        lock = Lock(client, "probe", timeout=TTL)
        assert lock.acquire(blocking=False)
        lock.release()

    return _repeated(url, pair)


def _as_task(url: str) -> Turn:
    from celery_singleton_lock import process_identity
    from celery_singleton_lock.holder import Holder, new_owner
    from celery_singleton_lock.lease import Lease
    from celery_singleton_lock.stores import open_url
    from celery_singleton_lock.stores.base import LockRequest, Record

    store, process = open_url(url), process_identity.own()

    def pair() -> None:
        holder = Holder(new_owner(), 0, "worker@host", 1, 0.0, process=process)
        lease = store.acquire(LockRequest("probe:{task}", new_owner(), TTL, holder, check_finished=True))
        assert isinstance(lease, Lease)
        store.free(lease, record=Record(holder.message, b'["SUCCESS", 3600.0, true]\nnull', 60.0))

    return _repeated(url, pair)


def _tracer(url: str) -> Turn:
    from celery_singleton_lock import SingletonTask

    app = Celery("probe", broker="memory://", set_as_current=False)
    app.conf.update(singleton_lock_backend=url, task_ignore_result=True)

    def nothing() -> None: ...

    task = app.task(base=SingletonTask, name="nothing")(nothing)
    app.finalize()
    trace, numbers = build_tracer(task.name, task, app=app), itertools.count()

    def run() -> None:
        number = f"probe-{next(numbers)}"
        trace(number, (), {}, {"id": number, "is_eager": False, "hostname": "worker@host", "delivery_info": {}})

    return _repeated(url, run)


def _beat(url: str) -> Turn:
    from celery_singleton_lock.beat import ExclusiveScheduler

    sent: list[str] = []

    class Quiet(Scheduler):
        def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> None:
            sent.append(entry.name)

    app = Celery("probe", broker="memory://", set_as_current=False)
    app.conf.update(singleton_lock_backend=url, singleton_lock_beat_scheduler=Quiet, result_expires=None)
    app.conf.beat_schedule = {str(number): {"task": "nothing", "schedule": INTERVAL} for number in range(ENTRIES)}
    scheduler, client = ExclusiveScheduler(app, Producer=lambda *args, **kwargs: None), Redis.from_url(url)
    scheduler.tick()

    def send_all() -> int:
        scheduler.tick()  # Records what was sent last.
        client.flushdb()
        for entry in scheduler.schedule.values():
            entry.last_run_at = datetime.now(timezone.utc) - timedelta(seconds=INTERVAL + 1)
        scheduler._heap = None
        sent.clear()
        while len(sent) < ENTRIES:
            scheduler.tick()
        return ENTRIES

    return _counted(url, send_all)


def _import(_: str) -> Turn:
    def turn() -> Mapping[str, float]:
        done = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
        wall, cpu = map(float, done.stdout.split())
        return {"ms": wall * 1e3, "CPU ms": cpu * 1e3}

    return turn


#: What is measured, and the function that does it.
FIGURES: Mapping[str, Callable[[str], Turn]] = {
    "Lock": _lock,
    "as a task locks": _as_task,
    "a task in Celery's tracer": _tracer,
    "beat, each due entry": _beat,
    "import": _import,
}


def _repeated(url: str, once: Callable[[], None]) -> Turn:
    def work() -> int:
        until, count = time.perf_counter() + BUDGET, 0
        while time.perf_counter() < until or not count:
            once()
            count += 1
        return count

    return _counted(url, work)


def _counted(url: str, work: Work) -> Turn:
    """For each time: wall time, CPU time of this process, commands of the server including those within scripts."""
    client = Redis.from_url(url)

    def commands() -> int:
        return int(client.info("stats")["total_commands_processed"])  # type: ignore[index]

    def turn() -> Mapping[str, float]:
        before, wall, cpu = commands(), time.perf_counter(), time.process_time()
        count = work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        # One of them was the look itself.
        sent = commands() - before - 1
        return {"µs": wall / count * 1e6, "CPU µs": cpu / count * 1e6, "server's commands": sent / count}

    return turn


if __name__ == "__main__":
    main()
