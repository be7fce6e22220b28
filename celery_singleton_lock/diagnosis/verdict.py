"""Whether an execution may still be running under a held lock: `release` and `clear` depend on this.

Only the holder's own rules decide. A process of this host that has provably ended runs nothing. And a holder that could
not renew its lease in time has stopped its task by the time that a tenth of the ttl is left: it gives up when a third
is left, after one more try, and gives the body a tenth in which to end (see `heartbeat` and `interrupt`). A worker that
does not answer proves nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def judged(
    store: Store,
    app: Any,
    locks: Sequence[HeldLock],
    *,
    patience: float = math.inf,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[HeldLock, Verdict]]:
    """Judge each lock for an operator; yields each as soon as it is judged.

    Workers are asked about those that cannot be judged at once, as that is quicker than to watch for a renewal, which
    is left out if it may take longer than `patience` seconds; `say` gets a line about it.

    Raises:
        LockUnavailable: no answer, or an error.
    """
    yield from ((lock, Verdict.QUEUED) for lock in locks if lock.is_queued)
    watches = [_Watch(lock) for lock in locks if not lock.is_queued]
    yield from _looked(store, watches)
    alive = running(app, [watch.lock for watch in watches if watch.late_in > ASKED_FOR])
    yield from ((lock, Verdict.ALIVE) for lock in alive)
    watches = [watch for watch in watches if watch.lock not in alive]
    longest = max((watch.late_in for watch in watches), default=0.0)
    if longest > patience:
        yield from ((watch.lock, Verdict.UNKNOWN) for watch in watches)
        return
    if watches:
        say(f"Watching for a renewal, for at most {longest:.0f} s.")
    while watches:
        clock.sleep(min(POLL, *(watch.late_in for watch in watches)))
        yield from _looked(store, watches)


def _looked(store: Store, watches: list[_Watch]) -> Iterator[tuple[HeldLock, Verdict]]:
    """Inspect each lock, and stop watching those that are judged."""
    for watch in tuple(watches):
        if (verdict := watch.inspect(store)) is not None:
            watches.remove(watch)
            yield watch.lock, verdict


def free(runtime: Runtime, lock: HeldLock) -> bool:
    """Free a hold; whether it was still there.

    Raises:
        LockUnavailable: no answer, or an error.
    """
    return bool(runtime.store.free(lock.held.hold(lock.key, ttl=lock.ttl or runtime.settings.defaults["ttl"])))


def running(app: Any, locks: Sequence[HeldLock]) -> list[HeldLock]:
    """The locks whose workers say, within `ASKED_FOR` seconds, that they hold them.

    A worker that does not say so proves nothing, and neither does a broker that does not answer.
    """
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
    """Whether a lock is renewed. `late_in`: seconds until it is late, from the last look.

    It is renewed if its end on this host's clock is later than it was at first. Asking takes a while, so the earliest
    possible end now is compared to the latest possible end then.
    """

    def __init__(self, lock: HeldLock) -> None:
        self.lock = lock
        self.late_in = 0.0
        self._ends_at = float("inf")

    def inspect(self, store: Store) -> Verdict | None:
        """The verdict; None while it is undecided."""
        owner, asked_at = self.lock.held.owner, clock.now()
        now = next((held for held in store.held(self.lock.key) if held.owner == owner), None)
        if now is not None and math.isinf(now.remaining):
            # Somebody removed its expiry, and a renewal would set one: treat it as last renewed before we first
            # asked.
            self._ends_at = min(self._ends_at, asked_at + _ttl(now))
            now = replace(now, remaining=max(self._ends_at - asked_at, 0.0))
        renewed = now is not None and asked_at + now.remaining > self._ends_at + _ttl(now) * NOISE
        if now is not None:
            self._ends_at = min(self._ends_at, clock.now() + now.remaining)
            self.late_in = max(now.remaining - _ttl(now) * STOPPED_BEFORE, MIN_POLL)
        return judge(self.lock.held, now, renewed=renewed)


def _ttl(held: Held) -> float:
    return held.holder.ttl if held.holder else 0.0
