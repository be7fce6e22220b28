"""The thread that renews every lease of this process.

One thread, whatever the number of leases and stores; started with the first lease, ended soon after the last one, and
never by an error. The ttl is spent in thirds: after the first one a lease is renewed; in the second one that is tried
again and again while no answer comes; with the last one the lease counts as lost, and the task is stopped in it, before
anybody else can hold the lock. A lease is lost at once when the store says that it is no longer ours.

All leases of one store that are due are renewed in one round, and rounds of one store follow each other. A round may
wait for a silent server, for a few steps at most. That is within the margin of its own leases; those of another store
must not wait for it. So where there are leases in several stores, another thread watches the one that makes the rounds:
when that is held up, the watcher goes on with the other stores, and is then watched in turn. There are as many threads
as servers are silent at this moment, and at most two more.

A renewal that arrives after the release does no harm: it renews what is ours and never creates anything. What changes
the ttl of a lease (`renew`) never runs beside a round that renews it, or nobody would know which of the two ttls it
has.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import chance, clock, forks, trust
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)

#: Seconds that the thread sleeps at most while there are leases: sleeping does not count the time in which the host is
#: suspended, and a lease does.
MAX_SLEEP = 1.0

#: Seconds without a lease after which the thread ends: in a row of short tasks it is not started for each.
LINGER = 1.0

#: Seconds for which who ends the last lease waits at most for a thread that does not linger.
FAREWELL = 1.0

#: Seconds after which a round is held up: far more than a healthy server takes, far less than a lease can spare.
PATIENCE = 0.02

#: Threads that wait for what is due next, where there are leases in several stores.
WATCHERS = 2

#: Why a lease was lost that the store no longer has.
GONE = "it is no longer ours in the store: it ended, was taken over, or was deleted"

#: What is due within this share of its renewal interval is renewed along with what is due now.
COALESCE = 0.1


@dataclass(slots=True, eq=False)
class _Watched:
    """A lease under watch. Written under the mutex after it was added.

    The references are weak, so that an execution which was torn down without saying goodbye (a time limit that struck
    in its last line) is not renewed for ever.
    """

    lease: weakref.ref[Lease]
    #: The method `on_lost` in two parts: `weakref.WeakMethod` takes half a kilobyte.
    subject: weakref.ref[Any]
    on_lost: Callable[[Any], None]
    due_at: float
    linger: float


class Heartbeat:
    """Renews leases in `store` until they are stopped or lost, in the thread that all stores of this process share."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = False
        self.start_anew()
        _pulse.prepare()

    def start(self, lease: Lease, on_lost: Callable[[], None], *, linger: bool = True) -> None:
        """Renew `lease` from now on; call `on_lost` when it is lost, and again until it is stopped.

        Args:
            lease: kept as a weak reference only.
            on_lost: a method, kept weakly as well. It runs in the heartbeat's thread, so it must be quick.
            linger: False to have the thread be gone when the last lease is stopped, rather than a moment later.
        """
        lease.ask = self._ask
        method: Any = on_lost
        due_at = lease.acquired_at + lease.good_for * trust.RENEW_AFTER
        lasts = LINGER if linger and not self._closed else 0.0
        watched = _Watched(weakref.ref(lease), weakref.ref(method.__self__), method.__func__, due_at, lasts)
        with _pulse.mutex:
            self.watched[lease.owner] = watched
            try:
                _pulse.follow(self, due_at)
            except RuntimeError:  # No thread can be had: the caller must not believe that the lease is renewed.
                del self.watched[lease.owner]
                raise

    def stop(self, lease: Lease) -> None:
        """Renew `lease` no more. A renewal that is under way may still arrive, and does no harm."""
        with _pulse.mutex:
            watched = self.watched.pop(lease.owner, None)
            ending = [] if watched is None else _pulse.left(self, watched.linger)
        for thread in ending:
            thread.join(FAREWELL)

    def renew(self, lease: Lease, ttl: float) -> bool:
        """Give `lease` another ttl from now on, by which it is renewed then if it is under watch; False if it is lost.

        Raises:
            LockUnavailable: no answer. The lease keeps its ttl, and is trusted for the shorter one.
        """
        with _pulse.mutex:
            while lease.owner in self.taken:
                _pulse.given_back.wait()
            self.taken.add(lease.owner)
        try:
            return self._renew_for(lease, ttl)
        finally:
            with _pulse.mutex:
                self.taken.discard(lease.owner)
                _pulse.given_back.notify_all()
                watched = self.watched.get(lease.owner)
                if watched is not None and watched.lease() is lease:
                    watched.due_at = _due_after(lease) if lease.reason is None else 0.0
                    _pulse.follow(self, watched.due_at)

    def close(self) -> None:
        """End the thread as soon as there is no lease to renew; another lease would start it again."""
        with _pulse.mutex:
            self._closed = True
            for watched in list(self.watched.values()):
                watched.linger = 0.0
            _pulse.hurry()

    def start_anew(self) -> None:
        """Start with nothing: at first, and in the child of a fork, whose leases are the parent's."""
        #: Under watch, by their owners.
        self.watched: dict[str, _Watched] = {}
        #: Owners of the leases of which a renewal is under way.
        self.taken: set[str] = set()
        #: Whether a thread is in a round.
        self.in_round = False

    def round(self, due: Sequence[_Watched]) -> None:
        """Renew what is due, and say when to look at each again."""
        pairs = [(watched, lease) for watched in due if (lease := watched.lease()) is not None]
        try:
            if pairs:
                self._renew(pairs, clock.now())
        except Exception as error:
            # Whatever it was: these leases are tried again, or given up, and the others depend on this thread.
            logger.exception("heartbeat: unexpected error; going on")
            for watched, lease in pairs:
                if watched.due_at <= clock.now() and lease.reason is None:
                    _try_again_or_give_up(watched, lease, error)

    def _renew(self, pairs: Sequence[tuple[_Watched, Lease]], began: float) -> None:
        leases = [lease for _, lease in pairs]
        renewals = [lease.renewals for lease in leases]
        step = trust.step_of(lease.good_for for lease in leases)
        try:
            renewed = self._store.renew(leases, timeout=step)
        except LockUnavailable as error:
            logger.warning("heartbeat: %d leases not renewed, trying again: %s", len(leases), error)
            for (watched, lease), before in zip(pairs, renewals, strict=True):
                if lease.renewals > before:
                    watched.due_at = _due_after(lease)  # It was some other that got no answer.
                else:
                    _try_again_or_give_up(watched, lease, error)
        except Exception as error:
            if len(pairs) == 1 or clock.now() > began + step:
                logger.exception("heartbeat: %d leases not renewed, trying again: unexpected error", len(leases))
                for watched, lease in pairs:
                    _try_again_or_give_up(watched, lease, error)
                return
            # One of them may be the reason, which must not be the end of the others.
            middle = len(pairs) // 2
            self._renew(pairs[:middle], began)
            self._renew(pairs[middle:], began)
        else:
            for (watched, lease), ours in zip(pairs, renewed, strict=True):
                if ours:
                    watched.due_at = _due_after(lease)
                else:
                    _lose(watched, lease, GONE)

    def _renew_for(self, lease: Lease, ttl: float) -> bool:
        if lease.reason is not None:
            return False
        asked = lease.asked_for(ttl)
        try:
            # Not as short a step as in a round: nobody else waits, and a lease that is overdue meanwhile is given up.
            step = min(trust.MAX_STEP, max(lease.good_for, ttl) / 3)
            (ours,) = self._store.renew([asked], timeout=step)
        except BaseException:
            # Interrupted, too: it may have been carried out, or will be.
            lease.doubt(ttl, asked.acquired_at)
            raise
        if ours:
            lease.become(asked)
        else:
            lease.lose(GONE)
        return lease.reason is None

    def _ask(self, lease: Lease) -> None:
        """In the thread that runs under an overdue lease: it goes on only if the lock is still ours."""
        try:
            (ours,) = self._store.renew([lease], timeout=trust.step_of([lease.good_for]))
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody knows that the lock is ours
            lease.lose(f"it is overdue, and could not be renewed: {error}")
        else:
            if not ours:
                lease.lose(GONE)


class _Pulse:
    """The threads of this process, and the heartbeats that have leases.

    Everything here is written under the mutex, as are the heartbeats' own `watched`, `taken` and `in_round`.
    """

    def __init__(self) -> None:
        self._heartbeats: set[Heartbeat] = set()
        self._preparing = Mutex()
        self._prepared = False

    def prepare(self) -> None:
        """Begin when first needed: what patches threads (gevent's `patch_all`) may come after the import."""
        with self._preparing.lock:
            if not self._prepared:
                self.start_anew()
                self._prepared = True

    def start_anew(self) -> None:
        """Start with nothing: at first, and in the child of a fork."""
        #: Entered itself: a Condition's `with` is Python, and could be interrupted with the lock taken. Reentrant: a
        #: finalizer, or a signal's handler, may come at any line and release a lock of its own. So what is gone through
        #: here is a copy.
        self.mutex = lock = threading.RLock()
        #: Something is due sooner, or the last lease has left.
        self.changed = threading.Condition(lock)
        #: A renewal has ended.
        self.given_back = threading.Condition(lock)
        for heartbeat in list(self._heartbeats):
            heartbeat.start_anew()
        self._heartbeats = set()
        self._threads: set[threading.Thread] = set()
        #: Those of them that are in a round, or tell of a loss.
        self._working: set[threading.Thread] = set()
        #: Who makes the rounds, and since when that is in one.
        self._leader: threading.Thread | None = None
        self._in_round_since: float | None = None
        #: When a thread looks next, unless it is notified.
        self._wakes_at = 0.0
        #: Until when a thread waits without leases.
        self._lingers_until = 0.0

    def follow(self, heartbeat: Heartbeat, due_at: float) -> None:
        """See to it that somebody looks at this heartbeat when it is due."""
        self._heartbeats.add(heartbeat)
        if not self._add_thread() and due_at < self._wakes_at:
            self.changed.notify()

    def left(self, heartbeat: Heartbeat, linger: float) -> list[threading.Thread]:
        """A lease is under watch no more; the threads that end now for lack of others."""
        if heartbeat.watched:
            return []
        if not heartbeat.in_round:
            self._heartbeats.discard(heartbeat)
        self._lingers_until = max(self._lingers_until, clock.now() + linger)
        if self._heartbeats or self._lingers_until > clock.now():
            return []
        self.changed.notify_all()
        return list(self._threads - self._working - {threading.current_thread()})

    def hurry(self) -> None:
        """Linger no longer."""
        self._lingers_until = 0.0
        self.changed.notify_all()

    def _add_thread(self) -> bool:
        """Start a thread if somebody is missing to watch; whether one was."""
        self._threads = {thread for thread in list(self._threads) if thread.is_alive()}
        self._working &= self._threads
        missing = self._threads == self._working and (not self._working or len(self._heartbeats) > 1)
        if missing:
            thread = threading.Thread(target=self._run, name="singleton-lock-heartbeat", daemon=True)
            thread.start()
            self._threads.add(thread)
        return missing

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            try:
                if (work := self._next(me)) is None:
                    return
                work()
            except Exception:
                # Also of choosing what to do: without this thread all leases would be lost.
                logger.exception("heartbeat: unexpected error; going on")
                clock.sleep(PATIENCE)
            finally:
                with self.mutex:
                    self._working.discard(me)
                    if self._leader is me:
                        self._in_round_since = None

    def _next(self, me: threading.Thread) -> Callable[[], None] | None:
        """What this thread is to do, waited for; None when it may end."""
        with self.mutex:
            while True:
                now = clock.now()
                if (work := self._work(now, me)) is not None:
                    self._working.add(me)
                    with suppress(Exception):  # No more threads can be had: this one will have to do.
                        self._add_thread()
                    return work
                sleep = self._seconds_to_sleep(now)
                watchers = len(self._threads - self._working)
                if sleep <= 0 or watchers > (WATCHERS if len(self._heartbeats) > 1 else 1):
                    self._threads.discard(me)
                    return None
                self._wakes_at = now + sleep
                self.changed.wait(sleep)

    def _seconds_to_sleep(self, now: float) -> float:
        """Until something is due; 0 or less when there has been no lease for some time."""
        if not self._heartbeats:
            return min(self._lingers_until - now, MAX_SLEEP)
        next_at = min(
            (
                _looked_at(heartbeat, watched)
                for heartbeat in list(self._heartbeats)
                for watched in list(heartbeat.watched.values())
            ),
            default=now + MAX_SLEEP,
        )
        if self._in_round_since is not None:
            next_at = max(next_at, self._in_round_since + PATIENCE)
        return min(max(next_at - now, 0.001), MAX_SLEEP)

    def _work(self, now: float, me: threading.Thread) -> Callable[[], None] | None:
        lost: list[tuple[Heartbeat, _Watched]] = []
        rounds: list[tuple[float, Heartbeat]] = []
        for heartbeat in list(self._heartbeats):
            for owner, watched in list(heartbeat.watched.items()):
                lease = watched.lease()
                if lease is None:
                    del heartbeat.watched[owner]
                    self.left(heartbeat, watched.linger)
                    continue
                if now < _looked_at(heartbeat, watched):
                    continue
                if lease.reason is None and (heartbeat.in_round or owner in heartbeat.taken):
                    _lose(watched, lease, "it could not be renewed in time: the store has not answered")
                if lease.reason is None:
                    rounds.append((watched.due_at, heartbeat))
                else:
                    watched.due_at = now + min(trust.MAX_STRIKE_INTERVAL, lease.ttl * trust.STRIKE_SHARE)
                    lost.append((heartbeat, watched))
            if not heartbeat.watched and not heartbeat.in_round:
                self._heartbeats.discard(heartbeat)
        if lost:
            return partial(self._strike, lost)
        if not rounds or (self._in_round_since is not None and now < self._in_round_since + PATIENCE):
            return None
        self._leader, self._in_round_since = me, now
        _, heartbeat = min(rounds, key=lambda found: found[0])
        due = {
            owner: watched
            for owner, watched in list(heartbeat.watched.items())
            if owner not in heartbeat.taken and _is_due(watched, now)
        }
        heartbeat.in_round = True
        heartbeat.taken.update(due)
        return partial(self._go_round, heartbeat, due)

    def _go_round(self, heartbeat: Heartbeat, due: Mapping[str, _Watched]) -> None:
        try:
            heartbeat.round([*due.values()])
        finally:
            with self.mutex:
                heartbeat.in_round = False
                heartbeat.taken.difference_update(due)
                self.given_back.notify_all()

    def _strike(self, lost: Sequence[tuple[Heartbeat, _Watched]]) -> None:
        for heartbeat, watched in lost:
            lease = watched.lease()
            if lease is None or heartbeat.watched.get(lease.owner) is not watched:
                continue
            try:
                if (subject := watched.subject()) is not None:
                    watched.on_lost(subject)
            except Exception:
                logger.exception("heartbeat: %s: could not be told that it is lost", lease.key)


def _looked_at(heartbeat: Heartbeat, watched: _Watched) -> float:
    """When to do something about it: renew it, give it up while a renewal is under way, or tell of its loss."""
    lease = watched.lease()
    if lease is None:
        return 0.0
    if lease.reason is None and (heartbeat.in_round or lease.owner in heartbeat.taken):
        return _give_up_at(lease)
    return watched.due_at


def _is_due(watched: _Watched, now: float) -> bool:
    lease = watched.lease()
    return lease is not None and lease.reason is None and watched.due_at <= now + _slack(lease)


def _slack(lease: Lease) -> float:
    return lease.good_for * trust.RENEW_AFTER * COALESCE


def _due_after(lease: Lease) -> float:
    # From when it was sent: a process that was stopped in between reads an answer that says little by now.
    return lease.trusted_until - lease.good_for * (1 - chance.spread(trust.RENEW_AFTER, least=0.9))


def _give_up_at(lease: Lease) -> float:
    return lease.trusted_until - lease.good_for * trust.GIVE_UP_BEFORE


def _lose(watched: _Watched, lease: Lease, reason: str) -> None:
    lease.lose(reason)
    watched.due_at = 0.0  # It is told at once.


def _try_again_or_give_up(watched: _Watched, lease: Lease, error: Exception) -> None:
    now = clock.now()
    lease.doubt(lease.ttl, now)  # It may be carried out when the lease has another ttl.
    give_up_at = _give_up_at(lease)
    if now >= give_up_at:
        _lose(watched, lease, f"it could not be renewed in time: {error}")
    else:
        pause = chance.spread(min(0.5, lease.good_for * trust.RETRY_SHARE))
        watched.due_at = min(now + pause, give_up_at)


#: Of this process.
_pulse = _Pulse()
forks.start_anew_in_child(_pulse)
