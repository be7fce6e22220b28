"""The threads that do the renewals of this process: when they start, what each does next, and when they end.

There is one thread, whatever the number of leases. But a round of renewals may wait for a silent server, and neither
leases in other stores nor the holders of leases in the same store must wait for that. So a second thread watches the
thread that makes a round: it gives up the leases that cannot wait any longer. When the first is held up, the second
goes on with the other stores, and is then watched in turn. There are as many threads as there are silent servers at
this moment, and at most two more.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.watched import Watched

logger = get_logger(__name__)

#: The longest sleep of the thread in seconds while there are leases: a sleep does not count the time during which the
#: host is suspended, but a lease does.
MAX_SLEEP = 1.0

#: Seconds after which a round is held up: far more than a healthy server takes, far less than a lease can spare.
PATIENCE = 0.02

#: The number of threads that wait for what is due next, if there are leases in several stores.
WATCHERS = 2


class Renewer(ABC):
    """Renews the leases of one store; a `Heartbeat`. All attributes are written under the pulse's mutex.

    Attributes:
        watched: the leases under watch, by their owner tokens.
        taken: the owner tokens of leases with a renewal under way, and who does the renewal.
        in_round: whether a thread is in a round.
    """

    def start_anew(self) -> None:
        """Watch nothing: at first, and in the child of a fork, because the leases are the parent's."""
        self.watched: dict[str, Watched] = {}
        self.taken: dict[str, object] = {}
        self.in_round = False

    def is_under_way(self, owner: str) -> bool:
        return self.in_round or owner in self.taken

    @abstractmethod
    def heed(self) -> None:
        """Make all leases due now, if that was asked for."""

    @abstractmethod
    def round(self, due: Sequence[Watched]) -> None:
        """Renew the due leases, and set when each is due again."""


class Pulse:
    """The threads of this process, and the heartbeats that have leases. Everything here is written under the mutex."""

    def __init__(self) -> None:
        self.start_anew()

    def prepare(self) -> None:
        """Make what threads wait for when that is first needed: they may be patched (by gevent's `patch_all`) after the
        import. A signal's handler, or a thread, may do so meanwhile, and use it: what is there, stays.
        """
        made = vars(self)
        #: Always entered itself: a Condition's `with` is Python code, which could be interrupted with the lock taken.
        #: Reentrant: a finalizer or a signal handler may run at any line and release another lock. So every loop here
        #: goes over a copy.
        self.mutex: threading.RLock = made.setdefault("mutex", threading.RLock())
        #: Notified when something is due sooner, or the last lease has left.
        self.changed: threading.Condition = made.setdefault("changed", threading.Condition(self.mutex))
        #: Notified when a renewal has ended.
        self.given_back: threading.Condition = made.setdefault("given_back", threading.Condition(self.mutex))

    def start_anew(self) -> None:
        is_prepared = "mutex" in vars(self)
        vars(self).clear()
        self._heartbeats: set[Renewer] = set()
        self._threads: set[threading.Thread] = set()
        #: The threads that are in a round, or report a loss.
        self._working: set[threading.Thread] = set()
        #: The thread that makes the rounds, and since when it has been in a round.
        self._in_round: threading.Thread | None = None
        self._in_round_since: float | None = None
        #: When a thread wakes up, unless it is notified.
        self._wakes_at = 0.0
        #: Until when a thread waits without leases.
        self._lingers_until = 0.0
        if is_prepared:
            self.prepare()

    def follow(self, heartbeat: Renewer, due_at: float) -> None:
        """Make sure that a thread renews for this heartbeat when that is due, or gives the lease up in time."""
        self._heartbeats.add(heartbeat)
        if not self._add_thread() and due_at < self._wakes_at:
            self.changed.notify()

    def left(self, heartbeat: Renewer, linger: float) -> list[threading.Thread]:
        """Note that a lease is no longer under watch; the threads that end now because there are no other leases."""
        if heartbeat.watched:
            return []
        if not heartbeat.in_round:
            self._heartbeats.discard(heartbeat)
        now = clock.now()
        self._lingers_until = max(self._lingers_until, now + linger)
        if self._heartbeats or self._lingers_until > now:
            return []
        self.changed.notify_all()
        return list(self._threads - self._working - {threading.current_thread()})

    def hurry(self) -> None:
        """Stop lingering."""
        self._lingers_until = 0.0
        self.changed.notify_all()

    def _add_thread(self) -> bool:
        """Start a thread if there is none, or if all are at work, and nobody watches; whether one was started."""
        if len(self._threads) == 1 and not self._working and next(iter(self._threads)).is_alive():
            return False  # The usual case in a series of short leases.
        self._threads = {thread for thread in list(self._threads) if thread.is_alive()}
        self._working &= self._threads
        missing = self._threads == self._working
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
                # Also if choosing the work failed: without this thread, all leases would be lost.
                logger.exception("heartbeat: unexpected error; going on")
                clock.sleep(PATIENCE)
            finally:
                with self.mutex:
                    self._working.discard(me)
                    if self._in_round is me:
                        self._in_round_since = None

    def _next(self, me: threading.Thread) -> Callable[[], None] | None:
        """Wait for work for this thread; None when the thread may end."""
        with self.mutex:
            while True:
                now = clock.now()
                if (work := self._work(now, me)) is not None:
                    self._working.add(me)
                    with suppress(Exception):  # No more threads can be started: this one must do.
                        self._add_thread()
                    self.changed.notify()  # A thread that waits may sleep until later than this one would have.
                    return work
                sleep = self._seconds_to_sleep(now)
                watchers = len(self._threads - self._working)
                if sleep <= 0 or watchers > (WATCHERS if len(self._heartbeats) > 1 else 1):
                    self._threads.discard(me)
                    self.changed.notify()  # A thread that stays may sleep until later: what is due was under way then.
                    return None
                self._wakes_at = now + sleep
                self.changed.wait(sleep)
                if clock.now() > now + sleep + PATIENCE and self._is_any_under_way():
                    # The process was stopped. The answer may be there, and whoever is to read it goes on only now, too.
                    self.changed.wait(PATIENCE)

    def _is_any_under_way(self) -> bool:
        return any(heartbeat.in_round or heartbeat.taken for heartbeat in list(self._heartbeats))

    def _seconds_to_sleep(self, now: float) -> float:
        """Seconds until something is due; 0 or less if there has been no lease for some time."""
        if not self._heartbeats:
            return min(self._lingers_until - now, MAX_SLEEP)
        next_at = min(
            (
                watched.next_at(under_way=heartbeat.is_under_way(owner))
                for heartbeat in list(self._heartbeats)
                for owner, watched in list(heartbeat.watched.items())
            ),
            default=now + MAX_SLEEP,
        )
        if self._in_round_since is not None:
            next_at = max(next_at, self._in_round_since + PATIENCE)
        return min(max(next_at - now, 0.001), MAX_SLEEP)

    def _work(self, now: float, me: threading.Thread) -> Callable[[], None] | None:
        """The work to do now: stop holders, or renew the leases of the store with the most overdue lease."""
        to_stop, rounds = self._due(now)
        if to_stop:
            return partial(self._ask_to_stop, to_stop)
        if not rounds or (self._in_round_since is not None and now < self._in_round_since + PATIENCE):
            return None
        self._in_round, self._in_round_since = me, now
        _, heartbeat = min(rounds, key=lambda due: due[0])
        due = {
            owner: watched
            for owner, watched in list(heartbeat.watched.items())
            if owner not in heartbeat.taken and watched.is_due(now)
        }
        for watched in due.values():
            watched.asks(now)
        heartbeat.in_round = True
        heartbeat.taken.update(due)
        return partial(self._go_round, heartbeat, due)

    def _due(self, now: float) -> tuple[list[tuple[Renewer, Watched]], list[tuple[float, Renewer]]]:
        """The leases whose holders must stop, usually because the leases are lost; and the heartbeats with other due
        leases, and since when these are due.
        """
        to_stop: list[tuple[Renewer, Watched]] = []
        rounds: list[tuple[float, Renewer]] = []
        for heartbeat in list(self._heartbeats):
            heartbeat.heed()
            for owner, watched in list(heartbeat.watched.items()):
                lease = watched.lease()
                if lease is None:
                    heartbeat.watched.pop(owner, None)
                    self.left(heartbeat, watched.linger)
                    continue
                watched.say_end(lease)
                under_way = heartbeat.is_under_way(owner)
                if now < watched.next_at(under_way=under_way):
                    continue
                if watched.is_to_stop(lease, now):
                    watched.schedule_next_stop(lease, now)
                    to_stop.append((heartbeat, watched))
                    continue
                if lease.reason is None and under_way:
                    watched.lose(lease, "it could not be renewed in time: the store has not answered")
                if lease.reason is None:
                    rounds.append((watched.due_at, heartbeat))
                else:
                    watched.schedule_next_stop(lease, now)
                    to_stop.append((heartbeat, watched))
            if not heartbeat.watched and not heartbeat.in_round:
                self._heartbeats.discard(heartbeat)
        return to_stop, rounds

    def _go_round(self, heartbeat: Renewer, due: Mapping[str, Watched]) -> None:
        try:
            heartbeat.round([*due.values()])
        finally:
            with self.mutex:
                heartbeat.in_round = False
                for owner in due:
                    heartbeat.taken.pop(owner, None)
                self.given_back.notify_all()

    def _ask_to_stop(self, to_stop: Sequence[tuple[Renewer, Watched]]) -> None:
        for heartbeat, watched in to_stop:
            lease = watched.lease()
            if lease is None or heartbeat.watched.get(lease.owner) is not watched:
                continue
            try:
                watched.on_lost()
            except Exception:
                logger.exception("heartbeat: %s: could not ask its task to stop", lease.key)


#: The pulse of this process.
pulse = Pulse()
forks.start_anew_in_child(pulse)
