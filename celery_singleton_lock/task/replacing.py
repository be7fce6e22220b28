"""A message that waits is superseded by a newer one, and never runs: `on_duplicate="replace"`.

Take over, send, supersede: the newcomer frees the lock of the other message, and leaves a reservation for itself in its
place. Then it is sent; if that fails, the other message gets its lock back. Only after that is the other message
superseded, wherever it is: so one of the two runs, wherever the sender stops.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from celery import states
from celery.utils.log import get_logger

from celery_singleton_lock import chance, cleaned, clock
from celery_singleton_lock.errors import LockSuperseded, LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.in_bulk import UNCONFIRMED_TTL
from celery_singleton_lock.options.rules import MAX_QUEUE_TTL
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Reservation
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.ends import Outcome
from celery_singleton_lock.task.queue_lock import SAID_FOR, QueueLock, holder_of_message

logger = get_logger(__name__)

#: Seconds for which a newcomer tries to take over a lock that keeps changing hands: one newcomer at a time gets it.
PATIENCE = 10.0

#: The most seconds between two tries; it varies, so that not all come at once.
PAUSE = 0.02

#: Seconds for which a message may still come if its lock does not say: the lock was not confirmed yet.
UNKNOWN = 86_460.0


class Taken(NamedTuple):
    """A lock that was taken over.

    Attributes:
        lock: the newcomer's.
        old: the hold of the message that had it; None if it was free by then.
    """

    lock: QueueLock
    old: Held | None


def take_over(store: Store, lock: QueueLock, task_id: object, found: Held) -> Taken:
    """Take the lock of another message, whichever has it by then; the owner of the newcomer's `lock` is chosen here.

    Raises:
        LockUnavailable: no answer, or the lock changes hands too often.
    """
    label = found.holder.label if found.holder else ""  # The same for both calls.
    # Two sends of one id are two messages.
    holder = replace(holder_of_message(task_id, None, label), record=new_owner())
    lock = replace(lock, owner=holder.reserved_as)
    request, began = lock.request(holder), clock.now()
    while True:
        old = found.hold(lock.key, ttl=request.ttl, limit=lock.limit)
        freeing = store.free(old, reservation=Reservation(holder, request.ttl))
        is_taken = freeing is Freeing.NOW
        if freeing is Freeing.UNCLEAR:  # Somebody else may have freed it before.
            (is_taken,) = store.renew([request.hold()], timeout=request.ttl)
        if is_taken:
            return Taken(lock, found)
        answer = store.acquire(request)
        if not isinstance(answer, Held):
            return Taken(lock, None)
        found = answer
        if clock.now() - began > PATIENCE:
            raise LockUnavailable(store.server, f"the lock {lock.key} changes hands too often")
        clock.sleep(chance.spread(PAUSE, least=0.0))


def give_back(store: Store, taken: Taken) -> None:
    """The newcomer was not sent: the message that had the lock gets it back, unless it has started by now."""
    store.abandon(taken.lock.hold())
    old = taken.old
    if old is None or old.holder is None or old.remaining <= 0:
        return
    ttl = min(old.remaining, MAX_QUEUE_TTL)
    with suppress(LockUnavailable):  # Or the lock was given up, as its message has started: see `started`.
        store.acquire(LockRequest(taken.lock.key, old.owner, ttl=ttl, holder=old.holder, limit=taken.lock.limit))


def supersede(store: Store, lock: QueueLock, task_id: object, owners: Iterable[str], old: Held | None = None) -> None:
    """Keep the messages of the lock's earlier owners from running, unless they have started: the newcomer was sent.

    `old` is the hold that the newcomer took over from them, if that is known.
    """
    text = cleaned.text_or_none(task_id)
    still = UNKNOWN if old is None or old.remaining <= UNCONFIRMED_TTL else old.remaining
    seconds = min(max(still, lock.seconds), MAX_QUEUE_TTL)
    ended = Outcome(states.REVOKED, json.dumps([text]).encode(), settled=True)
    for owner in owners:
        said_of = _named(owner)
        try:
            store.refuse(lock.key, said_of, ended.record_of(said_of, seconds))
        except LockUnavailable as error:  # The worker records it when the newcomer comes.
            logger.warning("%s: a message that was replaced may still run: %s", lock.key, error)


def started(store: Store, lock: QueueLock) -> LockSuperseded | None:
    """A message starts whose lock is not its own any more; why it must not, if it was superseded."""
    said_of = _named(lock.owner)
    try:
        found = store.refuse(lock.key, said_of, Outcome(states.STARTED).record_of(said_of, SAID_FOR))
    except LockUnavailable as error:
        logger.warning("%s: a message runs, and it is not known whether it was replaced: %s", lock.key, error)
        return None
    # It may be about to get the lock back, which nobody would free.
    store.abandon(lock.hold())
    if found is None or isinstance(found, Held):
        return None
    ended, _ = ends.read(found)
    if ended.state == states.STARTED:
        return None
    newest = cleaned.array(ended.content or b"") or [None]
    return LockSuperseded(lock.key, cleaned.text_or_none(newest[0]))


def _named(owner: str) -> Holder:
    """The name of the record of what has become of the message whose lock has this owner."""
    return Holder(record=owner)
