"""Renews every lease of a store, in the thread of the process (`pulse.py`).

All due leases of one store are renewed in one round, and rounds of one store follow each other. A renewal that arrives
after the release does no harm: it renews what is held and never creates anything. A change of a lease's ttl (`renew`)
never runs beside a round that renews the lease, or nobody would know which of the two ttls it has.

Protocol: `docs/protocol.md`, section 4.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks, trust
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.pulse import Renewer, pulse
from celery_singleton_lock.server_watch import ServerWatch
from celery_singleton_lock.shared_flag import SharedFlag
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.watched import GONE, Watched, weakly

logger = get_logger(__name__)

#: Seconds without a lease after which the thread ends, so that a series of short tasks does not start it for each.
LINGER = 1.0

#: The longest wait in seconds, at the end of the last lease, for a thread that does not linger.
FAREWELL = 1.0


#: Seconds that a store keeps what it was asked to write in an outage.
ASKED_FOR = 1.0


class Heartbeat(Renewer):
    """Renews leases in `store` until they are stopped or lost, in the thread that all stores of this process share.

    Attributes:
        server_watch: logs when the store does not answer.
        renew_flag: shared with the processes of a pool: all leases are to be renewed at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.server_watch = ServerWatch(store.server, self._ask_about, self._under_watch)
        self._closed = False
        self.renew_flag = SharedFlag()
        self.start_anew()
        forks.start_anew_in_child(self)
        pulse.prepare()

    def start(
        self,
        lease: Lease,
        on_lost: Callable[[], None],
        *,
        linger: bool = True,
        words: Callable[[], str] | None = None,
        on_moved: Callable[[], object] | None = None,
    ) -> None:
        """Renew `lease` from now on. Call `on_lost` when the lease is lost or must end for a newer task, and repeat the
        call until it is stopped.

        Args:
            lease: kept only as a weak reference.
            on_lost: runs in the heartbeat's thread, so it must be quick. A bound method does not keep its object alive;
                any other callable must not refer to the lease, which would then be renewed until it is stopped.
            linger: False to end the thread when the last lease is stopped, rather than a moment later.
            words: whose lease it is, for people; like `on_lost`.
            on_moved: runs in the heartbeat's thread within a second after the lease began, and whenever the time at
                which it is given up has changed. Like `on_lost`; must not raise an error.
        """
        lease.ask = self._ask
        due_at = lease.acquired_at + lease.good_for * trust.RENEW_AFTER
        lasts = LINGER if linger and not self._closed else 0.0
        watched = Watched(weakref.ref(lease), weakly(on_lost), due_at, lasts)
        watched.words = None if words is None else weakly(words)
        watched.on_moved = None if on_moved is None else weakly(on_moved)
        with pulse.mutex:
            self.watched[lease.owner] = watched
            try:
                pulse.follow(self, due_at)
            except RuntimeError:  # No thread can be started: the caller must not believe that the lease is renewed.
                del self.watched[lease.owner]
                raise

    def stop(self, lease: Lease) -> None:
        """Stop renewing `lease`. A renewal that is under way may still arrive, and does no harm."""
        with pulse.mutex:
            watched = self.watched.pop(lease.owner, None)
            ending = [] if watched is None else pulse.left(self, watched.linger)
        for thread in ending:
            thread.join(FAREWELL)

    def renew(self, lease: Lease, ttl: float) -> bool:
        """Give `lease` a new ttl from now on, also for later renewals if it is under watch; False if it is lost.

        Raises:
            LockUnavailable: no answer. The lease keeps its ttl, and is trusted for the shorter of the two.
        """
        mine = object()
        try:
            self._take(lease.owner, mine)
            return self._renew_for(lease, ttl)
        finally:
            with pulse.mutex:
                self._give_back(lease.owner, mine)
                watched = self.watched.get(lease.owner)
                if watched is not None and watched.lease() is lease:
                    watched.renewed(lease)
                    pulse.follow(self, watched.due_at)

    def supersede(self, owner: str, by: str) -> None:
        """Stop the run under this owner's lease for a newer task, if the lease is under watch: at once, not only when a
        renewal reports it.
        """
        with pulse.mutex:
            watched = self.watched.get(owner)
            if watched is not None and (lease := watched.lease()) is not None:
                lease.supersede(by)
                pulse.follow(self, 0.0)

    def renew_now(self) -> None:
        """Renew all leases at once, because one of them was taken away and its holder must learn that; within a second,
        this also happens in the processes of this worker's pool.
        """
        with pulse.mutex:
            self.renew_flag.set()
            if self.watched:
                pulse.follow(self, 0.0)

    def heed(self) -> None:
        # Not during a renewal, which may have been sent before.
        if self.in_round or self.taken or not self.renew_flag.is_new():
            return
        for watched in list(self.watched.values()):
            if (lease := watched.lease()) is not None and lease.reason is None:
                watched.due_at = 0.0

    def close(self) -> None:
        """End the thread as soon as there is no lease to renew; a new lease would start it again."""
        with pulse.mutex:
            self._closed = True
            for watched in list(self.watched.values()):
                watched.linger = 0.0
            pulse.hurry()

    def round(self, due: Sequence[Watched]) -> None:
        pairs = [(watched, lease) for watched in due if (lease := watched.lease()) is not None]
        try:
            if pairs:
                self._renew(pairs, clock.now())
        except Exception as error:
            # Whatever it was: these leases are tried again, or given up, and other leases depend on this thread.
            logger.exception("heartbeat: unexpected error; going on")
            for watched, lease in pairs:
                if watched.due_at <= clock.now() and lease.reason is None:
                    watched.try_again_or_give_up(lease, error)

    def _renew(self, pairs: Sequence[tuple[Watched, Lease]], began: float) -> None:
        leases = [lease for _, lease in pairs]
        renewals = [lease.renewals for lease in leases]
        step = trust.step_of(lease.good_for for lease in leases)
        try:
            renewed = self._store.renew(leases, timeout=step)
        except LockUnavailable as error:
            self.server_watch.failed(error, leases[0].key)
            for (watched, lease), before in zip(pairs, renewals, strict=True):
                if lease.renewals > before:
                    watched.renewed(lease)  # Some other lease got no answer.
                else:
                    watched.try_again_or_give_up(lease, error)
        except Exception as error:
            if len(pairs) == 1 or clock.now() > began + step:
                logger.exception("heartbeat: %d leases not renewed, trying again: unexpected error", len(leases))
                for watched, lease in pairs:
                    watched.try_again_or_give_up(lease, error)
                return
            # One of the leases may be the cause, and must not end the others.
            middle = len(pairs) // 2
            self._renew(pairs[:middle], began)
            self._renew(pairs[middle:], began)
        else:
            self.server_watch.answered()
            for (watched, lease), ours in zip(pairs, renewed, strict=True):
                if ours:
                    watched.renewed(lease)
                else:
                    watched.lose(lease, GONE)

    def _ask_about(self, key: str) -> None:
        """Have the store write a record that nobody reads, where it keeps those of this key: a server that only reads,
        or is out of memory, does not grant locks. Raises `LockUnavailable`.
        """
        nobody = Holder(sending=new_owner())
        self._store.refuse(key, nobody, Record(nobody.message, b"", ASKED_FOR))

    def _under_watch(self) -> list[Watched]:
        """The leases that are still to be renewed."""
        return [watched for watched in list(self.watched.values()) if watched.give_up_at < math.inf]

    def _renew_for(self, lease: Lease, ttl: float) -> bool:
        if lease.reason is not None:
            return False
        asked, bound, good_for = lease.asked_for(ttl), lease.bound, lease.good_for
        # From now on, the server may carry it out, whatever happens to the answer.
        lease.doubt(ttl, asked.acquired_at)
        with pulse.mutex:
            if (watched := self.watched.get(lease.owner)) is not None:
                pulse.follow(self, watched.next_at(under_way=True))  # It may be lost sooner than it was due before.
        # A longer step than in a round: nobody else waits, and a lease that becomes overdue meanwhile is given up.
        step = min(trust.MAX_STEP, max(good_for, ttl) * trust.OWN_STEP_SHARE)
        (ours,) = self._store.renew([asked], timeout=step)
        if ours:
            lease.become(asked, min(bound, asked.bound))
        else:
            lease.lose(GONE)
        return lease.reason is None

    def _ask(self, lease: Lease) -> None:
        """Ask for an overdue lease, in the thread that runs under it: it goes on only if the lock is still held."""
        step, mine = trust.step_of([lease.good_for]), object()
        try:
            if not self._take(lease.owner, mine, step):
                lease.lose("it is overdue, and a renewal on its way has no answer yet")
            elif lease.reason is None and lease.remaining <= 0:  # Otherwise a renewal under way has settled it.
                self._renew_overdue(lease, step)
        finally:
            with pulse.mutex:
                self._give_back(lease.owner, mine)

    def _renew_overdue(self, lease: Lease, step: float) -> None:
        try:
            (ours,) = self._store.renew([lease], timeout=step)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is unknown whether the lock is held
            lease.lose(f"it is overdue, and could not be renewed: {error}")
        else:
            if not ours:
                lease.lose(GONE)

    def _take(self, owner: str, mine: object, timeout: float | None = None) -> bool:
        """Wait until no renewal of this lease is under way, and keep others away; False if that takes too long.

        An interruption (by a time limit, a signal) may come when the lease is already taken: always call `_give_back`.
        """
        with pulse.mutex:
            if not pulse.given_back.wait_for(lambda: owner not in self.taken, timeout):
                return False
            if (watched := self.watched.get(owner)) is not None:
                watched.asks(clock.now())
            self.taken[owner] = mine
            return True

    def _give_back(self, owner: str, mine: object) -> None:
        """Undo `_take`, under the mutex; does nothing if the lease was not taken."""
        if self.taken.get(owner) is mine:
            del self.taken[owner]
            pulse.given_back.notify_all()
