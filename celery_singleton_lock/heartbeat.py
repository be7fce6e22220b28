"""Renews the leases of this process, and tells their holders in time if that fails.

There are two roles, each one thread per store. The *renewer* waits until leases are due, and renews all of them in one
call, which takes as long as the server is silent. The *watchdog* never asks a server: it finds the leases that are
overdue, gives up those that are not renewed soon after, and tells the holders of lost leases. So a silent server holds
up its own renewer, and nobody's deadline.

A renewal that arrives after the release does no harm: it renews what is held and never creates anything.

Protocol: `docs/protocol.md`, section 4.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from tempfile import TemporaryFile
from types import MethodType
from typing import Any, ParamSpec, TypeVar

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks, trust
from celery_singleton_lock.background import BackgroundJob
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.outage import Outage
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: Why a lease that the store no longer has was lost.
GONE = "the store no longer has it: it ended, was taken over, or was deleted"

#: Why one could not be renewed if no call has failed: it still waits for an answer.
SILENT = "the store has not answered"

#: The most seconds until each thread works again, and until an unanswered renewal is tried again.
MAX_SLEEP, MAX_PAUSE = 1.0, 0.5


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
        lease: a weak reference, so that an execution that was torn down without cleaning up (by a time limit in its
            last line) is not renewed forever.
        on_lost, stop: as given to `Heartbeat.start`; see `weakly`.
        every: the most seconds between two renewals.
        due_at: when to renew it.
        lost_at: when to give it up; infinite until the watchdog has found that it is overdue.
        stop_at: when to make its holder stop again.
    """

    lease: weakref.ref[Lease]
    on_lost: Callable[[Lease], object]
    stop: Callable[[], object] | None
    every: float
    due_at: float
    lost_at: float = math.inf
    stop_at: float = 0.0

    def schedule(self, lease: Lease, after: float) -> None:
        """Set when to renew it next: after this share of its ttl, and not at once if there was no answer."""
        # From when it was sent: if the process was stopped in between, the answer says little by now.
        next_at, now = lease.trusted_until - lease.ttl * (1 - after), clock.now()
        pause = clock.spread(min(MAX_PAUSE, lease.ttl * trust.RETRY_SHARE))
        self.due_at = min(max(next_at, now + pause), now + self.every)


def _next_share() -> float:
    """After which share of its ttl to renew a lease next."""
    return clock.spread(trust.RENEW_AFTER, least=0.9)


class Heartbeat:
    """Renews leases in `store` until they are stopped or lost.

    Attributes:
        store: has the leases.
        outage: logs when the store does not answer, and when it does again.
        renew_flag: shared with the processes of a pool: all leases are to be renewed at once.
        watched: the leases under watch, by their owner tokens, as long as they exist. A finalizer or a signal handler
            may release a lock at any line, and another thread, too: every loop goes over a copy.
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
        self.watched: dict[str, _Watched] = {}
        #: Why the last renewal failed.
        self._error = SILENT

    def start(
        self,
        lease: Lease,
        on_lost: Callable[[Lease], object],
        *,
        stop: Callable[[], object] | None = None,
        every: float = math.inf,
    ) -> None:
        """Renew `lease` from now on.

        Bound methods do not keep their objects alive; any other callable must not refer to the lease, which would then
        be renewed until it is stopped.

        Args:
            lease: kept only as a weak reference.
            on_lost: called once when the lease is lost, in a thread of its own.
            stop: makes the holder stop: called when the lease is lost or must end for a newer task, and again until it
                is stopped. Runs in the watchdog's thread, so it must be quick, and must not log.
            every: the most seconds between two renewals; a third of the ttl at most.

        Raises:
            RuntimeError: no thread can be started; the lease is not renewed.
        """
        lease.ask = self._ask
        all_watched, owner = self.watched, lease.owner
        due_at = lease.acquired_at + min(lease.ttl * trust.RENEW_AFTER, every)
        weak = weakref.ref(lease, lambda _: all_watched.pop(owner, None))
        all_watched[owner] = _Watched(weak, weakly(on_lost), stop and weakly(stop), every, due_at)
        first = _soon(due_at)  # The watchdog has nothing to do before that; then it sees when.
        if not (self._watchdog.schedule(first) and self._renewer.schedule(first)):
            self.stop(lease)
            raise RuntimeError("no thread can be started to renew the lease")

    def stop(self, lease: Lease) -> None:
        """Stop renewing `lease`. A renewal that is under way may still arrive, and does no harm."""
        self.watched.pop(lease.owner, None)

    def renew(self, lease: Lease, ttl: float) -> bool:
        """Give `lease` a ttl from now on, also for later renewals if it is under watch; False if it is lost.

        Raises:
            LockUnavailable: no answer. The lease has the ttl that it had.
        """
        if lease.reason is None:
            # A late request does not matter: it never shortens what the lease has by then. Nobody else waits for the
            # answer, so it has the time of a long lease; one that is overdue meanwhile is given up.
            asked, sent_at = Hold(lease.key, lease.owner, ttl=ttl, limit=lease.limit, only_longer=True), clock.now()
            (ours,) = self.store.renew([asked], timeout=trust.MAX_STEP)
            if ours:
                lease.ttl = ttl
                lease.extend(sent_at, ttl)
            else:
                lease.lose(GONE)
            if (watched := self.watched.get(lease.owner)) is not None:
                watched.schedule(lease, _next_share())  # Both threads may have to look at it sooner than before.
                self._renewer.schedule(_soon(watched.due_at))
                self._watchdog.schedule(sent_at)
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
        by = math.inf if self.renew_flag.is_new() else clock.now()
        if due := [(it, lease) for it, lease in self._all_watched() if it.due_at - lease.ttl * trust.EARLY_SHARE <= by]:
            self._renew(due)
        all_due = [watched.due_at for watched, _ in self._all_watched()]
        return _soon(min(all_due)) - clock.now() if all_due else None

    def _all_watched(self) -> list[tuple[_Watched, Lease]]:
        """The leases that are not lost."""
        pairs = [(watched, watched.lease()) for watched in list(self.watched.values())]
        return [(watched, lease) for watched, lease in pairs if lease is not None and lease.reason is None]

    def _renew(self, due: Sequence[tuple[_Watched, Lease]]) -> None:
        leases = [lease for _, lease in due]
        answers = [True] * len(leases)
        try:
            answers = self.store.renew(leases, timeout=trust.step_of(min(lease.ttl for lease in leases)))
            self.outage.answered()
            self._error = SILENT
        except LockUnavailable as error:
            # Not the error: its traceback has this frame, which would keep the leases until the garbage is collected.
            self._error = str(error)
            self.outage.failed(error)
        except Exception as error:
            self._error = str(error)
            logger.exception("heartbeat: %d leases not renewed, trying again: unexpected error", len(leases))
        after = _next_share()
        for (watched, lease), ours in zip(due, answers, strict=True):
            if ours:
                watched.schedule(lease, after)
            else:
                lease.lose(GONE)
        if any(lease.reason is not None or lease.superseded_by is not None for lease in leases):
            self._watchdog.schedule(clock.now())

    def _ask(self, lease: Lease) -> None:
        """Ask for an overdue lease, in the thread that runs under it: it goes on only if the lock is still held."""
        try:
            self.renew(lease, lease.ttl)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is unknown whether the lock is held
            lease.lose(f"it is overdue, and could not be renewed: {error}")

    def _look(self) -> float | None:
        """Give up the leases that cannot wait any longer, and tell the holders of those that are lost, or must end for
        a newer task; the seconds until the next call, None if there are no leases.
        """
        now = clock.now()
        look_at = _soon(math.inf)
        lost: list[tuple[Callable[[Lease], object], Lease]] = []
        for owner, watched in list(self.watched.items()):
            if (lease := watched.lease()) is None:
                continue
            if lease.reason is None:
                if now < lease.give_up_at:
                    watched.lost_at = math.inf
                elif watched.lost_at == math.inf:
                    # Once more, whatever was tried before: if the process was stopped meanwhile, nobody has asked, or
                    # the answer is there, and whoever is to read it goes on only now, too.
                    watched.lost_at, watched.due_at = now + 2 * trust.step_of(lease.ttl), now
                    self._renewer.schedule(now)
                elif now >= watched.lost_at:
                    lease.lose(f"it could not be renewed in time: {self._error}")
                look_at = min(look_at, lease.give_up_at if watched.lost_at == math.inf else watched.lost_at)
            if lease.reason is not None or lease.superseded_by is not None:
                if now >= watched.stop_at and self.watched.get(owner) is watched:
                    watched.stop_at = now + min(trust.MAX_STRIKE_INTERVAL, lease.ttl * trust.STRIKE_SHARE)
                    if lease.reason is not None and not lease.is_told:
                        lease.is_told = True  # Before it stops: as it ends, it would say so, too.
                        lost.append((strongly(watched.on_lost), lease))
                    _stop(watched, lease)
                look_at = min(look_at, watched.stop_at)
        if lost:
            # Once all are to stop, and not here: each thread that starts may have to wait for busy bodies.
            try:
                _in_a_thread(_tell, lost)
            except RuntimeError:
                _tell(lost)
        return look_at - clock.now() if self.watched else None


def _stop(watched: _Watched, lease: Lease) -> None:
    try:
        if watched.stop is not None:
            watched.stop()
    except Exception as error:  # noqa: BLE001 - whatever it is, other leases need this thread
        with suppress(RuntimeError):
            _in_a_thread(logger.error, "heartbeat: could not stop %s: %r", lease.key, error)


def _tell(lost: Sequence[tuple[Callable[[Lease], object], Lease]]) -> None:
    for on_lost, lease in lost:
        try:
            _in_a_thread(on_lost, lease)
        except RuntimeError:  # No thread can be started: the next try to stop it tells it.
            lease.is_told = False


def _in_a_thread(call: Callable[..., object], *given: object) -> None:
    """Call it in a thread of its own: it may take long, or hang, as a log may."""
    threading.Thread(target=call, args=given, name="singleton-lock-lost", daemon=True).start()


def _soon(at: float) -> float:
    """This time, or the latest at which a thread works again: a process of its pool may have set the flag, and a thread
    that finds no lease can end.
    """
    return min(at, clock.now() + MAX_SLEEP)


def weakly(call: Callable[P, T]) -> Callable[P, T | None]:
    """The same call; a bound method does not keep its object alive, and the call returns None once that is gone."""
    # Not `weakref.WeakMethod`, which takes half a kilobyte: there may be many.
    return partial(_call, weakref.ref(call.__self__), call.__func__) if isinstance(call, MethodType) else call


def strongly(call: Callable[P, T]) -> Callable[P, T]:
    """What `weakly` was given, which keeps its object alive again: it may have ended when the call comes."""
    if isinstance(call, partial) and call.func is _call and (alive := call.args[0]()) is not None:
        return MethodType(call.args[1], alive)
    return call


def _call(subject: weakref.ref[Any], method: Callable[..., T], *given: Any) -> T | None:
    return None if (alive := subject()) is None else method(alive, *given)
