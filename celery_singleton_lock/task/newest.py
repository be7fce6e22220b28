"""Of the messages that wait for a lock, only the newest runs (`on_conflict="rerun"`), and an older one that runs is
stopped (`"replace"`).

Each message gets a number in the order of its key when it first asks for the lock, in the same round trip; the lock
server reports an older message as superseded. Protocol: `docs/protocol.md`, section 14.
"""

from __future__ import annotations

from dataclasses import replace

from celery.utils.log import get_logger

from celery_singleton_lock import signals
from celery_singleton_lock.errors import LockSuperseded
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.options.rules import NEWEST_POLICIES, REPLACE
from celery_singleton_lock.stores.base import Arrival, Superseded, order_of
from celery_singleton_lock.task import journal_entries
from celery_singleton_lock.task.turn import Execution

logger = get_logger(__name__)

#: The least seconds that the order of a key is kept after the last request for its lock: if a worker holds a message
#: and dies, the broker delivers the message again, and it must still be known whether it is the newest.
KNOWN_FOR = 3600.0

#: The most seconds between two renewals of a run that newer messages may stop: a renewal says so.
STOPPED_WITHIN = 1.0


def arrival_of(execution: Execution) -> Arrival | None:
    """What its request for the lock says of the order; None if it has no place in it: it has another policy, or is not
    a message, or comes too late to run, so that no other is to be stopped for it.
    """
    policy, request = execution.options.on_conflict, execution.request
    if policy not in NEWEST_POLICIES or request.is_eager or request.id is None:
        return None
    if execution.message.comes_too_late(request):
        return None
    seconds = max(execution.runtime.settings.done_ttl, KNOWN_FOR)
    return Arrival(execution.message.number, seconds, execution.task.name, stops=policy == REPLACE)


def as_holder(execution: Execution) -> Holder:
    """The execution as the lock's holder; with its order, if newer messages may stop it."""
    holder = execution.holder
    return replace(holder, order=order_of(execution.task.name)) if is_stopped_by_newer(execution) else holder


def is_stopped_by_newer(execution: Execution) -> bool:
    request = execution.request
    return execution.options.on_conflict == REPLACE and not request.is_eager and request.id is not None


def superseded(execution: Execution, error: LockSuperseded, found: Superseded) -> None:
    """Report that an execution that has not run is superseded."""
    _say(execution, error)
    journal_entries.did_not_run(execution, "superseded", found.holder)


def stopped(execution: Execution, error: LockSuperseded, failure: Exception) -> None:
    """Report that an execution that ran was stopped for a newer one; its body then raised `failure`."""
    if not isinstance(failure, LockSuperseded):
        logger.warning("%s was stopped, and failed as it ended: %r", execution, failure)
    _say(execution, error)


def _say(execution: Execution, error: LockSuperseded) -> None:
    logger.info("%s is superseded by task %s: %s", execution, error.task_id, error.key)
    details = {"task_id": execution.request.id, "key": error.key, "by": error.task_id}
    signals.lock_superseded.send(sender=execution.task, **details)
