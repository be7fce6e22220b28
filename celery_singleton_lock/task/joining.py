"""A copy that ends as the task that had its lock ends (`on_conflict="join"`).

The copy waits in the line of the lock, without a slot, and looks each time it begins: has that task ended? A record
beside the lock says so, and is there as soon as the lock is free; the value is in it, or in the result backend. A task
that died has left no record: then this copy runs itself as soon as it has the lock, and the other waiting copies end as
it does. They find it by another record, which names it as the *heir* of that task.

Protocol: `docs/protocol.md`, section 13.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from celery import states
from celery.exceptions import WorkerLostError
from celery.utils.log import get_logger

from celery_singleton_lock import chance, cleaned
from celery_singleton_lock.errors import LockLost, LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import JOIN
from celery_singleton_lock.options.task import check_together
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import ends, requeue
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.decide import SETTLING
from celery_singleton_lock.task.ends import REPLACED, End, Outcome
from celery_singleton_lock.task.message import RequestLike, Waits
from celery_singleton_lock.task.targets import Joined
from celery_singleton_lock.task.turn import Execution

logger = get_logger(__name__)

#: Seconds between two looks at the result backend, roughly.
SOON = 1.0

#: How many heirs are looked at, each the heir of the one before: as many as have died.
MOST_HEIRS = 20

#: Takes the place of a state in the record that names an heir.
HEIR = "JOINED"

#: Ends without a result of the work: a copy that has joined such a task runs.
_DIED = (WorkerLostError, LockLost)


class NotYet(NamedTuple):
    """The end is not known yet: the copy looks again.

    Attributes:
        delay: seconds; None: longer with each look.
        key: the lock that it waits for, and is woken for; None: it looks now and then.
    """

    delay: float | None = None
    key: str | None = None

    def waits(self, limit: int) -> Waits | None:
        """The same, as its message carries it."""
        return None if self.key is None else Waits(self.key, limit)


def joinable(execution: Execution, found: Held) -> Joined | None:
    """The task that has the lock; None if this message must not wait for it, or cannot.

    Raises:
        InvalidOption: nobody could tell how that task has ended.
    """
    # The policy may be what a callable has chosen.
    check_together(execution.task, replace(execution.options, on_conflict=JOIN), execution.runtime.settings)
    request = execution.request
    if request.is_eager or found.holder is None or (joined := Joined.of(found.holder)) is None:
        return None
    return None if joined.task_id in ancestors_of(request) else joined


def ancestors_of(request: RequestLike) -> set[str]:
    """The ids of the tasks that may be waiting for this one, as far as its message says."""
    return {cleaned.text(each) for each in (request.root_id, request.parent_id) if each is not None}


def acquire(acquisition: Acquisition) -> Lease | Held | Record | End | None:
    """As `Acquisition.acquire`; for a copy that has joined another task, how that task has ended, if it has."""
    joined = acquisition.execution.message.note.joins
    if joined is None:
        return acquisition.acquire()
    joining = Joining(acquisition, joined)
    if (ended := joining.before_lock()) is not None:
        return ended
    found = acquisition.acquire()
    return (joining.with_lock(found) or found) if isinstance(found, Lease) else found


def end_by_now(acquisition: Acquisition, joined: Joined) -> End | None:
    """How the task that has the lock has ended: it may keep the lock after its end, see `lock_at_least_for`."""
    with suppress(LockUnavailable):  # It is looked at later.
        found = Joining(acquisition, joined).look()
        return found if isinstance(found, End) else None
    return None


class Joining:
    """A copy that has joined a task, which holds the lock `key`; None means the copy's own key.

    Attributes:
        joined: the attempt whose end it waits for now.
    """

    def __init__(self, acquisition: Acquisition, joined: Joined, key: str | None = None) -> None:
        self._acquisition = acquisition
        self._execution = acquisition.execution
        self._key = key or acquisition.execution.key
        self.joined = joined

    def before_lock(self) -> End | None:
        """How the task has ended; None if the lock is to be asked for.

        Raises:
            Concluded: the task goes on; this copy was put back.
        """
        try:
            found = self.look()
        except LockUnavailable:  # Asking for the lock will show.
            return None
        if isinstance(found, NotYet):
            self._acquisition.leave_line(found.key)
            self._put_back(found)
        return found

    def with_lock(self, lease: Lease) -> End | None:
        """As `before_lock`, for a copy that has the lock now; None if it is to run, as the other copies then can see.

        Raises:
            Concluded: the end is not known yet; this copy was put back.
        """
        try:
            found = self.look()
        except LockUnavailable as silent:
            self._acquisition.put_back(silent)
        if isinstance(found, NotYet) and found.delay is None:
            found = None  # Do not wait for a task that goes on: it may have met this copy's hold, and wait for it.
        if found is not None:
            self._acquisition.abandon()
        if isinstance(found, NotYet):
            self._put_back(found)
        if isinstance(found, End):
            return found
        if not lease.held:  # Nobody renews it yet.
            server = self._execution.runtime.store.server
            self._acquisition.put_back(LockUnavailable(server, "the lease ended as the copy looked for another end"))
        self._take_over()
        return None

    def look(self) -> End | NotYet | None:
        """How the task has ended, or that it goes on; None if it runs, has died, or left no result of the work.

        Raises:
            LockUnavailable: the lock server does not answer.
        """
        looked_at: list[Joined] = []
        while len(looked_at) < MOST_HEIRS:
            looked_at.append(self.joined)
            if (found := self._look()) is not None:
                return found
            if self.joined.retries and not self.joined.since:  # An heir names the attempt that others have seen begin.
                self.joined = self.joined._replace(since=self._began_at())
            heir = self._heir_of(self.joined)
            if heir is None or heir in looked_at:
                return self._look_at_heir_before()
            self.joined = heir
        return None

    def _take_over(self) -> None:
        it = self._execution
        logger.info("%s runs: task %s, which it had joined, has not ended", it, self.joined.task_id)
        seconds = it.runtime.settings.done_ttl
        head = Outcome(HEIR, settled=True).record_of(it.holder, seconds).content
        own = json.dumps(Joined.of(it.holder))
        it.runtime.store.remember(self._key, Record(self._name_of_heir(self.joined), head + own.encode(), seconds))

    def _put_back(self, later: NotYet) -> NoReturn:
        it = self._execution
        carried = requeue.Carried(later.waits(it.options.limit), self.joined)
        requeue.put_back(it.task, reason="conflict", delay=later.delay, carried=carried)

    def _look(self) -> End | NotYet | None:
        it = self._execution
        while (record := self._recorded(self.joined)) is not None:
            recorded, age = ends.read(record)
            if recorded.state == states.RETRY:
                self.joined = self.joined.next_attempt()
                continue
            if recorded.content == REPLACED:
                self.joined = self.joined._replace(goes_on=True)
            return self._end(recorded, age)
        # As long as the end of the attempt before is on record, this attempt is expected. Once it has begun, it is gone
        # if it neither has the lock nor has left a record.
        is_expected = self.joined.goes_on and not self.joined.since
        if not is_expected or (record := self._recorded(self.joined.attempt_before())) is None:
            return None
        # It may end without a record here: under another lock, or revoked before it began.
        _, age = ends.read(record)
        stored = self._stored(age)
        if stored is not None:
            return stored if isinstance(stored, NotYet) else as_end(stored)
        began_at = self._began_at()
        held = it.runtime.store.held(self._key)
        holds = [holder.since for each in held if (holder := each.holder) and self.joined.has_begun_as(holder)]
        self.joined = self.joined._replace(since=max(holds, default=began_at))
        if began_at and not holds:
            return self._look()  # It has died, or has ended just now.
        return NotYet(key=self._key if held else None)

    def _began_at(self) -> float:
        """Since when this attempt has had the lock, as it has recorded that; 0 if it has not."""
        it = self._execution
        name = self.joined.name_of_begin(it.task.name).message
        recorded = ends.noticed(it.runtime.store.recorded(self._key, name))
        return cleaned.seconds(recorded[0]) if recorded else 0.0

    def _end(self, recorded: Outcome, age: float) -> End | NotYet | None:
        """The end of a message that is known to be over."""
        if recorded.state not in (states.SUCCESS, states.FAILURE, states.IGNORED):
            return None
        if recorded.state != states.IGNORED and (kept := ends.end_of(recorded)) is not None:
            return None if isinstance(kept.error, _DIED) else kept
        stored = self._stored(age)
        if stored is not None:
            return stored if isinstance(stored, NotYet) else as_end(stored)
        if self.joined.goes_on and recorded.content == REPLACED:
            return NotYet()
        is_settling = recorded.state != states.IGNORED and age < SETTLING
        return NotYet(chance.spread(SOON)) if is_settling else None

    def _stored(self, age: float) -> Mapping[str, Any] | NotYet | None:
        """What the result backend has of a task of which an attempt ended `age` seconds ago."""
        try:
            return ends.stored_end(self._execution.task, self.joined.task_id, age)
        except Exception as error:  # noqa: BLE001 - every backend has its own
            logger.warning("%s: the result backend cannot be read: %r", self._execution, error)
            return NotYet(SETTLING)

    def _look_at_heir_before(self) -> End | NotYet | None:
        """How a copy has ended that ran in place of the task before this attempt had begun; None if there was none."""
        if not (self.joined.goes_on and self.joined.since):
            return None
        heir = self._heir_of(self.joined._replace(since=0.0))
        return None if heir is None else Joining(self._acquisition, heir, self._key).look()

    def _heir_of(self, joined: Joined) -> Joined | None:
        """The copy that ran in place of a task; None if there was none, or it was this one."""
        record = self._execution.runtime.store.recorded(self._key, self._name_of_heir(joined))
        fields = cleaned.array(record.content.partition(b"\n")[2]) if record is not None else None
        heir = Joined.read(fields)
        return None if heir is None or heir.sending == self._execution.holder.sending else heir

    def _name_of_heir(self, joined: Joined) -> str:
        return f"heir:{joined.message(self._execution.task.name)}:{joined.since:.6f}"

    def _recorded(self, joined: Joined) -> Record | None:
        it = self._execution
        return it.runtime.store.recorded(self._key, joined.message(it.task.name))


def as_end(stored: Mapping[str, Any]) -> End | None:
    """The end as a result backend has it; None if it is not a result of the work."""
    status, result = stored["status"], stored["result"]
    if status == states.SUCCESS:
        return End(result)
    if status == states.FAILURE and isinstance(result, Exception) and not isinstance(result, _DIED):
        return End(error=result)
    return None
