"""Renews the leases of this process, and tells their holders in time if that fails.

There are two roles. A *renewer*, one thread per store, waits until leases are due, and renews all of them in one call,
which takes as long as the server is silent. The *watchdog*, one thread per process, never asks a server: it gives up
the leases that were not renewed in time, and tells the holders of lost leases. So a silent server holds up its own
renewer, and nobody's deadline.

A renewal that arrives after the release does no harm: it renews what is held and never creates anything.

Protocol: `docs/protocol.md`, section 4.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from tempfile import TemporaryFile
from types import MethodType
from typing import Any, TypeVar

from celery.utils.log import get_logger

from celery_singleton_lock import chance, clock, forks, trust
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.outage import Outage
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)

T = TypeVar("T")

#: Why a lease that the store no longer has was lost.
GONE = "the store no longer has it: it ended, was taken over, or was deleted"

#: The longest sleep of a thread in seconds while there are leases: a sleep does not count the time during which the
#: host is suspended, but a lease does.
MAX_SLEEP = 1.0

#: Seconds for which a thread without leases stays, so that a series of short tasks does not start it for each.
LINGER = 1.0

#: The longest wait in seconds, at the end of the last lease, for threads that do not linger.
FAREWELL = 1.0

#: Seconds that reading an answer takes that is there already.
MOMENT = 0.02


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
        due_at: when to renew it.
        early: how many seconds earlier it is renewed if others are due.
        linger: seconds for which the threads stay if this was the last lease.
        every: the most seconds between two renewals.
        on_moved: called when the time at which the lease is given up has changed, see `weakly`.
        look_at: when the watchdog looks at it.
        tell_at: when to tell its holder again that it must stop.
        moved_to: the last time for which `on_moved` was called.
        asked_at: when the last renewal began; if that was a further try, when the first one began that had no answer.
        asked_after: how many renewals had been answered by then; -1 if there was none.
    """

    owner: str
    lease: weakref.ref[Lease]
    on_lost: Callable[[], object]
    due_at: float
    linger: float
    every: float
    early: float = 0.0
    on_moved: Callable[[], object] | None = None
    look_at: float = 0.0
    tell_at: float = 0.0
    moved_to: float = 0.0
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

    def schedule(self, lease: Lease) -> None:
        """Set when to renew it next: a renewal was answered, or its ttl has changed."""
        # From when it was sent: if the process was stopped in between, the answer says little by now.
        due_at = lease.trusted_until - lease.ttl * (1 - chance.spread(trust.RENEW_AFTER, least=0.9))
        self.due_at = min(due_at, clock.now() + self.every)
        self.early = lease.ttl * trust.RENEW_AFTER * trust.COALESCE
        if self.on_moved is not None:
            self.look_at = 0.0

    def try_again_or_give_up(self, lease: Lease, error: str) -> None:
        """Note that a renewal was not answered."""
        now = clock.now()
        if now >= lease.give_up_at:
            lease.lose(f"it could not be renewed in time: {error}")
        else:
            self.due_at = min(now + chance.spread(min(0.5, lease.ttl * trust.RETRY_SHARE)), lease.give_up_at)

    def news(self, lease: Lease, now: float) -> Iterator[Callable[[], object]]:
        """What to call now; this also sets when to look next."""
        self.look_at = self.lost_at(lease) if lease.reason is None else math.inf
        if lease.reason is None and self.on_moved is not None and lease.give_up_at != self.moved_to:
            self.moved_to = lease.give_up_at
            yield self.on_moved
        if lease.reason is not None or lease.superseded_by is not None:
            if now >= self.tell_at:
                self.tell_at = now + min(trust.MAX_STRIKE_INTERVAL, lease.ttl * trust.STRIKE_SHARE)
                yield self.on_lost
            self.look_at = min(self.look_at, self.tell_at)


#: The heartbeat of a lease, the lease under watch, and what to call for it.
_Call = tuple["Heartbeat", _Watched, Callable[[], object]]


class _Role(ABC):
    """A thread that exists while there are leases, and lingers for a while. Everything is written under the watchdog's
    mutex.

    Attributes:
        is_busy: whether it asks a server.
        is_late: whether it has waited for longer than it wanted to.
    """

    name: str

    def start_anew(self) -> None:
        """Watch nothing: at first, and in the child of a fork, because the leases are the parent's."""
        self.is_busy = self.is_late = False
        self._thread: threading.Thread | None = None
        self._lingers_until = 0.0
        self._wakes_at = 0.0

    @abstractmethod
    def due_at(self) -> float | None:
        """When there is something to do; None if there are no leases."""

    @abstractmethod
    def work(self) -> None:
        """Do what is due; called without the mutex."""

    def wake(self, at: float) -> None:
        """Make sure that there is a thread, and that it looks at this time or before. May raise `RuntimeError`."""
        if self._thread is None or not self._thread.is_alive():
            # Before the start: if that is interrupted, there must not be two threads.
            self._thread = thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
        elif at < self._wakes_at:
            watchdog.changed.notify_all()

    def left(self, linger: float) -> list[threading.Thread]:
        """Note that there are no leases; the thread, if it ends now."""
        now = clock.now()
        self._lingers_until = max(self._lingers_until, now + linger)
        if self._lingers_until > now:
            return []
        watchdog.changed.notify_all()
        thread = self._thread
        return [] if thread is None or self.is_busy or thread is threading.current_thread() else [thread]

    def hurry(self) -> None:
        """Stop lingering."""
        self._lingers_until = 0.0
        watchdog.changed.notify_all()

    def _run(self) -> None:
        while True:
            try:
                if not self._wait():
                    return
                self.work()
            except Exception:
                # Without this thread, all leases would be lost.
                logger.exception("heartbeat: unexpected error; going on")
                clock.sleep(MOMENT)
            finally:
                self.is_busy = False

    def _wait(self) -> bool:
        """Wait until something is due, or for `MAX_SLEEP`; False when the thread may end."""
        with watchdog.mutex:
            self.is_late = has_waited = False
            while self._thread is threading.current_thread():
                now, due_at = clock.now(), self.due_at()
                if due_at is None:
                    self._lingers_until = due_at = min(self._lingers_until, now + LINGER)
                    if due_at <= now:
                        self._thread = None
                        return False
                elif has_waited or due_at <= now:
                    return True
                self._wakes_at = min(due_at, now + MAX_SLEEP)
                watchdog.changed.wait(self._wakes_at - now)
                has_waited, self.is_late = True, clock.now() > self._wakes_at + MOMENT
            return False


class Heartbeat(_Role):
    """Renews leases in `store` until they are stopped or lost.

    Attributes:
        store: has the leases.
        outage: logs when the store does not answer, and when it does again.
        renew_flag: shared with the processes of a pool: all leases are to be renewed at once.
        watched: the leases under watch, by their owner tokens.
    """

    name = "singleton-lock-heartbeat"

    def __init__(self, store: Store) -> None:
        watchdog.prepare()
        self.store = store
        self.outage = Outage(store.server)
        self._closed = False
        self.renew_flag = SharedFlag()
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        super().start_anew()
        self.watched: dict[str, _Watched] = {}

    def start(
        self,
        lease: Lease,
        on_lost: Callable[[], object],
        *,
        every: float = math.inf,
        linger: bool = True,
        on_moved: Callable[[], object] | None = None,
    ) -> None:
        """Renew `lease` from now on. Call `on_lost` when the lease is lost or must end for a newer task, and repeat the
        call until it is stopped.

        Args:
            lease: kept only as a weak reference.
            on_lost: runs in the watchdog's thread, so it must be quick. A bound method does not keep its object alive;
                any other callable must not refer to the lease, which would then be renewed until it is stopped.
            every: the most seconds between two renewals; a third of the ttl at most.
            linger: False to end the threads when the last lease is stopped, rather than a moment later.
            on_moved: runs in the watchdog's thread within a second after the lease began, and whenever the time at
                which it is given up has changed. Like `on_lost`.

        Raises:
            RuntimeError: no thread can be started; the lease is not renewed.
        """
        lease.ask = self._ask
        due_at = lease.acquired_at + min(lease.ttl * trust.RENEW_AFTER, every)
        lasts = LINGER if linger and not self._closed else 0.0
        watched = _Watched(lease.owner, weakref.ref(lease), weakly(on_lost), due_at, lasts, every)
        watched.on_moved = None if on_moved is None else weakly(on_moved)
        if on_moved is None:
            watched.look_at = watched.lost_at(lease)
        with watchdog.mutex:
            self.watched[lease.owner] = watched
            watchdog.heartbeats.add(self)
            try:
                watchdog.wake(watched.lost_at(lease))
                self.wake(due_at)
            except RuntimeError:
                self.forget(lease.owner)
                raise

    def stop(self, lease: Lease) -> None:
        """Stop renewing `lease`. A renewal that is under way may still arrive, and does no harm."""
        with watchdog.mutex:
            ending = self.forget(lease.owner)
        for thread in ending:
            thread.join(FAREWELL)

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
        with watchdog.mutex:
            self.renew_flag.set()
            if self.watched:
                self.wake(0.0)

    def close(self) -> None:
        """End the threads as soon as there is no lease to renew; a new lease would start them again."""
        with watchdog.mutex:
            self._closed = True
            for watched in list(self.watched.values()):
                watched.linger = 0.0
            self.hurry()
            watchdog.hurry()

    def due_at(self) -> float | None:
        if not self.watched:
            return None
        # Only while no renewal is under way, which may have been sent before.
        if self.renew_flag.is_new():
            for watched in list(self.watched.values()):
                watched.due_at = min(watched.due_at, 0.0)
        return min(watched.due_at for watched in list(self.watched.values()))

    def work(self) -> None:
        """Renew the leases that are due, or nearly due."""
        due: list[tuple[_Watched, Lease]] = []
        with watchdog.mutex:
            now = clock.now()
            for watched in list(self.watched.values()):
                if watched.due_at > now + watched.early:
                    continue
                if (lease := watched.lease()) is None:
                    self.forget(watched.owner)
                elif lease.reason is not None:
                    watched.due_at = math.inf
                else:
                    watched.asks(lease, now)
                    due.append((watched, lease))
            # At once: the watchdog gives up what is overdue, and was not asked for by somebody who is busy.
            self.is_busy = bool(due)
        if due:
            self._renew(due)

    def _renew(self, due: Sequence[tuple[_Watched, Lease]]) -> None:
        leases = [lease for _, lease in due]
        before = [lease.renewals for lease in leases]
        # Not the error: its traceback has this frame, which would keep the leases until the garbage is collected.
        failed: str | None = None
        answers: Sequence[bool] = ()
        try:
            answers = self.store.renew(leases, timeout=trust.step_of(lease.ttl for lease in leases))
            self.outage.answered()
        except LockUnavailable as error:
            failed = str(error)
            self.outage.failed(error)
        except Exception as error:
            failed = str(error)
            logger.exception("heartbeat: %d leases not renewed, trying again: unexpected error", len(leases))
        tells = False
        for number, (watched, lease) in enumerate(due):
            if failed is not None and lease.renewals == before[number]:
                watched.try_again_or_give_up(lease, failed)
            elif failed is not None or answers[number]:
                watched.schedule(lease)
            else:
                lease.lose(GONE)
            if lease.reason is not None or lease.superseded_by is not None:
                watched.look_at, tells = 0.0, True
        if tells:
            with watchdog.mutex:
                watchdog.wake(0.0)

    def _look_at(self, lease: Lease, *, asks: bool) -> None:
        """Have both threads look at a lease whose ttl changes."""
        with watchdog.mutex:
            watched = self.watched.get(lease.owner)
            if watched is None or watched.lease() is not lease:
                return
            if asks:
                watched.asks(lease, clock.now())
            watched.schedule(lease)
            watched.look_at = 0.0
            watchdog.wake(0.0)
            self.wake(watched.due_at)

    def _ask(self, lease: Lease) -> None:
        """Ask for an overdue lease, in the thread that runs under it: it goes on only if the lock is still held."""
        try:
            (ours,) = self.store.renew([lease], timeout=trust.step_of([lease.ttl]))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is unknown whether the lock is held
            lease.lose(f"it is overdue, and could not be renewed: {error}")
        else:
            if not ours:
                lease.lose(GONE)

    def forget(self, owner: str) -> list[threading.Thread]:
        """Forget a lease, under the mutex; the threads that end now because there are no others."""
        watched = self.watched.pop(owner, None)
        if watched is None or self.watched:
            return []
        watchdog.heartbeats.discard(self)
        ending = self.left(watched.linger)
        return ending if watchdog.heartbeats else ending + watchdog.left(watched.linger)


class Watchdog(_Role):
    """Gives up leases in time, and tells holders that they must stop.

    Attributes:
        heartbeats: those that have leases.
        mutex: of all that this module does. Always entered itself: a Condition's `with` is Python code, which could be
            interrupted with the lock taken. Reentrant: a finalizer or a signal handler may run at any line and release
            another lock. So every loop here goes over a copy.
        changed: notified when a thread must look sooner than it would.
    """

    name = "singleton-lock-watchdog"
    mutex: threading.RLock
    changed: threading.Condition

    def __init__(self) -> None:
        self.start_anew()
        forks.start_anew_in_child(self)

    def prepare(self) -> None:
        """Make what threads wait for when that is first needed: they may be patched (by gevent's `patch_all`) after the
        import. A signal's handler, or a thread, may do so meanwhile, and use it: what is there, stays.
        """
        made = vars(self)
        mutex = made.setdefault("mutex", threading.RLock())
        made.setdefault("changed", threading.Condition(mutex))

    def start_anew(self) -> None:
        super().start_anew()
        self.heartbeats: set[Heartbeat] = set()
        if "mutex" in vars(self):
            self.mutex = threading.RLock()
            self.changed = threading.Condition(self.mutex)

    def due_at(self) -> float | None:
        if not self.heartbeats:
            return None
        watched = (it for heartbeat in list(self.heartbeats) for it in list(heartbeat.watched.values()))
        return min((it.look_at for it in watched), default=0.0)

    def work(self) -> None:
        if self.is_late and any(heartbeat.is_busy for heartbeat in list(self.heartbeats)):
            # The process was stopped. The answer may be there, and whoever is to read it goes on only now, too.
            clock.sleep(MOMENT)
        with self.mutex:
            calls = [call for heartbeat in list(self.heartbeats) for call in self._look(heartbeat, clock.now())]
        for heartbeat, watched, call in calls:
            try:
                if heartbeat.watched.get(watched.owner) is watched:
                    call()
            except Exception:
                logger.exception("heartbeat: could not ask a task to stop, or report until when it has its lock")

    def _look(self, heartbeat: Heartbeat, now: float) -> list[_Call]:
        """Give up the leases of a heartbeat that cannot wait any longer; whom to call."""
        calls: list[_Call] = []
        if not heartbeat.watched:  # Whoever stopped the last one was interrupted.
            self.heartbeats.discard(heartbeat)
        for watched in list(heartbeat.watched.values()):
            lease = watched.lease()
            # Those that are due soon, too: most were renewed meanwhile.
            if watched.look_at > now + MAX_SLEEP and lease is not None:
                continue
            if lease is None:
                heartbeat.forget(watched.owner)
                continue
            if lease.reason is None and now >= watched.lost_at(lease):
                # If nobody has asked yet, the process was stopped meanwhile, and asks now.
                if not heartbeat.is_busy and watched.asks(lease, now):
                    watched.due_at = 0.0
                    heartbeat.wake(0.0)
                else:
                    lease.lose("it could not be renewed in time: the store has not answered")
            calls += [(heartbeat, watched, call) for call in watched.news(lease, now)]
        return calls


def weakly(call: Callable[[], T]) -> Callable[[], T | None]:
    """The same call; a bound method does not keep its object alive, and the call returns None once that is gone."""
    # Not `weakref.WeakMethod`, which takes half a kilobyte: there may be many.
    return partial(_call, weakref.ref(call.__self__), call.__func__) if isinstance(call, MethodType) else call


def _call(subject: weakref.ref[Any], method: Callable[[Any], T]) -> T | None:
    return None if (alive := subject()) is None else method(alive)


#: The watchdog of this process.
watchdog = Watchdog()
