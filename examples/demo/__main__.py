"""The package at work: two workers, many copies of one exclusive job, a crash, and a verdict.

Starts its own Redis and two real Celery workers, publishes from three processes, kills one worker with SIGKILL in
the middle of the exclusive job, and draws who ran when. The exit status is 1 if a promise was not kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from redis import Redis
from rich.console import Console

from celery_singleton_lock import clock
from celery_singleton_lock.testing import RedisServer

console = Console(width=max(Console().width, 110))

#: Seconds before the kill, and at most after it.
BEFORE, AFTER = 3.0, 6.0


def main() -> int:
    with ExitStack() as exits:
        server = exits.enter_context(RedisServer())
        os.environ["DEMO_REDIS"] = server.url
        # Import this only now: the tasks' module reads the address.
        from examples.demo import tasks, timeline

        console.print(f"Redis at {server.url}; two workers with two slots each; three publishers …")
        one = exits.enter_context(started("celery", "-A", "examples.demo.tasks", *worker("one")))
        exits.enter_context(started("celery", "-A", "examples.demo.tasks", *worker("two")))
        record = server.client()
        if not until(lambda: record.llen("ready") == 2, 30.0):
            console.print("[red]the workers did not start")
            return 1
        for _ in range(3):
            exits.enter_context(started("examples.demo.publish"))

        clock.sleep(BEFORE)
        wait_until_it_runs_on(record, "one@demo")
        os.killpg(one.pid, signal.SIGKILL)
        killed_at = clock.now()
        console.print("worker one: SIGKILL, in the middle of the exclusive job")
        taken_at = wait_for_next_start(record, killed_at)
        clock.sleep(2.0)
        record.set("stop", 1)
        clock.sleep(1.5)
        runs, skipped = timeline.read([line.encode() for line in record.lrange("record", 0, -1)], killed_at)

    timeline.draw(console, runs, skipped, killed_at)
    plain, exclusive = timeline.overlaps(runs, "plain job"), timeline.overlaps(runs, "report")
    reports = sum(run.job == "report" for run in runs)
    after = taken_at - killed_at if taken_at else float("inf")
    console.print(f"\nplain job:  {plain} overlaps")
    console.print(f"exclusive:  {exclusive} overlaps in {reports} runs; {len(skipped)} copies skipped")
    console.print(f"after the kill: the next run began {after:.1f} s later (the lock's ttl is {tasks.TTL:g} s)")
    good = plain > 0 and exclusive == 0 and reports > 2 and after <= tasks.TTL + 1.0
    console.print("[bold green]as promised: never twice at the same time" if good else "[bold red]NOT as promised")
    return 0 if good else 1


def worker(name: str) -> tuple[str, ...]:
    return ("worker", "-n", f"{name}@demo", "-c", "2", "-l", "CRITICAL", "--without-mingle", "--without-gossip")


@contextmanager
def started(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python program in its own process group, killed with its children at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(true: Callable[[], bool], seconds: float) -> bool:
    """Wait until `true` returns True, for at most that many seconds; return whether it did."""
    deadline = clock.now() + seconds
    while not true() and clock.now() < deadline:
        clock.sleep(0.02)
    return true()


def wait_until_it_runs_on(record: Redis, worker_name: str) -> None:
    """Wait until the exclusive job begins on that worker; only starts that are recorded from now on count."""
    for event in follow(record, 30.0):
        if event["event"] == "start" and event["job"] == "report" and event["worker"] == worker_name:
            return


def wait_for_next_start(record: Redis, since: float) -> float | None:
    """Wait for the exclusive job to begin again, and return when; None if it did not."""
    for event in follow(record, AFTER):
        if event["event"] == "start" and event["job"] == "report" and event["at"] > since:
            return float(event["at"])
    return None


def follow(record: Redis, seconds: float) -> Iterator[dict[str, object]]:
    """New events as they are written."""
    seen, deadline = record.llen("record"), clock.now() + seconds
    while clock.now() < deadline:
        for line in record.lrange("record", seen, -1):
            seen += 1
            yield json.loads(line)
        clock.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
