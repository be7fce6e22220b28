"""A store with everything that this package needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record, Reservation, Waiter
from celery_singleton_lock.stores.inspector import Inspector
from celery_singleton_lock.stores.journal import Journal
from celery_singleton_lock.stores.ledger import Ledger
from celery_singleton_lock.stores.wake_ups import WakeUps


class Store(Inspector, Protocol):
    """Keeps locks, shows them, and keeps what beat and the journal write. Safe to share between threads, and to use on
    both sides of a fork.

    One of several servers keeps neither slots nor an order: there, a request's limit is 1, and its arrival None.
    """

    @property
    def server(self) -> str:
        """The lock server as messages show it, without a password."""

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        """Take the lock if it is free, or reserved for this holder's message, for `ttl` seconds.

        Raises:
            LockUnavailable: no answer, or an error. The owner may have the lock, or get it; that is undone when the
                server answers, unless the process ends before. Ask again with another owner, and give this one up.
        """

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        """Give each hold its whole ttl again, in one round trip; False for those that are no longer held. A store that
        keeps the order of messages reports for which task a holder is to stop (`Hold.superseded_by`).

        A hold may say that it is not to last for less than it does (`Hold.only_longer`).

        Args:
            holds: the holds to renew; leases among them are trusted anew by this call.
            timeout: seconds that each step (connect, read) may take; there is no second try here, except that a broken
                connection is replaced.

        Raises:
            LockUnavailable: no answer, or an error; nothing is known about any of them.
        """

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> Freeing:
        """Free the lock if it is still held, and wake a waiter.

        Args:
            hold: what to end.
            record: remembered in any case, even if the lock is no longer held.
            reservation: keeps the lock for one message instead of freeing it for everybody.

        Returns:
            What became of it.

        Raises:
            LockUnavailable: no answer, or an error. The call is repeated in the background until it is answered, or
                the process ends; the lock is free when its lease ends.
        """

    def abandon(self, hold: Hold) -> bool | None:
        """Free the lock if it is still held, for an owner that never asks again: its late requests take nothing.

        Never raises. Without an answer, the call is repeated in the background, as for `free`.

        Args:
            hold: the owner's hold; it need not be known whether it ever had the lock.

        Returns:
            Whether it had the lock; None if there is no answer yet.
        """

    def remember(self, key: str, record: Record) -> None:
        """Remember a message whose end somebody else has found, and free nothing.

        Never raises, and asks each server once at most, for two seconds or so in all. Without an answer, the call is
        repeated in the background, as for `free`.
        """

    def refuse(self, key: str, holder: Holder, record: Record, *, limit: int = 1) -> Held | Record | None:
        """Remember that a message is not carried out, unless it is being, or was, carried out.

        Of two copies one ends the message: from then on the others find its record. A repeated call whose record is
        already there finds its own.

        Args:
            key: the lock.
            holder: whose message it is.
            record: of the message.
            limit: see `LockRequest`.

        Returns:
            None when it was recorded; `Held` when another copy of the message has the lock, or it is reserved for one;
            a `Record` when it was carried out, or refused with other content.

        Raises:
            LockUnavailable: no answer, or an error; it may be recorded later.
        """

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        """Replace records that are there, each under its key, by shorter ones; those that are gone stay gone.

        Raises:
            LockUnavailable: no answer, or an error; some may be replaced. Or a call that leaves a record is yet to be
                repeated (see `free`).
        """

    def waiter(self, request: LockRequest) -> Waiter:
        """A place in the queue, for an acquire that found the lock held."""

    def close(self) -> None:
        """Give back the store's resources (connections); it opens them again when used."""

    def recorded(self, key: str, message: str) -> Record | None:
        """What is remembered of a message (see `Holder.message`); None if there is nothing.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def wake(self, key: str) -> None:
        """Wake a waiter as if the lock were freed, whether it is or not. Never raises: a waiter that is not woken looks
        by itself.
        """

    def ledger(self, key: str) -> Ledger:
        """What beat has sent, under keys that begin with `key`."""

    def wake_ups(self) -> WakeUps | None:
        """What wakes a process for many locks, not connected yet; None if nothing does."""

    def journal(self, prefix: str, *, size: int) -> Journal:
        """The journal of all locks whose key begins with `prefix`; `size`: entries that are kept."""
