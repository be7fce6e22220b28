"""Of the messages that wait for a lock only the newest is to run (`on_conflict="rerun"`), and an older one that runs is
to stop (`"replace"`).

Each takes a place in the order of its key as it first asks for the lock, in the same round trip; the lock server says
of an older one that it is superseded. Protocol: `docs/protocol.md`, section 14.
"""

from __future__ import annotations

from dataclasses import replace

from celery.utils.log import get_logger

from celery_singleton_lock import signals
from celery_singleton_lock.errors import InvalidOption, LockSuperseded
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.options.rules import NEWEST_POLICIES, REPLACE
from celery_singleton_lock.stores.base import Arrival, Held, Superseded, order_of
from celery_singleton_lock.stores.stops import Stop
from celery_singleton_lock.task import journal_entries, requeue
from celery_singleton_lock.task.execution import Execution

logger = get_logger(__name__)

#: Seconds for which the order of a key is known at least, from the last question for its lock on: of a message that its
#: worker held until it died, and that the broker delivers again then, it has to be known whether it is the newest.
KNOWN_FOR = 3600.0


def arrival_of(execution: Execution) -> Arrival | None:
    """What its acquire says of the order; None if it is not in it: another policy, not a message, or one that comes too
    late to run, for which no other is to be stopped.

    Raises:
        InvalidOption: the locks are kept where the order is not known.
    """
    policy, request = execution.options.on_conflict, execution.request
    if policy not in NEWEST_POLICIES or request.is_eager or request.id is None:
        return None
    store = execution.runtime.store
    if not getattr(store, "knows_newest", False):
        raise InvalidOption(
            f"option on_conflict of task {execution.task.name} is {policy!r}, but its lock server, "
            f"{store.server}, does not know which message is the newest; allowed: locks on one Redis, behind "
            "Sentinels, on a cluster, or in memory, but not on a Redlock; use another policy, or set "
            "singleton_lock_backend"
        )
    if requeue.comes_too_late(request):
        return None
    seconds = max(execution.runtime.settings.done_ttl, KNOWN_FOR)
    return Arrival(requeue.arrived(request), seconds, execution.task.name, stops=policy == REPLACE)


def as_holder(execution: Execution) -> Holder:
    """The execution as the lock's holder; with its order, if newer messages may stop it."""
    holder = execution.holder
    return replace(holder, order=order_of(execution.task.name)) if is_stopped_by_newer(execution) else holder


def is_stopped_by_newer(execution: Execution) -> bool:
    request = execution.request
    return execution.options.on_conflict == REPLACE and not request.is_eager and request.id is not None


def tell(execution: Execution, arrival: Arrival | None, found: Held) -> None:
    """Have the holder of the lock stop at once, where that is to stop for a message of this order: this one, or one
    before it, which may have died as it did so.
    """
    holder, runtime = found.holder, execution.runtime
    if arrival is None or not arrival.stops or holder is None or holder.superseded_by is None:
        return
    if holder.order == arrival.order and holder.process:
        runtime.store.tell(runtime.settings.prefix, holder.process, Stop(found.owner, holder.superseded_by))


def superseded(execution: Execution, error: LockSuperseded, found: Superseded) -> None:
    """Say that an execution ends so which has not run."""
    _say(execution, error)
    journal_entries.did_not_run(execution, "superseded", found.holder)


def stopped(execution: Execution, error: LockSuperseded, failure: Exception) -> None:
    """Say that an execution ends so which ran, and was stopped for a newer one; `failure` came of its body then."""
    if not isinstance(failure, LockSuperseded):
        logger.warning("%s was stopped, and failed as it ended: %r", execution, failure)
    _say(execution, error)


def _say(execution: Execution, error: LockSuperseded) -> None:
    logger.info("%s is superseded by task %s: %s", execution, error.task_id, error.key)
    details = {"task_id": execution.request.id, "key": error.key, "by": error.task_id}
    signals.lock_superseded.send(sender=execution.task, **details)
