"""Locks for one test: in memory, empty at first, gone afterwards. Everything that happens to them is recorded.

They replace the locks of every app in the process, so a test need not know which app runs its task: a task of
`@shared_task` runs in whatever app is current.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Literal

from celery.utils import uuid

from celery_singleton_lock import clock, process_identity, runtime, signals
from celery_singleton_lock.errors import FOREIGN
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import without_queue
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.task import options_for
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.stores.store import Store

#: The events of a lock, and their signals.
_SIGNALS = {
    "acquired": signals.lock_acquired,
    "conflict": signals.lock_conflict,
    "released": signals.lock_released,
    "superseded": signals.lock_superseded,
    "lost": signals.lock_lost,
    "duplicate": signals.lock_duplicate,
}

#: The events that the execution itself tells, so that its arguments are known.
_TOLD_BY_EXECUTION = ("acquired", "conflict", "released", "superseded")


@dataclass(frozen=True, slots=True)
class LockEvent:
    """An event of the lock of one execution of a task, or of one call.

    Attributes:
        what: "acquired", "conflict", "released", "superseded", "lost" or "duplicate".
        task: the name of the task.
        task_id: the id of the task; None for a duplicate.
        key: the key of the lock.
        args: the task's arguments; empty when the lock was lost, because another thread finds that out, and for a
            duplicate.
        kwargs: the keyword arguments; None where the arguments are not known.
        policy: what was done about a conflict or a duplicate, such as "skip"; otherwise None.
        held_by: the id of the task that held the lock in a conflict, or of the message that a call duplicates;
            otherwise None.
    """

    what: Literal["acquired", "conflict", "released", "superseded", "lost", "duplicate"]
    task: str
    task_id: str | None
    key: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    policy: str | None = None
    held_by: str | None = None

    def __str__(self) -> str:
        holder = FOREIGN if self.held_by is None else f"task {self.held_by}"
        end = f", {self.policy} (held by {holder})" if self.policy else ""
        call = self.task if self.kwargs is None else _shown(self.task, self.args, self.kwargs)
        return f"{self.what}: {call}{end}, {self.key}"


class RecordedLocks:
    """The locks of one test, see `memory_locks`.

    The assertions take a task and the arguments of a call, and compare keys as the lock does: `f(1)` and `f(tenant=1)`
    are the same call, and arguments that `lock_key` leaves out do not count. Each assertion returns the events that it
    found.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Everything that has happened, in order. Any thread that runs or sends a task appends to it.
        self.events: list[LockEvent] = []

    @property
    def acquired(self) -> list[LockEvent]:
        """Executions that got their lock, and so ran."""
        return self._all("acquired")

    @property
    def conflicts(self) -> list[LockEvent]:
        """Executions that met a held lock; `policy` is what was done about it."""
        return self._all("conflict")

    @property
    def duplicates(self) -> list[LockEvent]:
        """Calls that met the lock of another message as they were sent; `policy` is what the caller got."""
        return self._all("duplicate")

    @property
    def released(self) -> list[LockEvent]:
        """Executions that freed their lock."""
        return self._all("released")

    @property
    def superseded(self) -> list[LockEvent]:
        """Executions that did not run, or were stopped, because a newer one had come (`"rerun"`, `"replace"`)."""
        return self._all("superseded")

    @property
    def lost(self) -> list[LockEvent]:
        """Executions that lost their lock while they ran."""
        return self._all("lost")

    def assert_acquired(self, task: Any, *args: Any, **kwargs: Any) -> list[LockEvent]:
        """Fail unless such a call got its lock, and so ran."""
        return self._assert_some("acquired", "got its lock", task, args, kwargs)

    def assert_conflict(self, task: Any, *args: Any, **kwargs: Any) -> list[LockEvent]:
        """Fail unless such a call met a held lock, whatever was done about it."""
        return self._assert_some("conflict", "met a held lock", task, args, kwargs)

    def assert_skipped(self, task: Any, *args: Any, **kwargs: Any) -> list[LockEvent]:
        """Fail unless such a call was skipped because the lock was held."""
        return self._assert_some("conflict", "was skipped", task, args, kwargs, policy="skip")

    def assert_duplicate(self, task: Any, *args: Any, **kwargs: Any) -> list[LockEvent]:
        """Fail unless such a call met the lock of another message as it was sent, whatever its caller got."""
        return self._assert_some("duplicate", "was a duplicate", task, args, kwargs)

    def assert_free(self, task: Any, *args: Any, **kwargs: Any) -> None:
        """Fail if the lock of such a call is held."""
        for held in self._store.held(_key(task, args, kwargs)):
            holder = f"task {held.holder.task_id}" if held.holder else FOREIGN
            raise AssertionError(f"the lock of {_shown(task.name, args, kwargs)} is held by {holder}")

    def _all(self, what: str) -> list[LockEvent]:
        return [event for event in self.events if event.what == what]

    def _assert_some(
        self, what: str, claim: str, task: Any, args: Any, kwargs: Any, *, policy: str | None = None
    ) -> list[LockEvent]:
        key = _key(task, args, kwargs)
        found = [
            event
            for event in self._all(what)
            if (event.task, event.key) == (task.name, key) and policy in (None, event.policy)
        ]
        if not found:
            raise AssertionError(f"no {_shown(task.name, args, kwargs)} {claim}; {self._told(task)}")
        return found

    def _told(self, task: Any) -> str:
        """What happened instead, in words."""
        if not Runtime.of(task.app).settings.enabled:
            return "setting singleton_lock_enabled is False: no task takes a lock"
        if not self.events:
            return (
                "no task asked for a lock. A task does so when it runs in this process: with .apply(), with "
                ".delay() and task_always_eager, or in a worker in a thread; a direct call takes no lock. A call asks "
                "for one when it is sent, with a lock_scope that begins then and without task_always_eager"
            )
        return "\n  ".join(["what happened:", *map(str, self.events)])

    def _record(self, what: Any, sender: Any, **details: Any) -> None:
        told, request, is_duplicate = what in _TOLD_BY_EXECUTION, sender.request, what == "duplicate"
        met = details.get("conflict") or details.get("duplicate")
        event = LockEvent(
            what=what,
            task=sender.name,
            task_id=None if is_duplicate else details["task_id"],
            key=without_queue(details["key"]),
            args=tuple(request.args or ()) if told else (),
            kwargs=dict(request.kwargs or {}) if told else None,
            policy=details.get("policy"),
            held_by=met.task_id if met else None,
        )
        self.events.append(event)


@contextmanager
def memory_locks() -> Iterator[RecordedLocks]:
    """Keep the locks of every app in this process in memory within the `with` block, and record what happens to them.

    No server is needed, whatever the settings say, and nothing is left afterwards. All other settings apply and are
    read again, so you can change them for one test. Other processes, such as those of a prefork worker, do not see
    these locks.
    """
    with runtime.in_memory() as store:
        locks = RecordedLocks(store)
        records = {what: partial(locks._record, what) for what in _SIGNALS}  # noqa: SLF001 - of this module
        for what, signal in _SIGNALS.items():
            signal.connect(records[what], weak=False)
        try:
            yield locks
        finally:
            for what, signal in _SIGNALS.items():
                signal.disconnect(records[what])


@contextmanager
def hold_lock(task: Any, *args: Any, **kwargs: Any) -> Iterator[Lease]:
    """Hold the lock that the call `task(*args, **kwargs)` would take, as if another task was running: a conflict.

    This works with the locks of `memory_locks`, and with those of a server. The lock is renewed meanwhile. With
    `lock_limit` it is one of several holders.

    Raises:
        LockConflict: the lock is held already.
        LockUnavailable: the server does not answer.
    """
    key, locks = _key(task, args, kwargs), Runtime.of(task.app)
    options = options_for(task, locks.settings)
    holder = Holder(f"hold-lock-{uuid()}", pid=os.getpid(), since=clock.wall(), process=process_identity.own())
    lease = locks.store.acquire(LockRequest(key, new_owner(), ttl=options.ttl, holder=holder, limit=options.limit))
    if isinstance(lease, Held):
        raise lease.conflict(key)
    assert isinstance(lease, Lease)  # noqa: S101 - the request did not ask for records
    locks.heartbeat.start(lease, lambda _: None)
    try:
        yield lease
    finally:
        locks.heartbeat.stop(lease)
        locks.store.free(lease)


def _key(task: Any, args: Any, kwargs: Any) -> str:
    try:
        key_of = task.lock_key_of
    except AttributeError:
        raise TypeError(f"{task!r} is not an exclusive task; those have base=SingletonTask") from None
    try:
        signature(task.run).bind(*args, **kwargs)
    except TypeError as error:
        # A lock_key that does not use the wrong argument would not notice it.
        raise TypeError(f"{_shown(task.name, args, kwargs)} is no call of this task: {error}") from None
    return str(key_of(*args, **kwargs))


def _shown(task: str, args: Any, kwargs: Mapping[str, Any]) -> str:
    given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"{task}({', '.join(given)})"
