"""What each way to lock a Celery task does when things go wrong: the same events for all, on real workers and Redis.

    python -m benchmarks.task_race [--write docs/compared.md]

Every cell of the table is what was seen, not what is known. Each contestant has two workers, a broker and a lock server
of its own, and each event a job of its own: the same task with the same arguments, again and again.
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
from pathlib import Path
from typing import Any

from celery import Celery, chain
from typing_extensions import Self

from benchmarks.measure import server_version
from benchmarks.race import tell
from benchmarks.task_race_app import CONTESTANT, CONTESTANTS, HOST, LONG, TIMEOUT, make, over, settings
from celery_singleton_lock import clock
from celery_singleton_lock.testing import RedisServer
from tests.integration.workers import Worker, environment
from tests.recording import Record, Run

#: Seconds after its timeout at which a lock that is still held is stuck.
MARGIN = 3.0

#: Seconds for what happens at once if it happens at all.
MOMENT = 2.0

#: Seconds from one copy to the next where they are sent again and again.
PACE = 0.2

#: Contestants at the same time: they wait most of it.
TOGETHER = 4

#: Of a broker that takes a message which was not acknowledged for two seconds for lost (kombu 5.7).
FORGETFUL = {"visibility_timeout": 2, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}

PACKAGES = ("celery-singleton", "celery-once", "celery-heimdall", "celery", "redis")


class Course:
    """One contestant, with workers "one" and "two": each takes from a queue of its name, and from one for both."""

    def __init__(self, contestant: str, exits: ExitStack, **conf: Any) -> None:
        self._exits, self._directory = exits, Path(exits.enter_context(tempfile.TemporaryDirectory()))
        broker, self.locks = exits.enter_context(RedisServer()), exits.enter_context(RedisServer())
        # Results unsubscribe when they are forgotten, which takes a server.
        exits.callback(gc.collect)
        conf = {"broker_url": broker.url_of(0), "result_backend": broker.url_of(1), **settings(self.locks.url), **conf}
        self.record = Record(self._directory / "record")
        self._environment = environment(conf, events=broker.url_of(2), record=self.record.path)
        self._environment[CONTESTANT] = contestant
        self.app = make(contestant, conf)
        self.stranger = Celery("stranger", set_as_current=False)
        self.stranger.conf.update(conf)
        self.workers: dict[str, Worker] = {}
        self.start("one", "two")

    def start(self, *names: str, host: str = "here") -> None:
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


@dataclass(frozen=True)
class Job:
    """One task with the same arguments, again and again. Its runs end when it does."""

    course: Course
    name: str
    task: str = "work"
    seconds: float = LONG

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        over(self.course.record.path, self.name).touch()

    def send(self, queue: str, **options: Any) -> Any:
        """As a program does that has the task's code."""
        return self.course.app.tasks[self.task].apply_async([self.name, self.seconds], queue=queue, **options)

    def runs(self) -> list[Run]:
        return self.course.record.runs(self.name)

    def begin(self, queue: str = "one") -> tuple[Run, Any]:
        """The first run, and its result."""
        result = self.send(queue)
        return self.course.record.wait_for(starts=1, job=self.name)[0], result

    def next_run(self, to: str = "two", within: float = TIMEOUT + MARGIN) -> Run | None:
        """Send copies to another worker until a run begins there."""
        before, deadline = len(self.runs()), clock.now() + within
        while clock.now() < deadline:
            self.send(to)
            if seen(lambda: len(self.runs()) > before, PACE):
                return self.runs()[before]
        return None

    def again(self, since: float, to: str = "two") -> str:
        """How long after that moment it can be had again."""
        run = self.next_run(to)
        return after(run.start - since) if run else "stuck"


def seen(true: Callable[[], object], seconds: float) -> bool:
    """Whether it is so within this time."""
    deadline = clock.now() + seconds
    while not true():
        if clock.now() > deadline:
            return False
        clock.sleep(0.02)
    return True


def after(seconds: float) -> str:
    return f"after {seconds:.1f} s" if seconds > PACE else "at once"


def at_once(runs: list[Run]) -> str:
    """The most that ran at the same time."""
    return f"{max(sum(run.start <= begun.start < run.end for run in runs) for begun in runs)} at once"


def two_copies(course: Course) -> Mapping[str, str]:
    """Sent at once, one for each worker."""
    with Job(course, "two") as job:
        first, second = job.send("one"), job.send("two")
        running = _at_once_of_two(job)
    return {"two copies are sent": running, "… and the sender of the second sees": _seen_by(job, first, second)}


def _at_once_of_two(job: Job) -> str:
    job.course.record.wait_for(starts=1, job=job.name)
    seen(lambda: len(job.runs()) > 1, MOMENT)
    return at_once(job.runs())


def _seen_by(job: Job, first: Any, second: Any) -> str:
    first.get(timeout=MARGIN)
    if second.id == first.id:
        return "the first's result"
    return _outcome(job, second, second.id)


def _outcome(job: Job, result: Any, task_id: str) -> str:
    """The state in the end, and whether the copy of this id was carried out."""
    state = str(result.state) if seen(result.ready, MARGIN) else f"{result.state} for ever"
    return state if any(run.task_id == task_id for run in job.runs()) else f"{state}, not run"


def sent_by_name(course: Course) -> str:
    """By a program that has not got the task's code."""
    with Job(course, "named") as job:
        for queue in ("one", "two"):
            course.stranger.send_task(job.task, [job.name, job.seconds], queue=queue)
        return _at_once_of_two(job)


def long_run(course: Course) -> Mapping[str, str]:
    """It takes half as long again as its lock lasts, and does its end free the lock of the second?"""
    running, freed = "runs 1.5 times the timeout", "… and its end frees the second's lock"
    with Job(course, "long", seconds=1.5 * TIMEOUT) as job:
        first, _ = job.begin()
        second = job.next_run()
        seen(lambda: job.runs()[0].outcome != "open", 2 * TIMEOUT)
        # The second's lock would last longer than this.
        third = job.next_run(within=0.4 * TIMEOUT)
        found = at_once(job.runs())
    overtaken = second and first.start + TIMEOUT / 2 < second.start < job.runs()[0].end
    return {running: found, freed: ("yes" if third else "no") if overtaken else "–"}


def killed_worker(course: Course) -> str:
    """SIGKILL to all of its processes while it runs the job."""
    with Job(course, "killed") as job:
        job.begin()
        course.workers["one"].kill()
        found = job.again(clock.now())
    course.start("one")
    return found


def gone_host(course: Course) -> str:
    """All that is on it is killed, and the next worker is on another."""
    course.start("three", host="another")
    with Job(course, "gone") as job:
        job.begin()
        for name in ("one", "two"):
            course.workers[name].kill()
        found = job.again(clock.now(), to="three")
    course.workers["three"].kill()
    course.start("one", "two")
    return found


def killed_child(course: Course) -> str:
    """SIGKILL to the process that runs the job, as by the kernel when memory runs out."""
    with Job(course, "child") as job:
        first, _ = job.begin()
        os.kill(first.pid, signal.SIGKILL)
        return job.again(clock.now())


def killed_child_of_late(course: Course) -> str:
    """The same, and the message goes back to the queue."""
    with Job(course, "late child", task="late") as job:
        first, result = job.begin()
        os.kill(first.pid, signal.SIGKILL)
        return "run again" if seen(lambda: len(job.runs()) > 1, TIMEOUT + MARGIN) else f"lost: {result.state}, not run"


def delivered_again(course: Course) -> str:
    """The broker of this course takes what runs for longer than two seconds for lost."""
    with Job(course, "again", task="late", seconds=8.0) as job:
        _, result = job.begin("celery")
        early = seen(result.ready, job.seconds - 1)
        return at_once(job.runs()) + (f", but {result.state} while it runs" if early else "")


def queued(course: Course) -> str:
    """Three copies, to a queue from which nobody takes."""
    with Job(course, "queued") as job:
        for _ in range(3):
            job.send("nowhere")
        return str(_purge(course))


def purged(course: Course) -> str:
    """The queue is, before a worker has the message."""
    with Job(course, "purged") as job:
        job.send("nowhere")
        _purge(course)
        return job.again(clock.now())


def _purge(course: Course) -> int:
    """How many messages there were."""
    with course.app.connection_for_write() as connection:
        return int(connection.default_channel.queue_purge("nowhere"))


def revoked(course: Course) -> str:
    """Before it is due."""
    with Job(course, "revoked") as job:
        job.send("one", countdown=1).revoke()
        return job.again(clock.now())


def retried(course: Course) -> Mapping[str, str]:
    """Twice, by `self.retry()`."""
    with Job(course, "retried", task="retrying", seconds=0.1) as job:
        job.send("one")
        for attempts in (1, 2, 3):
            if not seen(lambda attempts=attempts: sum(run.outcome != "open" for run in job.runs()) == attempts, MOMENT):
                break
        runs = job.runs()
        return {
            "retries twice by `self.retry()`": f"{len(runs)} of 3 attempts",
            "… and can then be sent again": job.again(runs[-1].end),
        }


def stopped_worker(course: Course) -> str:
    """SIGSTOP to all of its processes past the timeout, and SIGCONT."""
    with Job(course, "stopped") as job:
        _, result = job.begin()
        course.workers["one"].pause()
        second = job.next_run()
        course.workers["one"].resume()
        return _fate(job, result, second)


def emptied(course: Course) -> str:
    """The lock server is restarted, and has kept nothing."""
    with Job(course, "emptied") as job:
        _, result = job.begin()
        course.locks.restart()
        return _fate(job, result, job.next_run())


def _fate(job: Job, result: Any, second: Run | None) -> str:
    """Of the first run, from when there are two that go on."""
    since = clock.now()
    if not second:
        return "no second run"
    if seen(lambda: job.runs()[0].outcome != "open", TIMEOUT):
        return f"first is stopped {after(job.runs()[0].end - since)}"
    job.end()
    result.get(timeout=MARGIN, propagate=False)
    told = f"told at its end: {type(result.result).__name__}" if result.failed() else "never told"
    return f"both go on, {told}"


def in_a_chain(course: Course) -> str:
    """A copy is the second of three steps while the job runs."""
    step, work = (course.app.tasks[name] for name in ("step", "work"))
    with Job(course, "chain") as job:
        job.begin()
        last = chain(step.si(), work.si(job.name, job.seconds), step.si()).apply_async()
        # Celery stores a step's result when it has sent the next one.
        last.parent.parent.get(timeout=LONG)
        seen(last.ready, MOMENT)
    return _outcome(job, last, last.parent.id)


def usual(course: Course) -> dict[str, str]:
    """All events but one."""
    return {
        **two_copies(course),
        "two copies are sent by name": sent_by_name(course),
        "three copies are sent: messages in the queue": queued(course),
        "message lost: can be sent again": purged(course),
        "revoked before it runs: can be sent again": revoked(course),
        "copy in a chain while the first runs: the chain": in_a_chain(course),
        **retried(course),
        **long_run(course),
        "worker killed: can be run again": killed_worker(course),
        "its whole host gone: can be run again": gone_host(course),
        "child killed: can be run again": killed_child(course),
        "child killed, its message goes back": killed_child_of_late(course),
        "worker stopped past the timeout, goes on": stopped_worker(course),
        "lock server restarts empty": emptied(course),
    }


def forgetful(course: Course) -> dict[str, str]:
    """That which takes such a broker."""
    return {"broker delivers it again while it runs": delivered_again(course)}


#: What happens, and the settings that it takes.
COURSES: Mapping[Callable[[Course], dict[str, str]], Mapping[str, Any]] = {
    usual: {},
    forgetful: {"broker_transport_options": FORGETFUL},
}


def judge(contestant: str, events: Callable[[Course], dict[str, str]]) -> dict[str, str]:
    """These events for this contestant."""
    print(f"{contestant}: {events.__name__}", file=sys.stderr)
    with ExitStack() as exits:
        return events(Course(contestant, exits, **COURSES[events]))


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """In Markdown: a row for each event, a column for each contestant."""
    events = [*next(iter(found.values()))]
    lines = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    lines += [f"| {event} | {' | '.join(cells[event] for cells in found.values())} |" for event in events]
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES)
    about = f"locks last {TIMEOUT} s; {versions}, Redis {server_version()}, Python {platform.python_version()}"
    return "\n".join([*lines, "", f"({about}.)"])


def main() -> None:
    """Judge each contestant, some at the same time."""
    tell(__doc__, judge_all)


def judge_all() -> str:
    """The table, a column for each contestant."""
    runs = [(contestant, events) for events in COURSES for contestant in CONTESTANTS]
    # Each in a process of its own, since some packages keep their client for as long as that lives.
    with multiprocessing.get_context("spawn").Pool(TOGETHER, maxtasksperchild=1) as pool:
        cells = pool.starmap(judge, runs, chunksize=1)
    found: dict[str, dict[str, str]] = {contestant: {} for contestant in CONTESTANTS}
    for (contestant, _), row in zip(runs, cells, strict=True):
        found[contestant].update(row)
    return table(found)


if __name__ == "__main__":
    main()
