"""The lock that a message has while it waits: taken as it is sent, named by its header, freed as `lock_scope` says.

The owner is the message's, not a delivery's: each copy of it has the header, and may free the lock; nobody else knows
the owner. It belongs to one task and id: copied to another message, it has no effect.

One process ends the lock, as the body starts, or with the message: the process that runs the message, or, if that one
died or nothing was begun, the worker's main process (`worker.request`). A message that goes on as a copy or as its next
attempt keeps the lock.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from celery import states
from celery.exceptions import Reject
from celery.utils import uuid
from celery.utils.log import get_logger

from celery_singleton_lock import cleaned, clock, trust
from celery_singleton_lock.errors import InvalidOption, LockSuperseded, LockUnavailable
from celery_singleton_lock.holder import Holder, is_owner, new_owner
from celery_singleton_lock.in_bulk import UNCONFIRMED_TTL
from celery_singleton_lock.keys.key import QUEUE, has_form_of_key, is_key
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.options.rules import (
    MAX_LIMIT,
    MAX_QUEUE_TTL,
    UNTIL_EXECUTED,
    UNTIL_EXECUTING,
    UNTIL_EXPIRED,
    WHILE_EXECUTING,
    is_seconds,
    is_whole,
)
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Arrival, Freeing, Held, LockRequest, Superseded, order_of
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.ends import Concluded
from celery_singleton_lock.task.interrupt import protect
from celery_singleton_lock.task.message import MAX_NUMBER, Message, Target, TaskLike
from celery_singleton_lock.task.turn import message_of, turn_of

logger = get_logger(__name__)

#: Places of the header's part: task, key, owner, seconds, limit, scope. Then, if they matter, the number, whether it
#: replaces, and the message that it follows.
_FIELDS = 6

#: Seconds for which we repeat that a lock has ended while the lock server does not answer.
SAID_FOR = 600.0

#: Seconds for which the order of a key is kept at least: an older message may have a later date.
KNOWN_FOR = 86_460.0

#: Seconds until the lock of a message that was acknowledged becomes a lease: by then its sender, and the main process
#: that received it, have confirmed it for longer.
SOON = 0.2

#: Scopes that let several messages run at once: each message has its own lock as it runs, because of its copies.
OF_EACH_MESSAGE = (UNTIL_EXECUTING, UNTIL_EXPIRED)


# Nobody changes a lock once it is made, as for `Holder`.
@dataclass(slots=True, unsafe_hash=True)
class QueueLock:
    """The lock of one message.

    Attributes:
        key: of this lock, see `key_of_queue`.
        owner: the message's.
        seconds: how long it lasts once it is confirmed.
        limit: how many messages may have one.
        scope: when it ends, as the sender says.
        number: its place in the order of the messages that may replace each other (see `stores.base.Arrival`):
            the fence under which it got the lock, or a higher one if it replaces; None if it is in no such order.
        replaces: whether it was sent although another message had the lock.
        follows: the leader, which has the lock (see `sharing`): this message ends as the leader ends, or gets the lock
            when the leader is gone.
    """

    key: str
    owner: str
    seconds: float
    limit: int
    scope: str
    number: int | None = None
    replaces: bool = False
    follows: Target | None = None

    @property
    def ends_at_start(self) -> bool:
        return self.scope not in (UNTIL_EXECUTED, UNTIL_EXPIRED)

    @property
    def ends_at_end(self) -> bool:
        """Whether it ends with its message at the latest."""
        return self.scope != UNTIL_EXPIRED

    @property
    def wakes_followers(self) -> bool:
        """Whether its message wakes the next one in line when it gets the lock of its run: that may be a follower of
        the run before (see `sharing`).
        """
        return self.follows is None and self.scope not in OF_EACH_MESSAGE

    def request(self, holder: Holder) -> LockRequest:
        """The request to take it; if it is confirmed afterwards, for no longer than sending takes."""
        ttl = self.seconds if self.scope == UNTIL_EXPIRED else min(UNCONFIRMED_TTL, self.seconds)
        return LockRequest(self.key, self.owner, ttl=ttl, holder=holder, limit=self.limit)

    def request_in_order(self, holder: Holder, task: str, *, stops: bool, older_for: float = 0.0) -> LockRequest:
        """As `request`, for the newest message of its key and task; with `stops`, from an older one that waits, which
        may come for as many seconds as `older_for` says, if that is known.
        """
        arrival = Arrival(self.number, max(self.seconds, older_for, KNOWN_FOR), task, stops)
        return replace(self.request(holder), arrival=arrival, another=None)

    def hold(self) -> Hold:
        """The hold to free."""
        # The trace that a given-up hold leaves lasts as long.
        return Hold(self.key, self.owner, ttl=SAID_FOR, limit=self.limit)

    def confirmed(self) -> Hold:
        """The hold to renew, once."""
        return Hold(self.key, self.owner, ttl=self.seconds, limit=self.limit)

    def confirmed_again(self) -> Hold:
        """The same for a copy of the message, which may come late: its next attempt may need the lock for longer."""
        return Hold(self.key, self.owner, ttl=self.seconds, limit=self.limit, only_longer=True)

    def lease(self, *, ttl: float, sent_at: float) -> Lease:
        """The hold to renew for as long as its message is carried out."""
        return Lease(self.key, self.owner, ttl=ttl, fence=0, sent_at=sent_at, limit=self.limit)

    def part(self, task: str) -> list[Any]:
        """What the header of its message, for a task of this name, says of it."""
        fields = [task, self.key, self.owner, self.seconds, self.limit, self.scope]
        if self.follows is not None:
            return [*fields, self.number, self.replaces, [*self.follows]]
        return fields if self.number is None else [*fields, self.number, self.replaces]


def holder_of_message(task_id: object, sending: str | None, label: str, *, order: str = "") -> Holder:
    """A message, as the holder of its lock: no process runs it yet.

    Args:
        sending: the name of its sending, if that is known.
        order: that of the messages that may replace it; empty if none may.
    """
    named = None if task_id is None else cleaned.text(task_id)
    return Holder(
        named,
        node=socket.gethostname(),
        since=clock.wall(),
        sending=sending or "",
        label=label,
        order=order,
    )


def is_by_time(held: Held) -> bool:
    """Whether a lock that was found under a queue's key lasts for its time, whatever becomes of its message.

    Such a lock (`until_expired`) is taken for all its time at once, other locks for no longer than sending takes. If
    its own time is that short, it counts as one of the others, and has ended before anybody asks.
    """
    return held.holder is not None and held.holder.ttl > UNCONFIRMED_TTL


def lock_in(carried: Mapping[str, Any], app: Any, task: str) -> QueueLock | None:
    """The lock of a message for a task of this name, as our header says; None if it has none, or others wrote that."""
    if "queue" not in carried:  # As in most messages.
        return None
    part = carried["queue"]
    if not isinstance(part, (list, tuple)) or len(part) < _FIELDS:
        return None
    of_task, key, owner, seconds, limit, scope = part[:_FIELDS]
    if of_task != task:
        return None
    prefix = Runtime.of(app).settings.prefix
    if not (isinstance(key, str) and key == cleaned.key(key) and key.endswith(QUEUE) and _is_key(prefix, key, task)):
        return None
    if not (is_owner(owner) and is_seconds(seconds) and 0 < seconds <= MAX_QUEUE_TTL and is_whole(limit, 1, MAX_LIMIT)):
        return None
    number, replaces, follows = (*part[_FIELDS:], None, None, None)[:3]
    return QueueLock(
        key,
        owner,
        seconds,
        limit,
        scope if isinstance(scope, str) else WHILE_EXECUTING,
        number if is_whole(number, 1, MAX_NUMBER) else None,
        replaces is True,
        Target.read(follows),
    )


_reported: list[str] = []


def _is_key(prefix: str, key: str, task: str) -> bool:
    """As `is_key`; log, once in a process, that the sender's locks are others than this worker's."""
    if is_key(prefix, key):
        return True
    if has_form_of_key(key) and not _reported:
        _reported.append(key)
        logger.warning(
            "task %s came with the lock %s, which does not begin with this worker's singleton_lock_prefix, %r: nobody "
            "here frees it, and its sender sends no other such message until it has expired. Set the same "
            "singleton_lock_prefix where tasks are sent and where they run. Logged once in this process.",
            cleaned.text(task),
            key,
            prefix,
        )
    return False


class Queued:
    """A message in the hands of the process that runs it (`with`).

    Attributes:
        lock: the lock that it brought.
        is_own: whether the lock is the message's own, as far as is known: a follower gets it when its leader is gone.
    """

    def __init__(self, task: TaskLike, lock: QueueLock) -> None:
        self.lock = lock
        self._task = task
        self._turn = turn_of(task.request)
        self._runtime = Runtime.of(task.app)
        self._lease: Lease | None = None
        self.is_own = lock.follows is None

    def __enter__(self) -> Queued:
        if self.is_own:
            self._keep_early()
        return self

    def leads(self) -> None:
        """The message now has the lock that it did not have when it was sent."""
        self.is_own = True
        self._keep_early()

    def lead(self, holder: Holder) -> Held | None:
        """Take the lock that the message did not have when it was sent; who has it, if that is another message.

        Raises:
            LockUnavailable: no answer; if it got the lock, it finds that when it comes again, or the lock expires.
        """
        lock = self.lock
        own = holder_of_message(holder.task_id, holder.sending, holder.label)
        found = self._runtime.store.acquire(replace(lock.request(own), another=None))
        if isinstance(found, Held):
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
        protect(self._task.request)
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
            Concluded: another message has replaced this one, which has ended as such.
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
        if freed in (Freeing.NOT_OURS, Freeing.UNCLEAR) and (why := self._superseded()):
            is_shared = why.task_id == self._task.request.id
            ends.report(self._task, why, states.REVOKED, task_id=uuid() if is_shared else None)
            raise Concluded(str(why), "over" if is_shared else "revoked")

    def _superseded(self) -> LockSuperseded | None:
        """Why the message must not start, whose lock is not its own any more: a newer one has come in its place.

        Otherwise it counts from now on, if its sender could not say so, and older ones do not start.
        """
        lock, store, message = self.lock, self._runtime.store, message_of(self._task.request)
        # It may be about to get the lock, which nobody would free.
        store.abandon(lock.hold())
        if lock.number is None:
            return None
        holder = holder_of_message(message.id, message.sending, "", order=order_of(self._task.name))
        # One that was delivered again may be older than the message that has the lock by now.
        stops = lock.replaces and not message.may_have_begun
        request = replace(lock, owner=new_owner()).request_in_order(holder, self._task.name, stops=stops)
        found: object = None
        try:
            found = store.acquire(request)
        except LockUnavailable as error:
            logger.warning("%s: a message runs, and it is not known whether it was replaced: %s", lock.key, error)
        if isinstance(found, Superseded):
            return LockSuperseded(lock.key, found.by)
        store.abandon(request.hold())
        return None

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

    def _when_lost(self, lease: Lease) -> None:
        self._runtime.heartbeat.stop(lease)
        logger.warning("%s: another message may be sent while this one runs: %s", lease.key, lease.reason)

    def _free(self) -> Freeing | None:
        """What became of the lock; None if there is no answer."""
        lock = self.lock
        try:
            freed = self._runtime.store.free(lock.hold())
        except LockUnavailable as error:  # It is repeated until there is an answer.
            logger.warning("%s: the lock of a message that has arrived is not freed yet: %s", lock.key, error)
            return None
        if freed is Freeing.NOT_OURS and ends.may_be_followed(self._task, self._runtime.settings, lock.scope):
            # Another message may have it: followers of this one are in line behind it, and end without the lock.
            self._runtime.store.wake(lock.key)
        if not freed:
            logger.debug("%s is no longer the lock of this message", lock.key)
        return freed


def brought_by(task: TaskLike, message: Message) -> Queued | None:
    """The handler of a message's queue lock; None if it has none."""
    lock = lock_in(message.carried, task.app, task.name)
    return None if lock is None or task.request.is_eager else Queued(task, lock)
