"""Ends the lock that a message brought with it: as its body starts, or with the message.

One process ends the lock, by the owner that the message names: the process that runs the message, or, if that one died
or nothing was begun, the worker's main process (`worker.request`). A message that goes on as a copy or as its next
attempt keeps the lock.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from celery import states
from celery.exceptions import Reject
from celery.utils import uuid
from celery.utils.log import get_logger

from celery_singleton_lock import clock, trust
from celery_singleton_lock.errors import InvalidOption, LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Freeing, Held, Record
from celery_singleton_lock.task import ends, replacing
from celery_singleton_lock.task.ends import Concluded
from celery_singleton_lock.task.message import Message, TaskLike
from celery_singleton_lock.task.queue_lock import QueueLock, holder_of_message, lock_in
from celery_singleton_lock.task.targets import Joined, name_of_run, token_of
from celery_singleton_lock.task.turn import holder_of, message_of, turn_of

logger = get_logger(__name__)

#: Seconds until the lock of a message that was acknowledged becomes a lease: by then its sender, and the main process
#: that received it, have confirmed it for longer.
SOON = 0.2


class Queued:
    """A message in the hands of the process that runs it (`with`).

    Attributes:
        lock: the lock that it brought.
        key: the key of the lock of its run; None before that is known, and if it takes none.
        is_own: whether the lock is the message's own, as far as is known: a follower gets it when its leader is gone.
    """

    def __init__(self, task: TaskLike, lock: QueueLock) -> None:
        self.lock = lock
        self.key: str | None = None
        self._task = task
        self._turn = turn_of(task.request)
        self._runtime = Runtime.of(task.app)
        self._lease: Lease | None = None
        self.is_own = lock.follows is None

    def __enter__(self) -> Queued:
        if self.lock.replaced:  # The sender may have died before it recorded that.
            replacing.supersede(self._runtime.store, self.lock, self._task.request.id, self.lock.replaced)
        if self.is_own:
            self._keep_early()
        return self

    def leads(self) -> None:
        """The message now has the lock that it did not have when it was sent."""
        self.is_own = True
        self._keep_early()

    def lead(self, label: str) -> Held | Record | None:
        """Take the lock that the message did not have when it was sent.

        Returns:
            The holder, if that is another message; the record of the run, if a copy of this message, or its next
            attempt, has had the lock and freed it: nobody would free it again.

        Raises:
            LockUnavailable: no answer; if it got the lock, it finds that when it comes again, or the lock expires.
        """
        lock = self.lock
        holder = replace(holder_of_message(self._task.request.id, label), record=self._own_name.record)
        found = self._runtime.store.acquire(replace(lock.request(holder), check_finished=True, another=None))
        if isinstance(found, (Held, Record)):
            return found
        self.leads()
        if self._lease is None and lock.ends_at_end:
            self._runtime.confirmations.add(lock.confirmed())
        return None

    def give_back(self) -> None:
        """The message follows another one all the same."""
        self.is_own = False
        if self._lease is not None:
            self._runtime.heartbeat.stop(self._lease)
            self._lease = None
        with suppress(LockUnavailable):  # It is repeated until there is an answer.
            self._runtime.store.free(self.lock.hold())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        except Exception:  # noqa: BLE001 - what interrupts, a soft time limit say, comes once, and too late
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._lease is not None:
            self._runtime.heartbeat.stop(self._lease)
        if not self.is_own:
            self._turn.queue_lock_ended = True  # What its handlers send under its id follows nobody.
            return
        if self._turn.queue_lock_ended or not (error is None or isinstance(error, Exception)):
            return  # It has ended; or whatever stops this process decides what becomes of the message.
        if (hold := self._going_on(error)) is not None:
            if self._lease is not None:  # The renewed lease is shorter.
                self._runtime.confirmations.add(hold)
        elif self.lock.ends_at_end:
            self._free()
        self._turn.queue_lock_ended = True  # What its handlers send under its id asks for the lock anew.

    def start(self) -> None:
        """The body is about to run.

        Raises:
            Concluded: another message has replaced this one, and that was recorded.
        """
        if not self.is_own:
            self._turn.queue_lock_ended = True  # Nothing is passed on to its next attempt.
            return
        if not self.lock.ends_at_start:
            self._keep()
            return
        if self._lease is not None:
            self._runtime.heartbeat.stop(self._lease)
        freed = self._free()
        self._turn.queue_lock_ended = True  # Only now: an interruption before leaves it to the end.
        if freed in (Freeing.NOT_OURS, Freeing.UNCLEAR) and (why := replacing.started(self._runtime.store, self.lock)):
            is_shared = why.task_id == self._task.request.id
            ends.report(self._task, why, states.REVOKED, task_id=uuid() if is_shared else None)
            raise Concluded(str(why), "over" if is_shared else "revoked")

    def _going_on(self, error: Exception | None) -> Hold | None:
        """The lock as the copy or the next attempt has it, if the message goes on."""
        if self._turn.passes_on is not None:
            return self._turn.passes_on
        # Celery gives nothing back that it has acknowledged.
        is_given_back = isinstance(error, Reject) and self._task.acks_late and getattr(error, "requeue", False)
        continues = isinstance(error, Concluded) and error.kind == "continues"
        return self.lock.confirmed() if is_given_back or continues else None

    def _keep_early(self) -> None:
        """Have it renewed from now on, if its message will not be delivered again."""
        # A copy may come while another one runs in this process, whose lease is not to be touched.
        if not (self._task.acks_late or message_of(self._task.request).may_have_begun):
            with suppress(RuntimeError):  # No thread is available, as the run will find out.
                self._keep()

    def _keep(self) -> None:
        """Have it renewed from now on."""
        lock, now = self.lock, clock.now()
        if self._lease is not None or not lock.ends_at_end:
            return
        ttl, sent_at = lock.seconds, now
        if not self._task.acks_late:
            # As if it was due for renewal: the store has it for longer.
            ttl = self._ttl()
            sent_at = now - ttl * trust.RENEW_AFTER + SOON
        self._lease = lock.lease(ttl=ttl, sent_at=sent_at)
        self._runtime.heartbeat.start(self._lease, self._when_lost)

    def _ttl(self) -> float:
        with suppress(InvalidOption):  # The run will fail for that.
            if (options := self._task.lock_options(self._task.request)) is not None:
                return options.ttl
        return float(self._runtime.settings.defaults["ttl"])

    def _when_lost(self) -> None:
        if (lease := self._lease) is not None:
            logger.warning("%s: another message may be sent while this one runs: %s", lease.key, lease.reason)
            self._runtime.heartbeat.stop(lease)

    def _free(self) -> Freeing | None:
        """What became of the lock; None if there is no answer."""
        lock, record = self.lock, self._what_it_is()
        try:
            freed = self._runtime.store.free(lock.hold(), record=record)
        except LockUnavailable as error:  # It is repeated until there is an answer.
            logger.warning("%s: the lock of a message that has arrived is not freed yet: %s", lock.key, error)
            return None
        if freed is Freeing.NOT_OURS and record is not None:
            # Another message may have it: followers of this one are in line behind it, and end without the lock.
            self._runtime.store.wake(lock.key)
        if not freed:
            logger.debug("%s is no longer the lock of this message", lock.key)
        return freed

    def _what_it_is(self) -> Record | None:
        """The message's run, for its followers; None if it can have none."""
        task, settings = self._task, self._runtime.settings
        if self.key is None or not ends.may_be_followed(task, settings, self.lock.scope):
            return None
        joined = Joined.of(holder_of(task, task.request))
        if joined is None:
            return None
        content = task.name, self.key, joined._replace(since=0.0)
        return ends.notice(self._own_name, content, settings.done_ttl)

    @property
    def _own_name(self) -> Holder:
        """The name under which the message's run is recorded."""
        return name_of_run(token_of(self.lock.owner))


def brought_by(task: TaskLike, message: Message) -> Queued | None:
    """The handler of a message's queue lock; None if it has none."""
    lock = lock_in(message.carried, task.app, task.name)
    return None if lock is None or task.request.is_eager else Queued(task, lock)
