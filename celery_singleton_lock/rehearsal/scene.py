"""The set-up for one fault: two workers with a queue each, the messages that are sent to them, and what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import uuid
from celery.signals import before_task_publish

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock._celery import keeps_results
from celery_singleton_lock.diagnosis.held import holds_of
from celery_singleton_lock.rehearsal import witness
from celery_singleton_lock.rehearsal.witness import Line
from celery_singleton_lock.runtime import Runtime

#: The seconds that a worker has to end by itself.
ENDS_IN = 60.0


class RehearsalFailed(Exception):
    """A fault could not be tried: the workers did not start, or the task did not run; with their last output."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """What is rehearsed.

    Attributes:
        task: the user's task.
        send: sends a call of it, with the task's id and queue.
        ttl: the `lock_ttl` of the calls.
        celery: the options of `celery` that name the app.
        pool: the pool of the workers.
        patience: seconds within which everything that should happen must happen.
    """

    task: Any
    send: Callable[..., Any]
    ttl: float
    celery: Sequence[str]
    pool: str
    patience: float


@dataclass
class Outcome:
    """The outcome of a fault.

    Attributes:
        fault: the name of the fault.
        kept: whether all promises were kept; None if the fault was left out.
        runs, overlaps: how often the task's body ran, and how often it overlapped another run.
        recovery: seconds from a kill until the lock was free; None if nothing was killed.
        broken: the promises that were not kept.
        notes: what the options make impossible.
    """

    fault: str
    kept: bool | None = None
    runs: int = 0
    overlaps: int = 0
    recovery: float | None = None
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Scene:
    """One fault's workers and messages.

    Attributes:
        play: what is rehearsed.
        outcome: what is found out.
        directory: the directory of the workers' history and output; its name is in the names of queues and locks.
        queues: the queues of the workers.
        messages: what was sent, by id; a call that was a duplicate already as it was sent is not there.
    """

    def __init__(self, play: Play, outcome: Outcome, directory: Path) -> None:
        self.play, self.outcome, self.directory = play, outcome, directory
        self.queues = [f"{directory.name}-{number}" for number in range(2)]
        self.messages: dict[str, tuple[Any, Any, Any]] = {}
        self.runtime = Runtime.of(play.task.app)
        self._workers: list[subprocess.Popen[bytes]] = []
        before_task_publish.connect(self._keep)

    def start(self) -> None:
        """Start the workers.

        Raises:
            RehearsalFailed: a worker does not start.
        """
        for name in (witness.HISTORY, witness.HOLD):
            (self.directory / name).touch()
        self._workers += map(self._worker, self.queues)
        self._need(lambda: len(self.seen("ready")) == len(self.queues), "the workers did not start")

    def begin(self) -> Line:
        """Call the task on the first worker; returns the beginning of its run.

        Raises:
            RehearsalFailed: it does not run.
        """
        task_id = self.send(0)
        self._need(lambda: self.seen("began", task_id), f"the task did not run within {self.play.patience:g} s")
        return self.seen("began", task_id)[-1]

    def send(self, worker: int) -> str:
        """Call the task on this worker; returns the id of the message."""
        task_id = uuid()
        self.play.send(task_id=task_id, queue=self.queues[worker])
        return task_id

    def send_again(self, task_id: str) -> None:
        """Deliver a message again, as brokers do, to the second worker."""
        headers, body, properties = self.messages[task_id]
        task = self.play.task
        serializer = task.serializer or task.app.conf.task_serializer
        with task.app.producer_or_acquire() as producer:
            producer.publish(
                body, exchange="", routing_key=self.queues[1], serializer=serializer, headers=headers, **properties
            )

    def seen(self, what: str, task_id: str = "") -> list[Line]:
        """What has happened so far, of a message or of all."""
        return [line for line in witness.read(self.directory) if line.what == what and task_id in ("", line.task_id)]

    def until(self, true: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until `true` returns a true value; whether it did."""
        return witness.wait_until(true, self.play.patience if seconds is None else seconds)

    def expect(self, is_so: object, otherwise: str) -> None:
        """Check a promise; `otherwise` says what happened if it was broken."""
        if not is_so:
            self.outcome.broken.append(otherwise)

    def holders(self) -> set[int]:
        """The processes that hold a lock; without locks that are kept on purpose while no task runs."""
        keys = {run.key for run in self.seen("began")}
        holders = [lock.holder for key in keys for lock in holds_of(self.runtime.store, key)]
        return {holder.pid for holder in holders if holder.pid}

    def unended(self) -> set[str]:
        """The messages that neither ran to an end, nor were refused for good, nor failed, nor are lost."""
        ends = ("ended", "succeeded", "failed", "refused", "killed")
        return self.messages.keys() - {line.task_id for what in ends for line in self.seen(what)}

    def let_end(self) -> float:
        """Let runs end from now on; returns the current time."""
        (self.directory / witness.HOLD).unlink(missing_ok=True)
        return clock.now()

    def kill_worker(self, number: int) -> None:
        """Kill a worker and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._workers[number].pid, signal.SIGKILL)
        self._workers[number].wait()

    def judge(self) -> None:
        """Let everything end, and check what must hold after every fault."""
        self.let_end()
        ended = self.until(lambda: not self.unended())
        few = f"{len(self.unended())} of {len(self.messages)} calls"
        self.expect(ended, f"{few} reached no end within {self.play.patience:g} s")
        free = not ended or self.until(lambda: not self.holders(), self.play.ttl + 5.0)
        self.expect(free, "a lock was left held")
        self.outcome.runs = len(self.seen("began"))
        self.outcome.overlaps = witness.overlaps(witness.read(self.directory))
        self.expect(not self.outcome.overlaps, f"{self.outcome.overlaps} overlaps")
        self.outcome.kept = not self.outcome.broken

    def close(self) -> None:
        """End both workers at once, so that they return the messages that they hold; leave nothing of them."""
        self.let_end()
        (self.directory / witness.SILENCE).unlink(missing_ok=True)
        for worker in self._workers:
            worker.terminate()
        for number, worker in enumerate(self._workers):
            with suppress(subprocess.TimeoutExpired):
                worker.wait(ENDS_IN)
            self.kill_worker(number)
        self._forget()

    def _keep(self, headers: Any, body: Any, properties: Any, **_: Any) -> None:
        self.messages[properties["correlation_id"]] = dict(headers), body, dict(properties)

    def _worker(self, queue: str) -> subprocess.Popen[bytes]:
        play, settings = self.play, self.runtime.settings
        orders = {
            "directory": str(self.directory),
            "task": play.task.name,
            "conf": {
                "singleton_lock_prefix": f"{settings.prefix[:60]}:{self.directory.name}",
                "singleton_lock_journal": 0,  # A journal would be kept for a month.
                "task_time_limit": None,
                "task_soft_time_limit": None,
                "worker_enable_remote_control": False,  # Operators look at the others.
            },
            "ttl": play.ttl,
            "parent": os.getpid(),
        }
        slots = 1 if play.pool == "solo" else 2
        command = [sys.executable, "-m", "celery", *play.celery, "worker", "-n", f"{queue}@rehearsal", "-Q", queue]
        command += ["-P", play.pool, "-c", str(slots), "-I", witness.__name__, "-l", "INFO"]
        command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, witness.VARIABLE: json.dumps(orders)},
                start_new_session=True,
            )

    def _need(self, true: Callable[[], object], otherwise: str) -> None:
        """Wait for what must come, unless a worker has ended before."""
        self.until(lambda: true() or any(worker.poll() is not None for worker in self._workers))
        if not true():
            log = (self.directory / "log").read_text(errors="replace")[-4000:].splitlines()
            shown = (f"    {cleaned.line(line)}" for line in log)
            raise RehearsalFailed("\n".join([f"{otherwise}; the last output of the workers:", *shown]))

    def _forget(self) -> None:
        """Leave nothing on the broker, nor in the result backend."""
        task = self.play.task
        if keeps_results(task.backend):
            for task_id in self.messages:
                task.AsyncResult(task_id).forget()
        with task.app.connection_for_write() as connection:
            for name in self.queues:
                queue = task.app.amqp.queues[name](connection.default_channel)
                queue.declare()  # kombu's virtual brokers delete only bindings that this channel knows.
                queue.delete()
                if queue.exchange.name == queue.name:
                    queue.exchange.delete()
