"""Renews the leases of this process, and tells their holders in time if that fails.

There are two roles, each one thread per store. The *renewer* waits until leases are due, and renews all of them in one
call, which takes as long as the server is silent. The *watchdog* never asks a server: it gives up the leases that were
not renewed in time, and tells the holders of lost leases. So a silent server holds up its own renewer, and nobody's
deadline.

A renewal that arrives after the release does no harm: it renews what is held and never creates anything.

Protocol: `docs/protocol.md`, section 4.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from tempfile import TemporaryFile
from types import MethodType
from typing import Any, TypeVar

from celery.utils.log import get_logger

from celery_singleton_lock import chance, clock, forks, trust
from celery_singleton_lock.background import MOMENT, BackgroundJob
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.outage import Outage
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)

T = TypeVar("T")

#: Why a lease that the store no longer has was lost.
GONE = "the store no longer has it: it ended, was taken over, or was deleted"

#: The most seconds until each thread works again.
MAX_SLEEP = 1.0


class SharedFlag:
    """A number that is shared with each process that is forked afterwards, and with those that get its file: a process
    compares it when it wakes up anyway.

    Args:
        file: a descriptor of the file of another process's flag.
    """

    def __init__(self, file: int | None = None) -> None:
        self._file = None if file is None else os.fdopen(file, "r+b")
        self._shared = mmap(-1 if file is None else file, 4)
        self._seen = self._shared[:]

    def file(self) -> int:
        """A descriptor of the file that has the number from now on; processes that were forked before do not see it."""
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - as long as the flag
            self._file.truncate(4)
            self._shared = mmap(self._file.fileno(), 4)
        return self._file.fileno()

    def set(self) -> None:
        number = int.from_bytes(self._shared[:], "big") + 1
        self._shared[:] = (number % 256**4).to_bytes(4, "big")

    def is_new(self) -> bool:
        """Whether the flag was set since this process last asked; a process that was just started may miss it."""
        before, self._seen = self._seen, self._shared[:]
        return before != self._seen


@dataclass(slots=True, eq=False)
class _Watched:
    """A lease under watch.

    Attributes:
        owner: its owner token.
        lease: a weak reference, so that an execution that was torn down without cleaning up (by a time limit in its
            last line) is not renewed forever.
        on_lost: see `weakly`.
        every: the most seconds between two renewals.
        due_at: when to renew it.
        early_at: from when on it is renewed if others are due.
        tell_at: when to tell its holder again that it must stop.
        asked_at: when the last renewal began; if that was a further try, when the first one began that had no answer.
        asked_after: how many renewals had been answered by then; -1 if there was none.
    """

    owner: str
    lease: weakref.ref[Lease]
    on_lost: Callable[[], object]
    every: float
    due_at: float
    early_at: float
    tell_at: float = 0.0
    asked_at: float = 0.0
    asked_after: int = -1

    def lost_at(self, lease: Lease) -> float:
        """When the watchdog gives the lease up unless it is renewed."""
        return trust.lost_at(lease.trusted_until, lease.ttl, self.asked_at)

    def asks(self, lease: Lease, now: float) -> bool:
        """Note that a renewal begins; whether it is the first since the last answer. A further try, which may begin
        late, does not get more time than the first.
        """
        if is_first := lease.renewals != self.asked_after:
            self.asked_at, self.asked_after = now, lease.renewals
        return is_first

    def schedule(self, lease: Lease, after: float, now: float) -> None:
        """Set when to renew it next, after this share of its ttl: a renewal was answered, or its ttl has changed."""
        # From when it was sent: if the process was stopped in between, the answer says little by now.
        self.due_at = min(lease.trusted_until - lease.ttl * (1 - after), now + self.every)
        self.early_at = self.due_at - lease.ttl * trust.RENEW_AFTER * trust.COALESCE

    def try_again_or_give_up(self, lease: Lease, error: str, now: float) -> None:
        """Note that a renewal was not answered."""
        if now >= lease.give_up_at:
            lease.lose(f"it could not be renewed in time: {error}")
        else:
            self.due_at = min(now + chance.spread(min(0.5, lease.ttl * trust.RETRY_SHARE)), lease.give_up_at)
            self.early_at = self.due_at


def _next_share() -> float:
    """After which share of its ttl to renew a lease next."""
    return chance.spread(trust.RENEW_AFTER, least=0.9)


class Heartbeat:
    """Renews leases in `store` until they are stopped or lost.

    Attributes:
        store: has the leases.
        outage: logs when the store does not answer, and when it does again.
        renew_flag: shared with the processes of a pool: all leases are to be renewed at once.
        watched: the leases under watch, by their owner tokens, as long as they exist. A finalizer or a signal handler
            may release a lock at any line, and another thread, too: every loop goes over a copy.
        is_busy: whether the store is asked.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.outage = Outage(store.server)
        self.renew_flag = SharedFlag()
        # Weakly, so that the threads do not keep the store open.
        self._renewer = BackgroundJob("singleton-lock-heartbeat", weakly(self._renew_due))
        self._watchdog = BackgroundJob("singleton-lock-watchdog", weakly(self._look))
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """Watch nothing: at first, and in the child of a fork, because the leases are the parent's."""
        self.is_busy = False
        self.watched: dict[str, _Watched] = {}

    def start(self, lease: Lease, on_lost: Callable[[], object], *, every: float = math.inf) -> None:
        """Renew `lease` from now on. Call `on_lost` when the lease is lost or must end for a newer task, and repeat the
        call until it is stopped.

        Args:
            lease: kept only as a weak reference.
            on_lost: runs in the watchdog's thread, so it must be quick. A bound method does not keep its object alive;
                any other callable must not refer to the lease, which would then be renewed until it is stopped.
            every: the most seconds between two renewals; a third of the ttl at most.

        Raises:
            RuntimeError: no thread can be started; the lease is not renewed.
        """
        lease.ask = self._ask
        all_watched, owner = self.watched, lease.owner
        due_at = lease.acquired_at + min(lease.ttl * trust.RENEW_AFTER, every)
        weak = weakref.ref(lease, lambda _: all_watched.pop(owner, None))
        all_watched[owner] = _Watched(owner, weak, weakly(on_lost), every, due_at, early_at=due_at)
        first = _soon(due_at)  # The watchdog has nothing to do before that; then it sees when.
        if not (self._watchdog.schedule(first) and self._renewer.schedule(first)):
            self.stop(lease)
            raise RuntimeError("no thread can be started to renew the lease")

    def stop(self, lease: Lease) -> None:
        """Stop renewing `lease`. A renewal that is under way may still arrive, and does no harm."""
        self.watched.pop(lease.owner, None)

    def renew(self, lease: Lease, ttl: float) -> bool:
        """Give `lease` a new ttl from now on, also for later renewals if it is under watch; False if it is lost. Not to
        be called by two threads at once for one lease.

        Raises:
            LockUnavailable: no answer. The shorter of the two counts from now on.
        """
        if lease.reason is not None:
            return False
        step = min(trust.MAX_STEP, max(lease.ttl, ttl) * trust.OWN_STEP_SHARE)
        asked = lease.with_ttl(ttl)
        self._look_at(lease, asks=True)  # It may be due, or lost, sooner than before.
        try:
            # A longer step than in a round: nobody else waits, and a lease that is overdue meanwhile is given up.
            (ours,) = self.store.renew([asked], timeout=step)
            if ours:
                lease.become(asked)
            else:
                lease.lose(GONE)
        finally:
            self._look_at(lease, asks=False)
        return lease.reason is None

    def renew_now(self) -> None:
        """Renew all leases at once, because one of them was taken away and its holder must learn that; within a second,
        this also happens in the processes of this worker's pool.
        """
        self.renew_flag.set()
        if self.watched:
            self._renewer.schedule(clock.now())

    def _renew_due(self) -> float | None:
        """Renew the leases that are due, or nearly due; the seconds until the next call, None if there is no lease."""
        due: list[tuple[_Watched, Lease]] = []
        now = clock.now()
        by = math.inf if self.renew_flag.is_new() else now
        for watched in list(self.watched.values()):
            if watched.early_at <= by and (lease := watched.lease()) is not None:
                if lease.reason is None:
                    watched.asks(lease, now)
                    due.append((watched, lease))
                else:
                    watched.early_at = watched.due_at = math.inf
        # Only now: the watchdog gives up what is overdue, and was not asked for by somebody who is busy.
        self.is_busy = bool(due)
        try:
            if due:
                self._renew(due)
        finally:
            self.is_busy = False
        all_due = [watched.due_at for watched in list(self.watched.values())]
        return _soon(min(all_due)) - clock.now() if all_due else None

    def _renew(self, due: Sequence[tuple[_Watched, Lease]]) -> None:
        leases = [lease for _, lease in due]
        before = [lease.renewals for lease in leases]
        # Not the error: its traceback has this frame, which would keep the leases until the garbage is collected.
        failed: str | None = None
        answers: Sequence[object] = before
        try:
            answers = self.store.renew(leases, timeout=trust.step_of(min(lease.ttl for lease in leases)))
            self.outage.answered()
        except LockUnavailable as error:
            failed = str(error)
            self.outage.failed(error)
        except Exception as error:
            failed = str(error)
            logger.exception("heartbeat: %d leases not renewed, trying again: unexpected error", len(leases))
        now, after = clock.now(), _next_share()
        for (watched, lease), renewals, ours in zip(due, before, answers, strict=True):
            if failed is not None and lease.renewals == renewals:
                watched.try_again_or_give_up(lease, failed, now)
            elif failed is not None or ours:
                watched.schedule(lease, after, now)
            else:
                lease.lose(GONE)
        if any(lease.reason is not None or lease.superseded_by is not None for lease in leases):
            self._watchdog.schedule(now)

    def _look_at(self, lease: Lease, *, asks: bool) -> None:
        """Have both threads look at a lease whose ttl changes."""
        watched, now = self.watched.get(lease.owner), clock.now()
        if watched is None or watched.lease() is not lease:
            return
        if asks:
            watched.asks(lease, now)
        watched.schedule(lease, _next_share(), now)
        self._watchdog.schedule(now)
        self._renewer.schedule(_soon(watched.due_at))

    def _ask(self, lease: Lease) -> None:
        """Ask for an overdue lease, in the thread that runs under it: it goes on only if the lock is still held."""
        try:
            (ours,) = self.store.renew([lease], timeout=trust.step_of(lease.ttl))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is unknown whether the lock is held
            lease.lose(f"it is overdue, and could not be renewed: {error}")
        else:
            if not ours:
                lease.lose(GONE)

    def _look(self) -> float | None:
        """Give up the leases that cannot wait any longer, and tell the holders of those that are lost, or must end for
        a newer task; the seconds until the next call, None if there are no leases.
        """
        if self._watchdog.is_late and self.is_busy:
            # The process was stopped. The answer may be there, and whoever is to read it goes on only now, too.
            clock.sleep(MOMENT)
        now = clock.now()
        look_at = _soon(math.inf)
        for watched in list(self.watched.values()):
            if (lease := watched.lease()) is None:
                continue
            if lease.reason is None:
                lost_at = watched.lost_at(lease)
                if now < lost_at:
                    look_at = min(look_at, lost_at)
                elif not self.is_busy and watched.asks(lease, now):
                    # Nobody has asked yet: the process was stopped meanwhile, and asks now.
                    watched.early_at = watched.due_at = now
                    look_at = min(look_at, watched.lost_at(lease))
                    self._renewer.schedule(now)
                else:
                    lease.lose("it could not be renewed in time: the store has not answered")
            if lease.reason is not None or lease.superseded_by is not None:
                if now >= watched.tell_at and self.watched.get(watched.owner) is watched:
                    watched.tell_at = now + min(trust.MAX_STRIKE_INTERVAL, lease.ttl * trust.STRIKE_SHARE)
                    self._tell(watched)
                look_at = min(look_at, watched.tell_at)
        return look_at - clock.now() if self.watched else None

    def _tell(self, watched: _Watched) -> None:
        try:
            watched.on_lost()
        except Exception:
            logger.exception("heartbeat: could not ask a task to stop")


def _soon(at: float) -> float:
    """This time, or the latest at which a thread works again: a process of its pool may have set the flag, and a thread
    that finds no lease can end.
    """
    return min(at, clock.now() + MAX_SLEEP)


def weakly(call: Callable[[], T]) -> Callable[[], T | None]:
    """The same call; a bound method does not keep its object alive, and the call returns None once that is gone."""
    # Not `weakref.WeakMethod`, which takes half a kilobyte: there may be many.
    return partial(_call, weakref.ref(call.__self__), call.__func__) if isinstance(call, MethodType) else call


def _call(subject: weakref.ref[Any], method: Callable[[Any], T]) -> T | None:
    return None if (alive := subject()) is None else method(alive)
