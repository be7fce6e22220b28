"""The lock that a message has while it waits: taken as it is sent, named by its header, freed as `lock_scope` says.

The owner is the message's, not a delivery's: each copy of it has the header, and may free the lock; nobody else knows
the owner. It belongs to one task and id: copied to another message, it has no effect.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.holder import Holder, is_owner
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
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.task.message import Target

logger = get_logger(__name__)

#: Places of the header's part: task, key, owner, seconds, limit, scope. Then a list with the owner that it replaced,
#: and the message that it follows, if there are such.
_FIELDS = 6

#: Seconds for which we repeat that a lock has ended while the lock server does not answer.
SAID_FOR = 600.0

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
        replaced: the owners before it, whose messages this one supersedes (see `replacing`).
        follows: the leader, which has the lock (see `sharing`): this message ends as the leader ends, or gets the lock
            when the leader is gone.
    """

    key: str
    owner: str
    seconds: float
    limit: int
    scope: str
    replaced: tuple[str, ...] = ()
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
            return [*fields, [], [*self.follows]]
        return [*fields, [*self.replaced]] if self.replaced else fields


def holder_of_message(task_id: object, sending: str | None, label: str, *, owns_result: bool = False) -> Holder:
    """A message, as the holder of its lock: no process runs it yet.

    Args:
        sending: the name of its sending, if that is known.
        owns_result: whether a result that is stored under its id from now on is its own, and its last. Otherwise it
            counts as a later attempt.
    """
    named = None if task_id is None else cleaned.text(task_id)
    return Holder(
        named, 0 if owns_result else 1, socket.gethostname(), since=clock.wall(), sending=sending or "", label=label
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
    replaced = part[_FIELDS] if len(part) > _FIELDS and isinstance(part[_FIELDS], (list, tuple)) else ()
    owners = tuple(each for each in replaced[:1] if is_owner(each))
    follows = Target.read(part[_FIELDS + 1]) if len(part) > _FIELDS + 1 else None
    scope = scope if isinstance(scope, str) else WHILE_EXECUTING
    return QueueLock(key, owner, seconds, limit, scope, owners, follows)


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
