"""Whether an execution may still be running under a held lock: `release` and `clear` depend on this.

Only the holder's own rules decide. A process of this host that has provably ended runs nothing. And a holder that could
not renew its lease in time has stopped its task by the time that a tenth of the ttl is left: it gives up when a third
is left, after one more try, and gives the body a tenth in which to end (see `heartbeat` and `interrupt`). A worker that
does not answer proves nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kombu.exceptions import OperationalError

from celery_singleton_lock import clock, process_identity
from celery_singleton_lock._celery import ask_each_worker
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.trust import STOPPED_BEFORE

#: The share of the ttl by which the end of a lease must move to count as renewed: servers count milliseconds, by a
#: clock that they do not read each time.
NOISE = 1 / 20

#: The longest and shortest time in seconds until an undecided lock is inspected again.
POLL, MIN_POLL = 0.5, 0.01

#: Seconds that workers have to say whether they hold a lock; watching for a renewal may take as long as its ttl.
ASKED_FOR = 1.0


class Verdict(enum.Enum):
    """What is known about the holder; the value says why the lock is freed, or why it is not."""

    OVER = "the process that held it is gone"
    LATE = "it was not renewed in time"
    FORCED = "by force"
    ENDED = "it ended meanwhile"
    ALIVE = "its holder is alive and renews it; --force frees it anyway"
    KEPT = "it is kept for a while on purpose, without a running task; --force frees it anyway"
    QUEUED = "its message may still come; --force frees it now"
    UNKNOWN = "its worker does not say that it holds the lock: `celery locks release` waits until it is known"
    FOREIGN = "this package did not write its value; if it is in the way, delete the key in Redis"

    @property
    def fact(self) -> str:
        """What is known, without advice for the command line."""
        return self.value.partition(";")[0]


#: The verdicts after which a lock is freed.
TO_FREE = (Verdict.OVER, Verdict.LATE, Verdict.FORCED)


def judge(before: Held, now: Held | None, *, renewed: bool = False) -> Verdict | None:
    """Judge the holder of a hold; None while that is undecided.

    Args:
        before: the hold to judge.
        now: the hold that is now in its place; None if there is none.
        renewed: whether a renewal of the lease was seen.
    """
    if now is None or now.owner != before.owner:
        return Verdict.ENDED
    holder = now.holder
    if holder is None:
        return Verdict.FOREIGN
    if not holder.ttl:
        return Verdict.KEPT
    if process_identity.is_dead(holder.process):
        return Verdict.OVER
    if renewed:
        return Verdict.ALIVE
    return Verdict.LATE if now.remaining <= holder.ttl * STOPPED_BEFORE else None


def longest_watch(holds: Iterable[Held]) -> float:
    """The longest time in seconds until all of them are judged; 0 if they can be judged at once."""
    open_ones = [held for held in holds if judge(held, held) is None]
    return max((min(held.remaining, _ttl(held)) - _ttl(held) * STOPPED_BEFORE for held in open_ones), default=0.0)


def verdicts(store: Store, locks: Iterable[HeldLock]) -> Iterator[tuple[HeldLock, Verdict]]:
    """Judge each lock, inspecting the undecided ones again and again; yields each as soon as it is judged.

    Raises:
        LockUnavailable: no answer, or an error.
    """
    undecided = [_Watch(lock) for lock in locks]
    while undecided:
        for watch in undecided:
            watch.inspect(store)
            if watch.verdict is not None:
                yield watch.lock, watch.verdict
        undecided = [watch for watch in undecided if watch.verdict is None]
        if undecided:
            clock.sleep(min(POLL, *(watch.late_in for watch in undecided)))


def judged(
    runtime: Runtime,
    app: Any,
    locks: Sequence[HeldLock],
    *,
    patience: float = math.inf,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[HeldLock, Verdict]]:
    """Judge each lock for an operator; yields each as soon as it is judged.

    Workers are asked first, as that is quicker than to watch for a renewal, which is left out if it may take longer
    than `patience` seconds; `say` gets a line about it.

    Raises:
        LockUnavailable: no answer, or an error.
    """
    yield from ((lock, Verdict.QUEUED) for lock in locks if lock.is_queued)
    others = [lock for lock in locks if not lock.is_queued]
    alive = running(app, others)
    yield from ((lock, Verdict.ALIVE) for lock in alive)
    others = [lock for lock in others if lock not in alive]
    if (seconds := longest_watch(lock.held for lock in others)) > patience:
        yield from ((lock, Verdict.UNKNOWN) for lock in others)
    else:
        if seconds > 0:
            say(f"Watching for a renewal, for at most {seconds:.0f} s.")
        yield from verdicts(runtime.store, others)


def free(runtime: Runtime, lock: HeldLock) -> bool:
    """Free a hold; whether it was still there.

    Raises:
        LockUnavailable: no answer, or an error.
    """
    return bool(runtime.store.free(lock.held.hold(lock.key, ttl=lock.ttl or runtime.settings.defaults["ttl"])))


def running(app: Any, locks: Iterable[HeldLock]) -> list[HeldLock]:
    """The locks whose workers say, within `ASKED_FOR` seconds, that they hold them: watching these takes longer.

    A worker that does not say so proves nothing, and neither does a broker that does not answer.
    """
    locks = [lock for lock in locks if longest_watch([lock.held]) > ASKED_FOR]
    nodes = sorted({lock.holder.node for lock in locks if lock.holder.node})
    if not nodes:
        return []
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1)
            control = app.control.inspect(nodes, timeout=ASKED_FOR, connection=connection, limit=len(nodes))
            answers = ask_each_worker(control, "locks") or {}
    except OperationalError:
        return []
    said = {
        (str(node), held.get("key"), held.get("task_id"))
        for node, its in answers.items()
        if isinstance(its, list)
        for held in its
        if isinstance(held, Mapping) and all(isinstance(held.get(name), str) for name in ("key", "task_id"))
    }
    return [lock for lock in locks if (lock.holder.node, lock.key, lock.holder.task_id) in said]


class _Watch:
    """Whether a lock is renewed.

    It is, if its end on this host's clock is later than it was at first. Asking takes a while, so the earliest possible
    end now is compared to the latest possible end then.
    """

    def __init__(self, lock: HeldLock) -> None:
        self.lock = lock
        self.verdict: Verdict | None = None
        self.late_in = POLL
        self._ends_at = float("inf")

    def inspect(self, store: Store) -> None:
        owner, asked_at = self.lock.held.owner, clock.now()
        now = next((held for held in store.held(self.lock.key) if held.owner == owner), None)
        if now is not None and math.isinf(now.remaining):
            # Somebody removed its expiry, and a renewal would set one: treat it as last renewed before we first
            # asked.
            self._ends_at = min(self._ends_at, asked_at + _ttl(now))
            now = replace(now, remaining=max(self._ends_at - asked_at, 0.0))
        renewed = now is not None and asked_at + now.remaining > self._ends_at + _ttl(now) * NOISE
        self.verdict = judge(self.lock.held, now, renewed=renewed)
        if now is not None:
            self._ends_at = min(self._ends_at, clock.now() + now.remaining)
            self.late_in = max(now.remaining - _ttl(now) * STOPPED_BEFORE, MIN_POLL)


def _ttl(held: Held) -> float:
    return held.holder.ttl if held.holder else 0.0
