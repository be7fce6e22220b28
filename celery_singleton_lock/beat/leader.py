"""Which of several processes leads: the holder of a lease.

Nothing renews the lease in the background. The leader must renew it often enough itself, so a leader that hangs does
not lead forever. The others wait, and are woken when it resigns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from celery.utils.log import get_logger

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Waiter
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.watched import GONE

logger = get_logger(__name__)

#: Seconds between two tries while the lock server does not answer.
RETRY_AFTER = 1.0

#: How many owner tokens that were given up are remembered, the latest; the store undoes their requests.
GIVEN_UP = 8

#: Seconds after which a waiting candidate asks again, whatever it knows: less than the wait for a wake-up. In between,
#: the program around it can see whether it should stop.
ASK_AFTER = 4.0


class Leadership:
    """A candidate for a lease of this key. Used by one thread; `name` is the schedule's name, for messages."""

    def __init__(self, store: Store, key: str, name: str, *, ttl: float, holder: Holder) -> None:
        self._store = store
        self._key = key
        self._name = name
        self._ttl = ttl
        self._holder = holder
        self._owner = new_owner()
        #: Owner tokens whose request was not answered; they may still get the lease when the server wakes up.
        self._given_up: deque[str] = deque(maxlen=GIVEN_UP)
        self._lease: Lease | None = None
        #: How often this candidate has become the leader.
        self.term = 0
        self._renews_at = 0.0
        #: The beat that leads, and when its lease ends unless it is renewed.
        self._leader: Held | None = None
        self._ends_at = 0.0
        self._waiter: Waiter | None = None

    @property
    def holds(self) -> bool:
        """Whether the lease can be trusted; does not ask the lock server."""
        return self._lease is not None and self._lease.held

    @property
    def on_standby(self) -> bool:
        """Whether another beat leads, as far as this one knows."""
        return self._leader is not None

    @property
    def renews_in(self) -> float:
        """Seconds until the lease must be renewed."""
        return max(self._renews_at - clock.now(), 0.0)

    def lead(self, patience: float) -> bool:
        """Whether this candidate leads now; renews the lease if that is due.

        Args:
            patience: the longest wait in seconds while another candidate leads; a silent server can add a few more.
        """
        if self._lease is not None:
            self._keep(self._lease)
        if self._lease is None:
            self._stand(patience)
        return self.holds

    def resign(self) -> None:
        """Stop leading, so that another candidate can lead at once. If a signal interrupts this, call it again."""
        self._stop_waiting()
        if self._lease is not None:
            self._free(self._lease)
        self._owner = new_owner()
        self._take_back()

    def _free(self, lease: Lease) -> None:
        self._given_up.append(lease.owner)  # Until it is freed: the next call takes it back.
        self._lease = None
        try:
            self._store.free(lease)
            logger.info("beat: resigned as leader of schedule %s", self._name)
        except LockUnavailable as error:
            logger.warning("beat: could not resign; the next leader takes over in %.1f s: %s", lease.remaining, error)
        self._is_settled(lease.owner)

    def _keep(self, lease: Lease) -> None:
        if self.renews_in > 0 and lease.held:
            return
        try:
            (ours,) = self._store.renew([lease], timeout=trust.step_of([lease.good_for]))
        except LockUnavailable as error:
            if lease.held:
                logger.warning("beat: could not renew the lease, trying again: %s", error)
                self._renews_at = clock.now() + min(RETRY_AFTER, self._ttl * trust.RETRY_SHARE)
                return
            self._lose(f"it could not be renewed in time: {error}")
        else:
            if not ours:
                self._lose(GONE)
            self._renews_at = trust.renewed_at(lease.trusted_until, self._ttl)

    def _lose(self, reason: str) -> None:
        logger.warning("beat: no longer leads schedule %s: %s", self._name, reason)
        if self._lease is not None:
            # A renewal that was not answered may be carried out later, and keep the others waiting. So may a node of a
            # Redlock that still has the lease when most nodes have lost it.
            self._given_up.append(self._lease.owner)
        self._lease, self._owner = None, new_owner()

    def _take_back(self) -> None:
        """If the server answers, free what this candidate requested and gave up, so that nobody waits for it."""
        while self._given_up:
            owner = self._given_up[-1]
            answer = self._store.abandon(Hold(self._key, owner, ttl=self._ttl))
            self._is_settled(owner)
            if answer is None:
                return

    def _is_settled(self, owner: str) -> None:
        """The store frees what this owner has, or repeats that until the server answers."""
        with suppress(ValueError):  # A signal's handler has settled it meanwhile.
            self._given_up.remove(owner)

    def _stand(self, patience: float) -> None:
        """Ask to lead; while another candidate leads, wait for its lease."""
        request = LockRequest(self._key, self._owner, ttl=self._ttl, holder=self._holder, waiting=True)
        if self._waiter is None:
            asked = replace(request, given_up=tuple(self._given_up))
            if self._leads_by(lambda: self._store.acquire(asked)):
                return
            self._waiter = self._store.waiter(request).__enter__()
        waiter, seconds = self._waiter, trust.seconds_until_over(self._ends_at - clock.now())
        self._leads_by(lambda: waiter.wait(max(min(patience, seconds, ASK_AFTER), 0.001)))

    def _leads_by(self, ask: Callable[[], Lease | Held | Record]) -> bool:
        """Whether this candidate leads now, by the store's answer."""
        found, why = self._found(ask), "resigned" if clock.now() < self._ends_at else "let its lease end"
        if isinstance(found, Held) and found.holder is not None and process_identity.is_over(found.holder.process):
            # It ran on this host and is gone: no need to wait for the end of its lease.
            self._store.free(found.hold(self._key, ttl=self._ttl))
            found, why = self._found(ask if self._waiter is None else self._waiter.ask), "was killed"
        if isinstance(found, Held):
            self._stand_by(found)
            return False
        self._stop_waiting()
        self.term += 1
        after = f", after {_in_words(self._leader)} {why}" if self._leader else ""
        logger.info("beat: leads schedule %s (fence %d)%s", self._name, found.fence, after)
        self._leader = None
        return True

    def _found(self, ask: Callable[[], Lease | Held | Record]) -> Lease | Held:
        """The store's answer; if it is a lease, this candidate leads."""
        self._given_up.append(self._owner)  # Until the lease is noted: a signal may come at any line.
        try:
            found = ask()
        except BaseException as error:
            self._owner = new_owner()
            self._stop_waiting(error)
            raise
        assert isinstance(found, (Lease, Held))  # noqa: S101 - the request did not ask for records
        if isinstance(found, Lease):
            self._lease, self._renews_at = found, trust.renewed_at(found.trusted_until, self._ttl)
        self._given_up.clear()
        return found

    def _stand_by(self, leader: Held) -> None:
        if self._leader is None or self._leader.owner != leader.owner:
            logger.info("beat: on standby; %s leads schedule %s", _in_words(leader), self._name)
        self._leader, self._ends_at = leader, clock.now() + leader.remaining

    def _stop_waiting(self, error: BaseException | None = None) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.__exit__(type(error) if error else None, error, None)


def _in_words(leader: Held) -> str:
    holder = leader.holder
    return "another beat" if holder is None else holder.place
