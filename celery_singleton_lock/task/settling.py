"""Settles a record once the callbacks and next steps of its message were sent.

If they could not be sent, a copy of the message sends them: Celery gives up, and acknowledges the message.

Protocol: `docs/protocol.md`, section 6.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from celery import states
from celery.exceptions import Ignore
from celery.signals import task_postrun
from celery.utils.log import get_logger

from celery_singleton_lock.options.rules import JOIN
from celery_singleton_lock.task import outcome, requeue
from celery_singleton_lock.task.celery_types import TaskLike
from celery_singleton_lock.task.execution import Execution, named
from celery_singleton_lock.task.outcome import Outcome
from celery_singleton_lock.task.running import progress_of

logger = get_logger(__name__)

#: How often a copy tries to send what could not be sent: for some fifteen minutes. Nobody knows if it ever can.
MOST_TRIES = 20


def settle_after(execution: Execution, ended: Outcome) -> None:
    """Have the record say that all was sent, once it was."""
    task, request, writer = execution.task, execution.request, execution.runtime.record_writer
    if not ended.needs_settling(task, request):
        return
    # A copy that has joined this one may look later: when its result is forgotten, or Celery has stored RETRY over it.
    policy = execution.options.on_conflict
    content = ended.content if policy == JOIN or callable(policy) else None
    if (record := execution.record(Outcome(ended.state, content, settled=True))) is None:
        return
    # At once if there is no result backend to ask instead.
    replace = writer.replace if outcome.backend_knows(task, request) else writer.replace_now
    execution.progress.settle = partial(replace, execution.key, record)


@task_postrun.connect
def _after_all(sender: Any = None, state: str | None = None, **_: Any) -> None:
    settle = progress_of(sender.request).settle if sender is not None else None
    if settle is None:
        return
    # Celery sends the signal from a `finally`: an error that is on its way means that not all was sent.
    error = sys.exc_info()[1]
    if isinstance(error, Exception):
        with suppress(Ignore):
            have_copy_send(sender, error)
    elif error is None and state in (*states.READY_STATES, states.IGNORED):
        settle()


def have_copy_send(task: TaskLike, error: Exception) -> NoReturn:
    """The recorded end was not reported, and Celery will acknowledge the message: put it back, unless that was in vain.

    Raises:
        Ignore: there is nothing more to do here.
    """
    if requeue.put_back_count(task.request, "untold") < MOST_TRIES:
        logger.warning("%s has ended; a copy will send what could not be sent: %r", named(task), error)
        requeue.put_back(task, reason="untold")
    logger.error("%s has ended, but its callbacks and next steps cannot be sent: %r", named(task), error)
    raise Ignore("what follows cannot be sent")
