"""How each way to lock a Celery task behaves when things go wrong: the same events for all, on real workers and Redis.

    python -m benchmarks.task_race [--write benchmarks/results/packages.md]

Every cell of the table shows what was observed, not what is known. Each contestant has its own two workers, broker and
lock server, and each event has its own job: the same task with the same arguments, over and over.
"""

from __future__ import annotations

import gc
import importlib.metadata
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from celery import Celery, chain

from benchmarks.measure import server_version
from benchmarks.page import table, tell
from benchmarks.task_race_app import CONTESTANT, HOST, LONG, TIMEOUT, make, over
from benchmarks.tasks import RACERS, settings
from celery_singleton_lock import clock
from tests import programs
from tests.integration.workers import Worker, environment
from tests.recording import Record, Run
from tests.redis_server import RedisServer

#: Seconds after its timeout when a lock that is still held counts as stuck.
MARGIN = 3.0

#: Seconds to wait for something that happens at once if it happens at all.
MOMENT = 2.0

#: Seconds from one copy to the next when copies are sent over and over.
PACE = 0.2

#: Columns beside the first one: packages that lock when a task is sent in one table, the others in the next.
BESIDE = 4

#: How many contestants run at the same time: most of the time they wait.
TOGETHER = 4

#: Options of a usual broker, and of one that delivers a message again after two seconds without ack (kombu 5.7).
USUAL: Mapping[str, Any] = {}
FORGETFUL = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}

PACKAGES = ("celery-singleton", "celery-once", "celery-heimdall", "celery", "redis")


class Course:
    """One contestant, with workers "one" and "two": each takes from a queue with its name, and from one for both."""

    def __init__(self, contestant: str, exits: ExitStack, **conf: Any) -> None:
        self._exits, self._directory = exits, Path(exits.enter_context(tempfile.TemporaryDirectory()))
        broker, self.locks = exits.enter_context(RedisServer()), exits.enter_context(RedisServer())
        # Results unsubscribe when they are garbage-collected, which needs the server.
        exits.callback(gc.collect)
        own = settings(self.locks.url, TIMEOUT)
        conf = {"broker_url": broker.url_of(0), "result_backend": broker.url_of(1), **own, **conf}
        self.record = Record(self._directory / "record")
        self._environment = environment(conf, events=broker.url_of(2), record=self.record.path)
        # Celery reads these variables when it is imported, so each program starts afresh, and is not forked.
        self._environment |= {CONTESTANT: contestant, "C_FORCE_ROOT": "1"}
        self.app = make(contestant, conf)
        self.stranger = Celery("stranger", set_as_current=False)
        self.stranger.conf.update(conf)
        self.workers: dict[str, Worker] = {}
        self.start("one", "two")

    def start(self, *names: str, host: str = "here") -> None:
        """Start workers, and wait until they are ready."""
        for name in names:
            worker = Worker(
                name,
                directory=self._directory,
                environment={**self._environment, HOST: host},
                concurrency=4,
                app="benchmarks.task_race_app",
                arguments=("-Q", f"{name},celery"),
            )
            self.workers[name] = self._exits.enter_context(worker)
        for name in names:
            self.workers[name].wait_until_ready()

    def send_and_die(self, job: Job) -> None:
        """Send from a process that kills itself just before its message leaves."""
        arguments = [job.task, job.name, str(job.seconds)]
        sender = programs.start(
            "benchmarks.task_race_sender",
            arguments,
            environment={**self._environment, HOST: "here"},
            output=self._directory / "sender.log",
        )
        if sender.wait(LONG) != -signal.SIGKILL:
            raise RuntimeError((self._directory / "sender.log").read_text())

    def purge(self) -> int:
        """Empty the queue from which nobody takes; return how many messages there were."""
        with self.app.connection_for_write() as connection:
            return int(connection.default_channel.queue_purge("nowhere"))


@dataclass(frozen=True)
class Job:
    """One task with the same arguments, over and over."""

    course: Course
    name: str
    task: str
    seconds: float

    def end(self) -> None:
        """End all runs of the job."""
        over(self.course.record.path, self.name).touch()

    def send(self, queue: str, **options: Any) -> Any:
        """Send the task, like a program that has the task's code."""
        return self.course.app.tasks[self.task].apply_async([self.name, self.seconds], queue=queue, **options)

    @property
    def runs(self) -> list[Run]:
        return self.course.record.runs(self.name)

    @property
    def has_ended(self) -> bool:
        """Whether its first run has ended."""
        return self.runs[0].outcome != "open"

    def begin(self, queue: str = "one") -> tuple[Run, Any]:
        """Start the first run; return it and its result."""
        result = self.send(queue)
        return self.course.record.wait_for(starts=1, job=self.name)[0], result

    def next_run(self, to: str = "two", within: float = TIMEOUT + MARGIN) -> Run | None:
        """Send copies to another worker until a run begins there."""
        before, deadline = len(self.runs), clock.now() + within
        while clock.now() < deadline:
            self.send(to)
            if seen(lambda: len(self.runs) > before, PACE):
                return self.runs[before]
        return None

    def again(self, since: float, to: str = "two") -> str:
        """How long after that moment the job can run again."""
        run = self.next_run(to)
        return after(run.start - since) if run else "stuck"

    def at_once(self) -> str:
        """The most that ran at the same time."""
        runs = self.runs
        return f"{max(sum(run.start <= begun.start < run.end for run in runs) for begun in runs)} at once"

    def at_once_of_two(self) -> str:
        self.course.record.wait_for(starts=1, job=self.name)
        seen(lambda: len(self.runs) > 1, MOMENT)
        return self.at_once()

    def outcome(self, result: Any, task_id: str) -> str:
        """The final state, and whether the copy with this id was carried out."""
        state = str(result.state) if seen(result.ready, MARGIN) else f"{result.state} forever"
        return state if any(run.task_id == task_id for run in self.runs) else f"{state}, not run"

    def fate(self, result: Any, second: Run | None) -> str:
        """What happens to the first run once a second one has begun."""
        since = clock.now()
        if not second:
            return "no second run"
        if seen(lambda: self.has_ended, TIMEOUT):
            return f"first is stopped {after(self.runs[0].end - since)}"
        self.end()
        result.get(timeout=MARGIN, propagate=False)
        noticed = f"noticed at the end: {type(result.result).__name__}" if result.failed() else "never noticed"
        return f"both go on, {noticed}"


def seen(true: Callable[[], object], seconds: float) -> bool:
    """Wait until it is true, for at most this time; return whether it was."""
    deadline = clock.now() + seconds
    while not true():
        if clock.now() > deadline:
            return False
        clock.sleep(0.02)
    return True


def after(seconds: float) -> str:
    return f"after {seconds:.1f} s" if seconds > PACE else "at once"


Event = Callable[[Course], Any]

#: Each with the broker options that it needs, and the row that it fills; an event that fills several rows has no name.
EVENTS: list[tuple[Mapping[str, Any], str, Event]] = []


def event(
    row: str = "", *, task: str = "work", seconds: float = LONG, broker: Mapping[str, Any] = USUAL
) -> Callable[[Callable[[Job], Any]], Event]:
    """Decorate an event, which happens to its own job with this task."""

    def decorate(happen: Callable[[Job], Any]) -> Event:
        @wraps(happen)
        def judged(course: Course) -> Any:
            job = Job(course, happen.__name__, task, seconds)
            try:
                return happen(job)
            finally:
                job.end()

        EVENTS.append((broker, row, judged))
        return judged

    return decorate


@event()
def two_copies(job: Job) -> Mapping[str, str]:
    """Both are sent at once, one to each worker."""
    first, second = job.send("one"), job.send("two")
    running = job.at_once_of_two()
    job.end()
    first.get(timeout=MARGIN, propagate=False)
    # A worker may get to the second one first.
    ran = {run.task_id for run in job.runs}
    refused = next((result for result in (second, first) if result.id not in ran), second)
    told = "the first's result" if second.id == first.id else job.outcome(refused, refused.id)
    return {"two copies are sent": running, "… and the sender of the second sees": told}


@event("two copies are sent by name")
def sent_by_name(job: Job) -> str:
    """A program sends them that does not have the task's code."""
    for queue in ("one", "two"):
        job.course.stranger.send_task(job.task, [job.name, job.seconds], queue=queue)
    return job.at_once_of_two()


@event("ten copies are sent: messages in the queue")
def queued(job: Job) -> str:
    """They are sent to a queue from which nobody takes."""
    for _ in range(10):
        job.send("nowhere")
    return str(job.course.purge())


@event("message lost, or purged: can be sent again")
def purged(job: Job) -> str:
    """The queue is emptied before a worker has the message."""
    job.send("nowhere")
    job.course.purge()
    return job.again(clock.now())


@event("revoked 1 s before it is due: can be sent again")
def revoked(job: Job) -> str:
    """This happens while a worker holds the message."""
    job.send("one", countdown=1).revoke()
    return job.again(clock.now())


@event("expires 0.5 s before it is due: can be sent again")
def expired(job: Job) -> str:
    """This happens while a worker holds the message."""
    job.send("one", countdown=1, expires=0.5)
    return job.again(clock.now())


@event("its sender is killed before the message has left: can be sent again")
def killed_sender(job: Job) -> str:
    """The sender is killed when it has the lock, if it takes one."""
    job.course.send_and_die(job)
    return job.again(clock.now())


@event("copy in a chain while the first runs: the chain")
def in_a_chain(job: Job) -> str:
    """The copy is the second of three steps."""
    step, work = (job.course.app.tasks[name] for name in ("step", "work"))
    job.begin()
    last = chain(step.si(), work.si(job.name, job.seconds), step.si()).apply_async()
    # Celery stores a step's result when it has sent the next one.
    last.parent.parent.get(timeout=LONG)
    seen(last.ready, MOMENT)
    job.end()
    return job.outcome(last, last.parent.id)


@event(task="retrying", seconds=0.1)
def retried(job: Job) -> Mapping[str, str]:
    """The task retries twice by `self.retry()`."""
    job.send("one")
    for attempts in (1, 2, 3):
        if not seen(lambda attempts=attempts: sum(run.outcome != "open" for run in job.runs) == attempts, MOMENT):
            break
    runs = job.runs
    return {
        "retries twice by `self.retry()`": f"{len(runs)} of 3 attempts",
        "… and can then be sent again": job.again(runs[-1].end),
    }


@event(seconds=1.5 * TIMEOUT)
def long_run(job: Job) -> Mapping[str, str]:
    """The run takes half as long again as its lock lasts. Does its end free the lock of the second run?"""
    first, _ = job.begin()
    second = job.next_run()
    seen(lambda: job.has_ended, 2 * TIMEOUT)
    # The lock of the second run would last longer than this.
    third = job.next_run(within=0.4 * TIMEOUT)
    overtaken = second and first.start + TIMEOUT / 2 < second.start < job.runs[0].end
    freed = ("yes" if third else "no") if overtaken else "–"
    return {"runs 1.5 times the timeout": job.at_once(), "… and its end frees the second's lock": freed}


@event("worker killed: can be run again")
def killed_worker(job: Job) -> str:
    """SIGKILL to all processes of the worker while it runs the job."""
    job.begin()
    job.course.workers["one"].kill()
    found = job.again(clock.now())
    job.end()
    job.course.start("one")
    return found


@event("its whole host gone: can be run again")
def gone_host(job: Job) -> str:
    """All processes of the host are killed, and the next worker is on another host."""
    course = job.course
    course.start("three", host="another")
    job.begin()
    for name in ("one", "two"):
        course.workers[name].kill()
    found = job.again(clock.now(), to="three")
    job.end()
    course.workers["three"].kill()
    course.start("one", "two")
    return found


@event("child killed: can be run again")
def killed_child(job: Job) -> str:
    """SIGKILL to the process that runs the job, as the kernel does when memory runs out."""
    first, _ = job.begin()
    os.kill(first.pid, signal.SIGKILL)
    return job.again(clock.now())


@event("child killed, its message goes back", task="late")
def killed_child_of_late(job: Job) -> str:
    """The message goes back to the queue, since it is acknowledged late."""
    first, result = job.begin()
    os.kill(first.pid, signal.SIGKILL)
    return "run again" if seen(lambda: len(job.runs) > 1, TIMEOUT + MARGIN) else f"lost: {result.state}, not run"


@event("worker stopped past the timeout, goes on")
def stopped_worker(job: Job) -> str:
    """SIGSTOP to all processes of the worker past the timeout, and then SIGCONT."""
    _, result = job.begin()
    job.course.workers["one"].pause()
    second = job.next_run()
    job.course.workers["one"].resume()
    return job.fate(result, second)


@event("lock server restarts empty")
def emptied(job: Job) -> str:
    """The lock server restarts, and has kept nothing."""
    _, result = job.begin()
    job.course.locks.restart()
    return job.fate(result, job.next_run())


@event("broker delivers it again while it runs", task="late", seconds=8.0, broker=FORGETFUL)
def delivered_again(job: Job) -> str:
    """The task runs for longer than the broker's visibility timeout."""
    _, result = job.begin("celery")
    early = seen(result.ready, job.seconds - 1)
    return job.at_once() + (f", but {result.state} while it runs" if early else "")


def judge(contestant: str, broker: Mapping[str, Any]) -> dict[str, str]:
    """All events with this broker for this contestant."""
    rows: dict[str, str] = {}
    with ExitStack() as exits:
        course = Course(contestant, exits, broker_transport_options=broker)
        for of, row, judged in EVENTS:
            if of == broker:
                print(f"{contestant}: {judged.__name__}", file=sys.stderr)
                found = judged(course)
                rows |= found if isinstance(found, Mapping) else {row: found}
    return rows


def judge_all() -> str:
    """The whole table, with a column for each contestant; some of them run at the same time."""
    runs = [(contestant, broker) for broker in (USUAL, FORGETFUL) for contestant in RACERS]
    # Each in its own process, since some packages keep their client for the life of the process.
    with multiprocessing.get_context("spawn").Pool(TOGETHER, maxtasksperchild=1) as pool:
        cells = pool.starmap(judge, runs, chunksize=1)
    found: dict[str, dict[str, str]] = {contestant: {} for contestant in RACERS}
    for (contestant, _), rows in zip(runs, cells, strict=True):
        found[contestant] |= rows
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    about = f"locks last {TIMEOUT} s; {versions}, Redis {server_version()}, Python {platform.python_version()}"
    return table(found, about, beside=BESIDE)


if __name__ == "__main__":
    tell(__doc__, judge_all)
