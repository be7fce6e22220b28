"""Settles a record once the callbacks and next steps of its message were sent.

Protocol: `docs/protocol.md`, section 6.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from celery import states
from celery.signals import task_postrun

from celery_singleton_lock.options.rules import JOIN
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.ends import Outcome
from celery_singleton_lock.task.turn import Execution, turn_of


def settle_after(execution: Execution, ended: Outcome) -> None:
    """Have the record say that all was sent, once it was."""
    task, request, records = execution.task, execution.request, execution.runtime.records
    if not ended.needs_settling(task, request):
        return
    # A copy that has joined this one may look later: when its result is forgotten, or Celery has stored RETRY over it.
    policy = execution.options.on_conflict
    content = ended.content if policy == JOIN or callable(policy) else None
    if (record := execution.record(Outcome(ended.state, content, settled=True))) is None:
        return
    # At once if there is no result backend to ask instead.
    replace = records.replace if ends.backend_knows(task, request) else records.replace_now
    execution.turn.settle = partial(replace, execution.key, record)


@task_postrun.connect
def _after_all(sender: Any = None, state: str | None = None, **_: Any) -> None:
    settle = turn_of(sender.request).settle if sender is not None else None
    # Celery sends the signal from a `finally`: an error that is on its way means that not all was sent.
    is_sent = sys.exc_info()[1] is None and state in (*states.READY_STATES, states.IGNORED)
    if settle is not None and is_sent:
        settle()
