"""The rehearsal's part in its workers: notes when the task's body begins and ends, and keeps it going for a fault.

The worker imports this module (`celery worker --include`), with its orders in the environment. The user's code stays as
it is: the task's `run` is wrapped only in this process, within its lock.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from celery.exceptions import Retry
from celery.signals import task_failure, task_prerun, task_success, worker_init, worker_ready

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.options.rules import REPLACE
from celery_singleton_lock.options.task import raw_attribute
from celery_singleton_lock.rehearsal.history import DONE, RAISED, RETRIED, STOPPED, Line, append
from celery_singleton_lock.signals import lock_conflict

#: The environment variable with the orders, as JSON: a command line would show the lock server's password to everybody.
VARIABLE = "SINGLETON_LOCK_REHEARSAL"

#: Seconds between two checks whether a run may end, and whether the rehearsal still exists.
LOOK_EVERY, LOOK_FOR_PARENT_EVERY = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders for a worker of a rehearsal.

    Attributes:
        directory: the directory of the history; it gets a file `end` as soon as runs may end.
        task: the task's name.
        prefix: the prefix of the locks' keys.
        backend: where the locks are; None: where the app has them.
        longest: the longest time in seconds for which a run is kept going.
        parent: the process that started the worker; the worker ends with it.
    """

    directory: str
    task: str
    prefix: str
    backend: str | None
    longest: float
    parent: int

    @property
    def history(self) -> Path:
        return Path(self.directory, "history")

    @property
    def end(self) -> Path:
        """The file that lets runs end."""
        return Path(self.directory, "end")

    def dumps(self) -> str:
        return json.dumps(asdict(self))


def is_to_stop_others(task: Any) -> bool:
    """Whether a call of the task stops a running one. In a rehearsal it must not: each run must be seen to its end."""
    policy = raw_attribute(task, "on_conflict") or task.app.conf.get("singleton_lock_on_conflict")
    return isinstance(policy, str) and policy == REPLACE


class Witness:
    """Notes what happens in this worker, from its start."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._running = threading.local()
        worker_init.connect(self._begin)
        worker_ready.connect(self._ready)
        for what, event in (
            ("met", task_prerun),
            ("failed", task_failure),
            ("succeeded", task_success),  # Also without a run: as the task that it had joined.
            ("refused", lock_conflict),
        ):
            event.connect(functools.partial(self._happened, what), weak=False)

    def _begin(self, sender: Any, **_: Any) -> None:
        """Set up the task before the pool exists, so that its processes inherit all this."""
        conf = sender.app.conf
        conf.singleton_lock_prefix = self._orders.prefix
        conf.singleton_lock_journal = 0  # A journal would be kept for a month.
        if self._orders.backend is not None:
            conf.singleton_lock_backend = self._orders.backend
        task = sender.app.tasks[self._orders.task]
        if is_to_stop_others(task):
            task.on_conflict = "rerun"
        task.run = self._watched(task, task.run)

    def _watched(self, task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if task.request.called_directly or getattr(self._running, "now", False):
                return run(*args, **kwargs)
            self._running.now = True
            about = (task.request.id, task.request.retries, secrets.token_hex(4))
            self._note("began", *about, key=task.lock.key, fence=task.lock.fence)
            how = STOPPED
            try:
                value = run(*args, **kwargs)
                self._go_on()
                how = DONE
            except LockLost:
                raise
            except Exception as error:
                self._go_on()
                how = RETRIED if isinstance(error, Retry) else RAISED
                raise
            finally:
                self._note("ended", *about, about=how)
                self._running.now = False
            return value

        return watched

    def _go_on(self) -> None:
        """Keep the run going until it may end, so that the fault happens during the run."""
        deadline = clock.now() + self._orders.longest
        while not self._orders.end.exists() and clock.now() < deadline:
            clock.sleep(LOOK_EVERY)

    def _ready(self, sender: Any, **_: Any) -> None:
        self._note("ready")
        sender.timer.call_repeatedly(LOOK_FOR_PARENT_EVERY, self._end_without_parent)

    def _end_without_parent(self) -> None:
        if os.getppid() != self._orders.parent:
            with suppress(FileNotFoundError):
                self._orders.end.touch()
            os.kill(os.getpid(), signal.SIGTERM)

    def _happened(self, what: str, sender: Any, task_id: str | None = None, policy: str = "", **_: Any) -> None:
        if sender.name == self._orders.task:
            self._note(what, task_id or sender.request.id, about=policy)

    def _note(self, what: str, *message: Any, **more: Any) -> None:
        append(self._orders.history, Line(what, clock.now(), os.getpid(), *message, **more))


if VARIABLE in os.environ:
    #: Kept here, because signals refer to receivers weakly.
    witness = Witness(Orders(**json.loads(os.environ[VARIABLE])))
