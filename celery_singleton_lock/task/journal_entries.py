"""What the journal is told of an execution."""

from __future__ import annotations

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal_entry import LOST, SCHEDULED_HEADER, STOPPED, Entry, Kind
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.task.execution import Execution
from celery_singleton_lock.task.outcome import Outcome


def ran(execution: Execution, lease: Lease, outcome: Outcome | None, *, began: float, ended: float) -> None:
    """Its body ran: that is what is timed, for others ask for the lock before that and free it after."""
    own = execution.holder
    entry = Entry(
        kind="run",
        task=execution.task.name,
        key=lease.key,
        task_id=own.task_id,
        node=own.node,
        pid=own.pid,
        began=began,
        ended=ended,
        waited=began - execution.began,
        outcome=LOST if lease.reason else STOPPED if outcome is None else outcome.state,
        fence=lease.fence,
        renewals=lease.renewals,
        limit=lease.limit,
    )
    execution.runtime.journal.add(entry, at_once=execution.request.is_eager)


def did_not_run(execution: Execution, kind: Kind, holder: Holder | None) -> None:
    """Its body did not run; `holder`: who has the lock."""
    own, now = execution.holder, clock.now()
    scheduled = cleaned.headers(execution.request).get(SCHEDULED_HEADER)
    entry = Entry(
        kind=kind,
        task=execution.task.name,
        key=execution.key,
        task_id=own.task_id,
        node=own.node,
        pid=own.pid,
        began=execution.began,
        ended=now,
        waited=now - execution.began,
        limit=execution.options.limit,
        scheduled=cleaned.text(scheduled) if scheduled else "",
    )
    if holder is not None:
        entry = entry._replace(holder=holder.task_id, holder_node=holder.node, holder_since=holder.since)
    execution.runtime.journal.add(entry, at_once=execution.request.is_eager)
