"""A message that ends as another one, its target, without a run of its own.

A message *joins* its target if it met it as that ran (`on_conflict="join"`). A part of a canvas *follows* its target,
its leader, if it met it when it was sent, as that waited: a duplicate in a canvas. Both wait without a slot, and look
each time they begin: has the target ended? A record beside the lock of its run says so, and is there as soon as that
lock is free; the value is in it, or in the result backend. Until then, the target is alive if it has the lock that it
got when it was sent, or the lock of its run, or its next attempt is expected; it is looked at in this order, in which
it moves.

A target that is gone without an end has left no record: then one of those that wait for it runs in its place, as soon
as it has the lock that it met, and the others end as it does. They find it by another record, which names it as the
target's *heir*. So one message always runs.

Protocol: `docs/protocol.md`, sections 13 and 15.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from celery import states
from celery.exceptions import WorkerLostError
from celery.utils.log import get_logger

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.errors import LockLost, LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.keys.key import key_of_text, without_queue
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import JOIN, UNTIL_EXPIRED
from celery_singleton_lock.options.task import check_together, raw_attribute
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import ends, requeue
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.decide import SETTLING
from celery_singleton_lock.task.ends import REPLACED, End, Outcome
from celery_singleton_lock.task.message import RequestLike, Target, Waits
from celery_singleton_lock.task.queue_lock import OF_EACH_MESSAGE, Queued, is_by_time
from celery_singleton_lock.task.turn import Execution, journal_end

logger = get_logger(__name__)

#: Seconds between two looks at the result backend, roughly.
SOON = 1.0

#: How many heirs are looked at, each the heir of the one before: as many as have died.
MOST_HEIRS = 20

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


def joinable(execution: Execution, found: Held) -> Target | None:
    """The task that has the lock; None if this message must not wait for it, or cannot.

    Raises:
        InvalidOption: nobody could tell how that task has ended.
    """
    # The policy may be what a callable has chosen.
    check_together(execution.task, replace(execution.options, on_conflict=JOIN), execution.runtime.settings)
    request = execution.request
    if request.is_eager or found.holder is None or (joined := Target.of(found.holder)) is None:
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


def end_by_now(acquisition: Acquisition) -> End | None:
    """How the message has ended that this one has ended as; None if that is not known any more, or there is none."""
    it, joined = acquisition.execution, acquisition.execution.message.note.joins
    with suppress(LockUnavailable):  # It is looked at later.
        found: End | NotYet | _Gone | None = None
        if joined is not None:
            found = Joining(acquisition, joined).look()
        elif it.brought is not None and (its_leader := _leader_of(it, it.brought)) is not None:
            found = Following(acquisition, it.brought, its_leader).look_at_leader()
        return found if isinstance(found, End) else None
    return None


class Joining:
    """A copy that has joined a task, which holds the lock `key`; None means the copy's own key.

    Attributes:
        joined: the attempt whose end it waits for now.
    """

    def __init__(self, acquisition: Acquisition, joined: Target, key: str | None = None) -> None:
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
        looked_at: list[Target] = []
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
        own = Target.of(it.holder)
        it.runtime.store.remember(self._key, _names_heir(it, self.joined, own))

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
            return None  # It has died, or has ended just now: the next look finds that, as for a first attempt.
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
        return NotYet(clock.spread(SOON)) if is_settling else None

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

    def _heir_of(self, joined: Target) -> Target | None:
        """The copy that ran in place of a task; None if there was none, or it was this one."""
        heir = _heir_of(self._execution, self._key, joined)
        return None if heir is None or heir.sending == self._execution.holder.sending else heir

    def _recorded(self, joined: Target) -> Record | None:
        it = self._execution
        return it.runtime.store.recorded(self._key, joined.message(it.task.name))


def _heir_of(execution: Execution, key: str, target: Target) -> Target | None:
    """The message that runs in place of its target, as is recorded beside the lock `key`; None if there is none."""
    name = target.name_of_heir(execution.task.name).message
    return Target.read(ends.noticed(execution.runtime.store.recorded(key, name)))


def _names_heir(execution: Execution, target: Target, heir: Target | None) -> Record:
    """The record that says which message runs in place of its target."""
    name = target.name_of_heir(execution.task.name)
    return ends.notice(name, heir or (), execution.runtime.settings.done_ttl)


def as_end(stored: Mapping[str, Any]) -> End | None:
    """The end as a result backend has it; None if it is not a result of the work."""
    status, result = stored["status"], stored["result"]
    if status == states.SUCCESS:
        return End(result)
    if status == states.FAILURE and isinstance(result, Exception) and not isinstance(result, _DIED):
        return End(error=result)
    return None


class _Gone(NamedTuple):
    """The leader has no end, and will have none."""


def end_of_leader(acquisition: Acquisition) -> End | None:
    """How this message's leader has ended; None if this message has no leader, or is to run.

    Raises:
        Concluded: the leader has not ended; this message was put back.
    """
    it = acquisition.execution
    if it.brought is None or (its_leader := _leader_of(it, it.brought)) is None:
        return None
    following = Following(acquisition, it.brought, its_leader)
    try:
        answer = following.look()
    except LockUnavailable as silent:
        if it.options.on_unavailable == "retry":
            acquisition.put_back(silent)
        return None  # Asking for the lock of its run will show.
    if isinstance(answer, NotYet):
        following.put_back(answer)
    if answer is None:
        # It runs, and the others in the line of its leader's run wait for it from now on. So do those in line for the
        # lock that it brought, if it has that lock: it may run without, since a copy of it has freed the lock.
        acquisition.leave_line(it.key, it.brought.lock.key if it.brought.is_own else None)
    return answer


def is_led_by(acquisition: Acquisition, met: Held) -> bool:
    """Whether the task that has the lock of the run is this message's leader: the leader has outlived its own lock."""
    it = acquisition.execution
    if it.brought is None or met.holder is None or it.options.limit > 1:
        return False
    its_leader = _leader_of(it, it.brought)
    return its_leader is not None and its_leader.sending == met.holder.sending


def wake_followers(acquisition: Acquisition) -> None:
    """The previous run woke one waiter: this message, or another copy of it. Its followers wait in the same line
    although they only need its result, so wake the next one.
    """
    it = acquisition.execution
    if it.brought is None or not (it.brought.lock.wakes_followers and acquisition.has_waited):
        return
    if ends.may_be_followed(it.task, it.runtime.settings, it.brought.lock.scope):
        it.runtime.store.wake(it.key)


def _leader_of(execution: Execution, brought: Queued) -> Target | None:
    """The message that this message follows now; None if it follows none."""
    return None if brought.lock.follows is None else execution.message.note.follows or brought.lock.follows


class Following:
    """A message that follows another one, and takes the lock that it `brought` once its leader is gone."""

    def __init__(self, acquisition: Acquisition, brought: Queued, its_leader: Target) -> None:
        self._acquisition = acquisition
        self._execution = acquisition.execution
        self._store = acquisition.execution.runtime.store
        self._brought = brought
        self._lock = brought.lock
        self._leader = its_leader
        self._ancestors = ancestors_of(acquisition.execution.request)

    def look(self) -> End | NotYet | None:
        """How the leader has ended, or that it goes on; None if this message is to run.

        Raises:
            LockUnavailable: the lock server does not answer.
        """
        seen: set[str] = set()
        while (this := self._leader.sending) not in seen and len(seen) < MOST_HEIRS:
            if self._leader.task_id in self._ancestors:
                return None
            seen.add(this)
            met = self._held(self._lock.key)
            if any(held.owner == self._lock.owner for held in met):
                self._brought.leads()
                # Maybe by an answer that was lost, so that the others do not know.
                other = None if self._is_this(self._recorded_heir()) else self._confirm()
            elif self._is_to_run():
                return None
            else:
                answer = self.look_at_leader(met)
                if not isinstance(answer, _Gone):
                    return answer
                other = self._recorded_heir()
                if other is None or self._is_this(other):
                    other = None if self._is_over() else self._lead()
            if not isinstance(other, Target):
                return other
            self._leader = other
        answer = self.look_at_leader()  # It may have come again just now: then its follower gave the lock back.
        return None if isinstance(answer, _Gone) else answer

    def look_at_leader(self, met: list[Held] | None = None) -> End | NotYet | _Gone:
        """How the leader has ended, that it goes on, or that it is gone; `met`: who had its lock a moment ago."""
        # In this order: it frees this lock when it has the lock of its run, or has left its record.
        met = self._held(self._lock.key) if met is None else met
        has_lock = [held for held in met if self._is_leaders(held)]
        if has_lock and not any(map(self._lasts_for_its_time, has_lock)):
            return NotYet(key=self._lock.key)
        answer = self._look_at_run()
        return NotYet() if has_lock and isinstance(answer, _Gone) and self._stored() is None else answer

    def put_back(self, later: NotYet) -> NoReturn:
        """Look again later.

        Raises:
            Concluded: this message was put back.
        """
        it = self._execution
        if not it.message.put_back_count("follows"):
            logger.info("%s is a duplicate, and follows message %s", it, self._leader.task_id)
            holder = Holder(self._leader.task_id, since=self._leader.sent)
            journal_end(it, "follow", holder)
        self._acquisition.leave_line(later.key)
        carried = requeue.Carried(later.waits(it.options.limit), follows=self._leader)
        requeue.put_back(it.task, reason="follows", delay=later.delay, carried=carried)

    def _is_to_run(self) -> bool:
        """Whether a copy of it runs elsewhere, or a task that may be waiting for it has the lock of its run."""
        in_run = self._held(self._execution.key)
        if self._runs_in(in_run):
            return True
        # The leader may wait for such a task, which may wait for this message.
        return any(held.holder is not None and held.holder.task_id in self._ancestors for held in in_run)

    def _runs_in(self, in_run: list[Held]) -> bool:
        return any(self._execution.is_copy_of(held) for held in in_run)

    def _is_over(self) -> bool:
        """Whether another copy of this message has ended, so that this copy needs no lock: it ends in the same way."""
        it = self._execution
        return self._store.recorded(it.key, it.holder.message) is not None

    def _look_at_run(self) -> End | NotYet | _Gone:
        key = self._key_of_run()
        for _ in range(2):  # It may end between the two looks.
            joining = Joining(self._acquisition, self._leader, key)
            answer = joining.look()
            self._leader = joining.joined
            if answer is not None:
                return answer
            if any(held.holder and held.holder.sending == self._leader.sending for held in self._held(key)):
                return NotYet(key=key)
        return self._stored() or _Gone()

    def _key_of_run(self) -> str:
        """The key of the lock under which the leader runs."""
        it = self._execution
        if self._lock.scope not in OF_EACH_MESSAGE:
            return without_queue(self._lock.key)
        name = raw_attribute(it.task, "lock_name") or it.task.name
        return key_of_text(it.runtime.settings.prefix, name, self._leader.sending)

    def _stored(self) -> End | NotYet | _Gone | None:
        """What the result backend has of the leader's end; None if it has nothing."""
        it = self._execution
        if raw_attribute(it.task, "lock_name"):
            return None  # It may be the result of another task.
        try:
            stored = ends.stored_end(it.task, self._leader.task_id, max(clock.wall() - self._leader.sent, 0.0))
        except Exception as error:  # noqa: BLE001 - every backend has its own
            logger.warning("%s: the result backend cannot be read: %r", it, error)
            return NotYet(SETTLING)
        return None if stored is None else as_end(stored) or _Gone()

    def _lead(self) -> Target | End | NotYet | None:
        """Take the lock of the leader, which is gone.

        Returns:
            The message to follow instead, if another one has the lock; how the leader has ended, or that it goes on, if
            it is not gone after all; None if this message is to run.
        """
        met = self._brought.lead(self._execution.holder)
        if isinstance(met, Held) and self._is_leaders(met) and self._lasts_for_its_time(met):
            # Otherwise all followers would run: none of them could see that another one does.
            self._store.free(met.hold(self._lock.key, ttl=self._lock.seconds, limit=self._lock.limit))
            met = self._brought.lead(self._execution.holder)
        if met is None:
            return self._confirm()
        return None if met.holder is None else Target.waiting(met.holder)

    def _confirm(self) -> Target | End | NotYet | None:
        """This message has the lock: record it in the leader's place; otherwise as `_lead`."""
        if self._runs_in(self._held(self._execution.key)):
            if self._lock.ends_at_start:  # A copy of this message runs: it has freed the lock, or is about to.
                self._brought.give_back()
            return None
        if not isinstance(answer := self._look_at_run(), _Gone):  # It has begun just now, or was delivered again.
            self._give_back(self._leader)
            return answer
        it, leader = self._execution, self._leader.as_sent()
        record = _names_heir(it, leader, self._own)
        said = self._store.refuse(self._lock.key, leader.name_of_heir(it.task.name), record)
        other = Target.read(ends.noticed(said)) if isinstance(said, Record) else None
        if other is not None and not self._is_this(other):
            return self._give_back(other)
        logger.info("%s runs: message %s, which it followed, has not ended", it, leader.task_id)
        return None

    def _give_back(self, other: Target) -> Target:
        """Follow `other` after all; a follower that has met this message's hold does so, too."""
        self._store.remember(self._lock.key, _names_heir(self._execution, self._own, other.as_sent()))
        self._brought.give_back()
        return other

    @property
    def _own(self) -> Target:
        holder = self._execution.holder
        return Target(holder.task_id or "", holder.sending, 0, 0, 0.0, sent=clock.wall())

    def _recorded_heir(self) -> Target | None:
        return _heir_of(self._execution, self._lock.key, self._leader.as_sent())

    def _is_this(self, other: Target | None) -> bool:
        return other is not None and other.sending == self._execution.holder.sending

    def _is_leaders(self, held: Held) -> bool:
        """Whether the leader, or its next attempt, has the lock."""
        return held.holder is not None and held.holder.sending == self._leader.sending

    def _lasts_for_its_time(self, held: Held) -> bool:
        """Whether the holder keeps the lock whatever becomes of its message."""
        return is_by_time(held) or self._lock.scope == UNTIL_EXPIRED

    def _held(self, key: str) -> list[Held]:
        return self._store.held(key)
