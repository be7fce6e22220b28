"""How an execution ends whose body does not run here: refused for another task, failed before it began, or a copy.

Before a message ends so for good, a record says that. Without it a copy that waits for the lock meanwhile would be
carried out after all; and of a message that a copy carries out, the end is the copy's.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery import states
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock.errors import LockConflict, LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import ConflictPolicy
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import delivery, journal_entries, on_conflict, outcome, redelivery, settling
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.execution import Execution
from celery_singleton_lock.task.outcome import Outcome

#: Seconds for which it is known of a message that it was refused, where no broker can deliver it again later.
BRIEFLY = 60.0


def drop_if_expired(execution: Execution, lease: Lease) -> None:
    """A message that was delivered again comes here although it has expired; see `worker.request`."""
    if delivery.is_redelivered(execution.request) and on_conflict.has_expired(execution.request):
        revoked = Outcome(states.REVOKED)
        with suppress(LockUnavailable):  # It is repeated until it is answered.
            execution.runtime.store.free(lease, record=execution.record(revoked))
        settling.settle_after(execution, revoked)
        on_conflict.expire(execution.task)


class Refusal:
    """Ends an execution without its body."""

    def __init__(self, execution: Execution, acquisition: Acquisition) -> None:
        self._execution = execution
        self._acquisition = acquisition
        self._task = execution.task
        self._store = execution.runtime.store

    def end(self, found: Held | Record) -> Any:
        """End as a copy of a message that is, or was, carried out; or as one that another task refuses."""
        if isinstance(found, Held) and not self._execution.is_copy_of(found):
            met = found.conflict(self._execution.key)
            try:
                policy = on_conflict.policy_for(self._task, met, self._execution.options)
            except Exception as error:  # noqa: BLE001 - it is the user's
                return self.fail(error, met)
            try:
                found = self._end_for_another(policy, met, found.holder)
            except LockConflict:
                raise
            except Exception as error:  # noqa: BLE001 - a soft time limit, say
                return self.fail(error, met)
        return self._end_as_copy(found)

    def fail(self, error: Exception, met: LockConflict | None = None) -> Any:
        """Fail before the body has begun, which is the message's end unless a copy of it carries it out."""
        if isinstance(error, (Ignore, Reject, Retry, LockUnavailable)):
            raise error
        self._acquisition.abandon()  # Interrupted, it may have got it.
        copy = self._record("raise", error)
        if copy is None:
            on_conflict.fail(self._task, error, met)
        return self._end_as_copy(copy)

    def fail_lost(self, lost: Exception) -> Any:
        """Fail without the lock, which is the message's end unless a copy of it has that by now."""
        try:
            copy = self._record_at_store("raise", lost)
        except LockUnavailable:
            raise lost from None  # Whether a copy carries it out, nobody can tell.
        if copy is None:
            raise lost
        return self._end_as_copy(copy)

    def _end_for_another(self, policy: ConflictPolicy, met: LockConflict, holder: Holder | None) -> Held | Record:
        """End as one that another task refuses; what a copy of it does or did, if there is one."""
        copy = self._record(policy, met)
        if copy is None:
            journal_entries.did_not_run(self._execution, policy, holder)
            on_conflict.end(self._task, met, policy, given_up=self._acquisition.waited_as)
        return copy

    def _end_as_copy(self, found: Held | Record) -> Any:
        return redelivery.end(self._execution, found, self._acquisition.waited_as)

    def _record(self, policy: ConflictPolicy, error: Exception) -> Held | Record | None:
        """Record that this message will never be carried out; what another copy of it does or did, if there is one."""
        if policy in ("retry", "reject"):
            return None  # Its message is not at its end: a dead-letter exchange may send it again on purpose.
        try:
            return self._record_at_store(policy, error)
        except LockUnavailable as silent:
            self._acquisition.put_back(silent)

    def _record_at_store(self, policy: ConflictPolicy, error: Exception) -> Held | Record | None:
        it = self._execution
        ended = outcome.refused(self._task, it.request, policy, error) if it.is_remembered else None
        record = it.record(ended, self._ttl)
        if ended is None or record is None:
            return None
        copy = self._refuse(record)
        if isinstance(copy, Held) and self._acquisition.is_own(copy):
            self._store.abandon(copy.hold(it.key, ttl=it.options.ttl, limit=it.options.limit))
            copy = self._refuse(record)
            if isinstance(copy, Held) and self._acquisition.is_own(copy):
                raise LockUnavailable(self._store.server, "the hold of a message that ends could not be freed")
        if copy is None:
            settling.settle_after(it, ended, record.seconds)
        return copy

    def _refuse(self, record: Record) -> Held | Record | None:
        it = self._execution
        return self._store.refuse(it.key, it.holder, record, limit=it.options.limit)

    @property
    def _ttl(self) -> float:
        """Seconds: a message that was acknowledged as it came has copies only if these are on their way already."""
        request, ttl = self._execution.request, self._execution.runtime.settings.done_ttl
        return ttl if self._task.acks_late or delivery.is_redelivered(request) or request.eta else min(ttl, BRIEFLY)
