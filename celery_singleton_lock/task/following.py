"""A part of a canvas that was a duplicate when it was sent: it ends as the message that has the lock ends.

That message is its *leader*; this message is a *follower*. A follower looks each time it begins, and takes no slot in
between. While the leader waits, the follower waits in the line of the leader's lock. Once the leader has started, a
record names its run, and the follower ends as that run ends, like a copy that has joined a task (`joining`).

If the leader is gone without an end, one of its followers takes its lock, leaves its own name for the others, and runs
as if it had been sent with that lock. So one message always runs, and the others follow it.

Protocol: `docs/protocol.md`, section 15.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple, NoReturn

from celery.utils.log import get_logger

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.keys.key import is_key
from celery_singleton_lock.options.rules import UNTIL_EXPIRED
from celery_singleton_lock.options.task import raw_attribute
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import ends, journal_entries, requeue
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.decide import SETTLING
from celery_singleton_lock.task.ends import End
from celery_singleton_lock.task.joining import MOST_HEIRS, Joining, NotYet, ancestors_of, as_end
from celery_singleton_lock.task.queue_lock import is_by_time
from celery_singleton_lock.task.queued import Queued
from celery_singleton_lock.task.targets import Leader, RunIdentity, token_of
from celery_singleton_lock.task.turn import Execution

logger = get_logger(__name__)


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


def end_by_now(acquisition: Acquisition) -> End | None:
    """How this message's leader has ended; None if that is not known, or if it has no leader."""
    it = acquisition.execution
    if it.brought is None or (its_leader := _leader_of(it, it.brought)) is None:
        return None
    with suppress(LockUnavailable):
        answer = Following(acquisition, it.brought, its_leader).look_at_leader()
        return answer if isinstance(answer, End) else None
    return None


def is_led_by(acquisition: Acquisition, met: Held) -> bool:
    """Whether the task that has the lock of the run is this message's leader: the leader has outlived its own lock."""
    it = acquisition.execution
    if it.brought is None or met.holder is None or it.options.limit > 1:
        return False
    its_leader = _leader_of(it, it.brought)
    return its_leader is not None and its_leader.task_id == met.holder.task_id


def wake_followers(acquisition: Acquisition) -> None:
    """The previous run woke one waiter: this message, or another copy of it. Its followers wait in the same line
    although they only need its result, so wake the next one.
    """
    it = acquisition.execution
    if it.brought is None or not (it.brought.lock.wakes_followers and acquisition.has_waited):
        return
    if ends.may_be_followed(it.task, it.runtime.settings, it.brought.lock.scope):
        it.runtime.store.wake(it.key)


def _leader_of(execution: Execution, brought: Queued) -> Leader | None:
    """The message that this message follows now; None if it follows none."""
    return None if brought.lock.follows is None else execution.message.note.follows or brought.lock.follows


class Following:
    """A message that follows another one, and takes the lock that it `brought` once its leader is gone."""

    def __init__(self, acquisition: Acquisition, brought: Queued, its_leader: Leader) -> None:
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
        seen: set[tuple[str, bool]] = set()
        while (this := (self._leader.token, self._leader.run is None)) not in seen and len(seen) < MOST_HEIRS:
            if self._leader.task_id in self._ancestors:
                return None
            seen.add(this)
            if self._has_lock():
                other = self._go_on_leading()
            elif self._is_to_run():
                return None
            else:
                answer = self.look_at_leader()
                if not isinstance(answer, _Gone):
                    return answer
                if (other := self._heir()) is None and self._is_over():
                    return None
                other = other or self._lead()
            if not isinstance(other, Leader):
                return other
            self._leader = other
        answer = self.look_at_leader()  # It may have come again just now: then its follower gave the lock back.
        return None if isinstance(answer, _Gone) else answer

    def look_at_leader(self) -> End | NotYet | _Gone:
        """How the leader has ended, that it goes on, or that it is gone."""
        if self._leader.run is None and (found := self._look_at_message()) is not None:
            return found
        return self._look_at_run()

    def put_back(self, later: NotYet) -> NoReturn:
        """Look again later.

        Raises:
            Concluded: this message was put back.
        """
        it = self._execution
        if not it.message.put_back_count("follows"):
            logger.info("%s is a duplicate, and follows message %s", it, self._leader.task_id)
            holder = Holder(self._leader.task_id, since=self._leader.since)
            journal_entries.did_not_run(it, "follow", holder)
        self._acquisition.leave_line(later.key)
        carried = requeue.Carried(later.waits(it.options.limit), follows=self._leader)
        requeue.put_back(it.task, reason="follows", delay=later.delay, carried=carried)

    def _has_lock(self) -> bool:
        return any(token_of(held.owner) == token_of(self._lock.owner) for held in self._held(self._lock.key))

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

    def _look_at_message(self) -> End | NotYet | _Gone | None:
        """As `look_at_leader`, while the leader is not known to have started; None once it is."""
        # In this order: the leader records its run as it frees its lock.
        has_lock = [held for held in self._held(self._lock.key) if self._leader.has(held)]
        if (run := self._started()) is not None:
            self._leader = self._leader._replace(run=run)
            return None
        if has_lock and not any(map(self._lasts_for_its_time, has_lock)):
            return NotYet(key=self._lock.key)
        stored = self._stored()
        return NotYet() if stored is None and has_lock else stored or _Gone()

    def _look_at_run(self) -> End | NotYet | _Gone:
        run = self._leader.run
        if run is None or run.task != self._execution.task.name:
            return _Gone()  # Another task under the same lock has another result.
        for _ in range(2):  # It may end between the two looks.
            joining = Joining(self._acquisition, run.joined, run.key)
            answer = joining.look()
            self._leader = self._leader._replace(run=run._replace(joined=joining.joined))
            if answer is not None:
                return answer
            if any(held.holder and held.holder.sending == run.joined.sending for held in self._held(run.key)):
                return NotYet(key=run.key)
        return self._stored() or _Gone()

    def _stored(self) -> End | NotYet | _Gone | None:
        """What the result backend has of the leader's end; None if it has nothing."""
        it = self._execution
        if self._leader.run is None and raw_attribute(it.task, "lock_name"):
            return None  # It may be the result of another task.
        try:
            stored = ends.stored_end(it.task, self._leader.task_id, max(clock.wall() - self._leader.since, 0.0))
        except Exception as error:  # noqa: BLE001 - every backend has its own
            logger.warning("%s: the result backend cannot be read: %r", it, error)
            return NotYet(SETTLING)
        return None if stored is None else as_end(stored) or _Gone()

    def _heir(self) -> Leader | None:
        """The message to follow in place of a leader that is gone; None if there is none, or it is this one."""
        heir = self._recorded_heir()
        return None if heir is None or self._is_this(heir) else heir

    def _lead(self) -> Leader | End | NotYet | None:
        """Take the lock of the leader, which is gone.

        Returns:
            The message to follow instead, if another one has the lock; how the leader has ended, or that it goes on, if
            it is not gone after all; None if this message is to run.
        """
        met = self._brought.lead(self._execution.holder.label)
        if isinstance(met, Held) and self._leader.has(met) and self._lasts_for_its_time(met):
            # Otherwise all followers would run: none of them could see that another one does.
            self._store.free(met.hold(self._lock.key, ttl=self._lock.seconds, limit=self._lock.limit))
            met = self._brought.lead(self._execution.holder.label)
        if met is None:
            return self._confirm()
        return Leader.of(met) if isinstance(met, Held) else None

    def _go_on_leading(self) -> Leader | End | NotYet | None:
        """This message has the lock, maybe by an answer that was lost, so that the others do not know; otherwise as
        `_lead`.
        """
        self._brought.leads()
        heir = self._recorded_heir()
        if heir is not None and not self._is_this(heir):
            return heir  # The heir is gone, too, and this message has its lock.
        if heir is not None or self._runs_in(self._held(self._execution.key)):
            return None
        return self._confirm()

    def _confirm(self) -> Leader | End | NotYet | None:
        """This message has taken the lock: record it in the leader's place; otherwise as `_lead`."""
        if self._leader.run is None and (run := self._started()) is not None:  # As this message took its lock.
            return self._give_back(self._leader._replace(run=run))
        if not isinstance(answer := self._look_at_run(), _Gone):  # Its process had died, and it was delivered again.
            self._give_back(self._leader)
            return answer
        said = self._store.refuse(self._lock.key, self._leader.heirs_name, self._names_heir(self._leader, self._own))
        other = Leader.read(ends.noticed(said)) if isinstance(said, Record) else None
        if other is not None and not self._is_this(other):
            return self._give_back(other)
        logger.info("%s runs: message %s, which it followed, has not ended", self._execution, self._leader.task_id)
        return None

    def _give_back(self, other: Leader) -> Leader:
        """Follow `other` after all; a follower that has met this message's hold does so, too."""
        self._store.remember(self._lock.key, self._names_heir(self._own, other))
        self._brought.give_back()
        return other

    def _names_heir(self, of: Leader, heir: Leader) -> Record:
        return ends.notice(of.heirs_name, heir.header(), self._execution.runtime.settings.done_ttl)

    @property
    def _own(self) -> Leader:
        return Leader(self._execution.holder.task_id or "", token_of(self._lock.owner), clock.wall())

    def _recorded_heir(self) -> Leader | None:
        return Leader.read(ends.noticed(self._store.recorded(self._lock.key, self._leader.heirs_name.message)))

    def _is_this(self, other: Leader) -> bool:
        return other.token == token_of(self._lock.owner)

    def _started(self) -> RunIdentity | None:
        """The leader's run, which may have ended; None if the leader is not known to have started."""
        name = self._leader.name_of_run.message
        run = RunIdentity.read(ends.noticed(self._store.recorded(self._lock.key, name)))
        return run if run is not None and is_key(self._execution.runtime.settings.prefix, run.key) else None

    def _lasts_for_its_time(self, held: Held) -> bool:
        """Whether the holder keeps the lock whatever becomes of its message."""
        return is_by_time(held) or self._lock.scope == UNTIL_EXPIRED

    def _held(self, key: str) -> list[Held]:
        return self._store.held(key)
