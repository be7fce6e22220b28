"""Locks of messages that no longer exist: the broker lost them, or somebody purged their queue, or deleted them.

Nothing reports this. A message counts as gone if two looks, some seconds apart, find no trace of it. In case of doubt
it counts as alive.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock import clock, process_identity
from celery_singleton_lock.diagnosis.finding import Finding, Subject
from celery_singleton_lock.diagnosis.messages import Look, look_for, name_in_message
from celery_singleton_lock.keys.key import is_of_queue, without_queue
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task.queue_lock import is_by_time

#: In seconds; a message that was sent more recently is not looked for, because it may still be on its way.
MIN_AGE = 60.0

#: How many looks, and the seconds between them: on its way from a queue to a worker, a message may be in neither for a
#: moment.
LOOKS, GAP = 2, 5.0

#: How many messages are looked for at once, and how many are named individually; the oldest first.
MOST, MOST_NAMED = 1000, 5

#: Seconds by which an end must move to count as renewed: servers count milliseconds, by their own clock.
NOISE = 1.0


class MessageState(enum.Enum):
    """What is known about the message; the value says why its lock is freed, or why it is not."""

    ORPHANED = "its message no longer exists"
    ALIVE = "its message waits or runs; --force frees it anyway"
    YOUNG = f"its message was sent less than {MIN_AGE:g} s ago; --force frees it anyway"
    IN_DOUBT = "it is not certain where its message is; --force frees it anyway"
    BY_TIME = "it lasts for its full time, whatever happens to its message; --force frees it anyway"
    ENDED = "it ended meanwhile"


@dataclass(slots=True)
class QueuedHold:
    """The lock of a message, and what is known about the message.

    Attributes:
        held: the hold, as last seen.
        seen_at: the latest possible time, on this host's clock, when it was seen.
        state: None while undecided.
    """

    key: str
    held: Held
    seen_at: float
    state: MessageState | None = None

    @property
    def task_id(self) -> str:
        return (self.held.holder and self.held.holder.task_id) or ""

    @property
    def age(self) -> float:
        """Seconds since the message was sent."""
        return clock.wall() - self.held.holder.since if self.held.holder else 0.0

    @property
    def names(self) -> set[bytes]:
        return {name_in_message(text) for text in (self.task_id, self.held.owner) if text}


@dataclass(slots=True)
class Search:
    """The result of a search.

    Attributes:
        holds: the locks, each with its state.
        doubts: why it is uncertain where some of the messages are.
    """

    holds: list[QueuedHold]
    doubts: list[str] = field(default_factory=list)


def search(app: Any, found: Sequence[tuple[str, Held]], *, timeout: float) -> Search:
    """Look for the messages of locks.

    Args:
        app: the app whose messages these are.
        found: the locks, with their keys.
        timeout: the seconds that workers have for each answer.

    Raises:
        LockUnavailable: the lock server does not answer, or answers with an error.
    """
    runtime, now = Runtime.of(app), clock.now()
    holds = [QueuedHold(key, held, now) for key, held in found]
    for hold in holds:
        hold.state = _at_first_sight(hold)
    undecided = sorted((hold for hold in holds if hold.state is None), key=lambda hold: -hold.age)
    done = Search(holds)
    if len(undecided) > MOST:
        done.doubts.append(
            f"only {MOST} messages are searched for at once: run it again for the other {len(undecided) - MOST}"
        )
        _settle(undecided[MOST:], MessageState.IN_DOUBT)
        del undecided[MOST:]
    alive = _living_workers(runtime) if undecided else set()
    for number in range(LOOKS):
        if not undecided:
            break
        if number:
            clock.sleep(GAP)
        look = look_for(
            app,
            {name for hold in undecided for name in hold.names},
            [hold.task_id for hold in undecided],
            alive=alive,
            timeout=timeout,
        )
        alive |= look.nodes
        for hold in undecided:
            hold.state = _after(look, hold, runtime.store)
        done.doubts += [doubt for doubt in look.doubts if doubt not in done.doubts]
        undecided = [hold for hold in undecided if hold.state is None]
    _settle(undecided, MessageState.ORPHANED)
    return done


def of_orphans(app: Any, *, timeout: float) -> Iterator[Finding]:
    """Findings about locks of messages that no longer exist.

    Raises:
        LockUnavailable: the lock server does not answer, or answers with an error.
    """
    runtime = Runtime.of(app)
    queued = [(key, held) for key, held in runtime.store.all_held(runtime.settings.prefix) if is_of_queue(key)]
    orphaned = [hold for hold in search(app, queued, timeout=timeout).holds if hold.state is MessageState.ORPHANED]
    remedy = "free it: celery locks clear --orphaned"
    for hold in orphaned[:MOST_NAMED]:
        yield Subject(hold.key).warning(
            f"its message no longer exists: the message of task {hold.task_id}, sent {hold.age:.0f} s ago, was "
            f"lost or deleted; no other message is sent for {hold.held.remaining:.0f} s",
            remedy,
        )
    if (more := len(orphaned) - MOST_NAMED) > 0:
        yield Subject("keys").warning(f"the messages of {more} more locks no longer exist", remedy)


def _at_first_sight(hold: QueuedHold) -> MessageState | None:
    if is_by_time(hold.held):
        return MessageState.BY_TIME
    if not hold.task_id:
        return MessageState.IN_DOUBT
    return MessageState.YOUNG if hold.age < MIN_AGE else None


def _living_workers(runtime: Runtime) -> set[str]:
    """The nodes of workers that hold a lease: a worker that renews a lease is alive, even if it does not answer."""
    holders = (held.holder for _, held in runtime.store.all_held(runtime.settings.prefix))
    return {
        holder.node
        for holder in holders
        if holder and holder.task_id and holder.pid and holder.node and not process_identity.is_over(holder.process)
    }


def _after(look: Look, hold: QueuedHold, store: Store) -> MessageState | None:
    """The state of a message after a look; None if that decides nothing."""
    if hold.names & look.seen:
        return MessageState.ALIVE
    if (state := _of_lock(hold, store)) is not None:
        return state
    return MessageState.IN_DOUBT if look.doubts else None


def _of_lock(hold: QueuedHold, store: Store) -> MessageState | None:
    """The lock server's view: the hold has ended, or somebody renews it, or runs under the lock or waits for it."""
    before, seen_at, asked_at = hold.held, hold.seen_at, clock.now()
    now = next((it for it in store.held(hold.key, limit=(before.slot or 0) + 1) if it.owner == before.owner), None)
    if now is None:
        return MessageState.ENDED
    hold.held, hold.seen_at = now, clock.now()
    holders = store.held(without_queue(hold.key))
    is_renewed = now.remaining > before.remaining - (asked_at - seen_at) + NOISE
    if is_renewed or any(it.holder is not None and it.holder.task_id == hold.task_id for it in holders):
        return MessageState.ALIVE
    # A message that waits in a slot of a worker that is too busy to answer is on no broker.
    return MessageState.IN_DOUBT if any(it.waiters for it in holders) else None


def _settle(holds: Sequence[QueuedHold], state: MessageState) -> None:
    for hold in holds:
        hold.state = state
