"""Entries of the journal about an execution."""

from __future__ import annotations

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal_entry import (
    LOST,
    NOBODY,
    SCHEDULED_HEADER,
    STOPPED,
    Blocker,
    Entry,
    Kind,
    Place,
    Run,
    Times,
)
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.task.execution import Execution
from celery_singleton_lock.task.outcome import Outcome


def ran(execution: Execution, lease: Lease, outcome: Outcome | None, *, began: float, ended: float) -> None:
    """Its body ran: that is what is timed, for others ask for the lock before that and free it after."""
    own = execution.holder
    state = LOST if lease.reason else STOPPED if outcome is None else outcome.state
    entry = Entry(
        "run",
        execution.task.name,
        lease.key,
        own.task_id,
        Place(own.node, own.pid),
        Times(began, ended, waited=began - execution.began),
        Run(state, lease.fence, lease.renewals),
        lease.limit,
    )
    execution.runtime.journal.add(entry, at_once=execution.request.is_eager)


def did_not_run(execution: Execution, kind: Kind, holder: Holder | None) -> None:
    """Its body did not run; `holder`: who has the lock."""
    own, now = execution.holder, clock.now()
    scheduled = cleaned.headers(execution.request).get(SCHEDULED_HEADER)
    entry = Entry(
        kind,
        execution.task.name,
        execution.key,
        own.task_id,
        Place(own.node, own.pid),
        Times(execution.began, now, waited=now - execution.began),
        limit=execution.options.limit,
        blocker=NOBODY if holder is None else Blocker(holder.task_id, holder.node, holder.since),
        scheduled=cleaned.text(scheduled) if scheduled else "",
    )
    execution.runtime.journal.add(entry, at_once=execution.request.is_eager)
