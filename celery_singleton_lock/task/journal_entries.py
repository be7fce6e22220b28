"""Entries of the journal about an execution, and about a call that is a duplicate."""

from __future__ import annotations

import os
import socket
from typing import Any

from celery import states

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.errors import DuplicateTask
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal.writer import crash
from celery_singleton_lock.journal_entry import LOST, STOPPED, SUPERSEDED, Entry, Kind
from celery_singleton_lock.keys.key import without_queue
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.task.ends import Outcome
from celery_singleton_lock.task.turn import Execution


def ran(
    execution: Execution, lease: Lease, outcome: Outcome | None, *, waited: float, began: float, ended: float
) -> None:
    """Its body ran. Only the body is timed: the lock is asked for before it, and freed after it."""
    state = LOST if lease.reason else STOPPED if outcome is None else outcome.state
    if lease.superseded_by is not None and state == states.REVOKED:
        state = SUPERSEDED
    _add(execution, "run", began, ended, waited, outcome=state, fence=lease.fence, renewals=lease.renewals)


def did_not_run(execution: Execution, kind: Kind, holder: Holder | None) -> None:
    """Its body did not run; `holder` has the lock."""
    scheduled, now = execution.message.carried.get("entry"), clock.now()
    of_copy: dict[str, Any] = {"scheduled": cleaned.text(scheduled) if scheduled else ""}
    if holder is not None:
        of_copy |= {"holder": holder.task_id, "holder_node": holder.node, "holder_since": holder.since}
    _add(execution, kind, execution.began, now, now - execution.began, **of_copy)


def died(execution: Execution, found: Held) -> None:
    """Another run's process died, and this execution has freed its lock."""
    it, fence = execution, found.fence or 0
    entry = crash(it.task.name, it.key, found.holder, limit=it.options.limit, fence=fence)
    it.runtime.journal.add(entry, at_once=it.request.is_eager)


def was_duplicate(runtime: Runtime, task_name: str, error: DuplicateTask, policy: str, task_id: str | None) -> None:
    """A call met the lock of another message as it was to be sent; `task_id` is its own if it is sent all the same."""
    now = clock.now()
    entry = Entry(
        "duplicate",
        task_name,
        without_queue(error.key),
        task_id,
        socket.gethostname(),
        os.getpid(),
        now,
        now,
        outcome=policy,
        holder=error.task_id,
        holder_since=error.since,
        label=error.label,
    )
    runtime.journal.add(entry)


def _add(execution: Execution, kind: Kind, began: float, ended: float, waited: float, **of_kind: Any) -> None:
    own = execution.holder
    entry = Entry(
        kind,
        execution.task.name,
        execution.key,
        own.task_id,
        own.node,
        own.pid,
        began,
        ended,
        waited,
        limit=execution.options.limit,
        label=own.label,
        **of_kind,
    )
    execution.runtime.journal.add(entry, at_once=execution.request.is_eager)
