"""When all that follows on a message was sent, its record says so: it is settled.

Protocol: `docs/protocol.md`, section 6.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from celery import states
from celery.signals import task_postrun

from celery_singleton_lock.task import outcome
from celery_singleton_lock.task.execution import Execution
from celery_singleton_lock.task.outcome import Outcome
from celery_singleton_lock.task.running import progress_of


def settle_after(execution: Execution, ended: Outcome, seconds: float | None = None) -> None:
    """Have the record, which lives for `seconds`, say that all was sent, when it was."""
    task, request, runtime = execution.task, execution.request, execution.runtime
    if not ended.needs_settling(task, request):
        return
    if (record := execution.record(Outcome(ended.state, settled=True), seconds)) is None:
        return
    if outcome.backend_knows(task, request):
        execution.progress.settle = partial(runtime.record_writer.replace, execution.key, record)
    else:  # At once: nobody else could be asked.
        execution.progress.settle = partial(runtime.record_writer.replace_now, execution.key, record)


@task_postrun.connect
def _after_all(sender: Any = None, state: str | None = None, **_: Any) -> None:
    settle = progress_of(sender.request).settle if sender is not None else None
    # Celery sends it from a `finally`: an error that is on its way means that the result was not stored.
    if settle is None or sys.exc_info()[0] is not None or state not in (*states.READY_STATES, states.IGNORED):
        return
    settle()
