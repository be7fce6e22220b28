"""The rehearsal's part in its workers: writes down what happens to the task, and keeps its runs waiting for a fault.

The worker imports this module (`celery worker --include`), with its orders in the environment. The user's code stays as
it is: the task's `run` is wrapped only in this process, within its lock, and so are the sockets to the lock server, on
which no answer comes while that is to be silent.

The history is a file to which every process appends lines. They are about the body of the task, not about its lock: the
lock is not a witness in its own case.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from celery.signals import task_failure, task_prerun, task_success, worker_init, worker_ready

from celery_singleton_lock import clock
from celery_singleton_lock.journal_entry import REFUSALS
from celery_singleton_lock.signals import lock_conflict
from celery_singleton_lock.stores.redis.connection import Connection, Late

#: The environment variable with the orders, as JSON.
VARIABLE = "SINGLETON_LOCK_REHEARSAL"

#: The names of the history, and of files that keep runs going, and the lock server silent, as long as they exist.
HISTORY, HOLD, SILENCE = "history", "hold", "silence"

#: Seconds between two looks at what has happened or may happen, and whether the rehearsal still exists.
LOOK_EVERY, LOOK_FOR_PARENT_EVERY = 0.05, 1.0


class Line(NamedTuple):
    """One line of the history.

    Attributes:
        what: a worker is `ready`; a message `met` a process; it was `refused` for good; its body `began`, and `ended`,
            or was `killed`; it `failed` for good, or `succeeded`.
        at: when, on this host's steady clock.
        pid: where it happened.
        task_id, retries: the message, and its attempt.
        key: the key of a run's lock.
    """

    what: str
    at: float
    pid: int
    task_id: str = ""
    retries: int = 0
    key: str = ""


def write(directory: str | Path, what: str, **more: Any) -> None:
    """Add a line to the history, with one system call, so that lines of several processes do not mix."""
    line = Line(what, clock.now(), os.getpid(), **more)
    with Path(directory, HISTORY).open("a") as history:
        history.write(json.dumps(line) + "\n")


def read(directory: str | Path) -> list[Line]:
    """The complete lines so far, in the order in which they happened."""
    whole, _, _ = Path(directory, HISTORY).read_text().rpartition("\n")
    return sorted((Line(*json.loads(text)) for text in whole.splitlines()), key=lambda line: line.at)


def wait_until(true: Callable[[], object], seconds: float = math.inf) -> bool:
    """Wait until `true` returns a true value; whether it did within that time."""
    deadline = clock.now() + seconds
    while not true():
        if clock.now() >= deadline:
            return False
        clock.sleep(LOOK_EVERY)
    return True


def overlaps(lines: Iterable[Line]) -> int:
    """How many runs began while another one was running."""
    found = running = 0
    for line in lines:
        if line.what == "began":
            found += running > 0
            running += 1
        running -= line.what in ("ended", "killed")
    return found


def silence_by(silence: Path) -> None:
    """Have this process hear no answer of the lock server as long as that file exists; what is sent arrives."""

    really_receive = Connection.receive

    def receive(connection: Connection) -> None:
        until = clock.now() + (connection.step or 0.0)
        while silence.exists():
            clock.sleep(LOOK_EVERY)
            if clock.now() >= until:
                raise Late
        really_receive(connection)

    Connection.receive = receive  # type: ignore[assignment,method-assign]


def without_limits(ttl: float) -> dict[str, Any]:
    """The attributes of a task whose runs last until the fault is over."""
    return {"time_limit": None, "soft_time_limit": None, "lock_ttl": ttl}


class Witness:
    """Writes down what happens in this worker, from its start.

    Args:
        directory: the directory of the history.
        task: the task's name.
        conf: settings of the rehearsal that replace the app's.
        ttl: the task's `lock_ttl` for the rehearsal.
        parent: the process that started the worker; the worker ends with it.
    """

    def __init__(self, directory: str, task: str, conf: Mapping[str, Any], ttl: float, parent: int) -> None:
        self._directory, self._task, self._conf, self._ttl, self._parent = directory, task, conf, ttl, parent
        silence_by(Path(directory, SILENCE))
        for receive, event in (
            (self._set_up, worker_init),
            (self._ready, worker_ready),
            (functools.partial(self._happened, "met"), task_prerun),
            (functools.partial(self._happened, "refused"), lock_conflict),
            (functools.partial(self._happened, "failed"), task_failure),
            # Also without a run: as the task that it had joined.
            (functools.partial(self._happened, "succeeded"), task_success),
        ):
            event.connect(receive, weak=False)

    def _set_up(self, sender: Any, **_: Any) -> None:
        """Set up the task before the pool exists, so that its processes inherit all this."""
        sender.app.conf.update(self._conf)
        task = sender.app.tasks[self._task]
        task.__dict__.update(without_limits(self._ttl))
        task.run = self._watched(task, task.run)

    def _watched(self, task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            request = task.request
            if request.called_directly or request.get("is_watched"):
                return run(*args, **kwargs)
            request.is_watched = True
            about = {"task_id": request.id, "retries": request.retries}
            write(self._directory, "began", **about, key=task.lock.key)
            try:
                # The run goes on until it may end, so that the fault happens meanwhile.
                wait_until(lambda: not Path(self._directory, HOLD).exists())
                return run(*args, **kwargs)
            finally:
                write(self._directory, "ended", **about)

        return watched

    def _ready(self, sender: Any, **_: Any) -> None:
        write(self._directory, "ready")
        sender.timer.call_repeatedly(LOOK_FOR_PARENT_EVERY, self._end_without_parent)

    def _end_without_parent(self) -> None:
        if os.getppid() != self._parent:
            Path(self._directory, HOLD).unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGTERM)

    def _happened(self, what: str, sender: Any, task_id: str = "", policy: str = "", **_: Any) -> None:
        if sender.name == self._task and (what != "refused" or policy in REFUSALS):
            write(self._directory, what, task_id=task_id or sender.request.id)


if VARIABLE in os.environ:
    Witness(**json.loads(os.environ[VARIABLE]))
