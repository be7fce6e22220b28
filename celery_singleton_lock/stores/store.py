"""What a store promises: locks, and a look at them; and for some, the history of all messages (`Journal`), and what
beat has sent (`Ledger`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.waiters import Mailbox, Waiter

#: The most records that a `KeyState` shows.
MOST_RECORDS = 100


@dataclass(frozen=True, slots=True)
class KeyState:
    """All that a store has of one key.

    Attributes:
        held: its holders, the first to take it first.
        fence: the last fencing token that was given out; None if there was none, or it is forgotten.
        waiters: how many wait for it.
        records: the records of messages that are over, the latest first; at most `MOST_RECORDS`, and only the
            beginning of each.
    """

    held: tuple[Held, ...]
    fence: int | None
    waiters: int
    records: tuple[Record, ...]


class Inspector(Protocol):
    """Looks at locks, and changes nothing.

    All methods raise `LockUnavailable` if there is no answer, or an error.
    """

    def held(self, key: str) -> list[Held]:
        """The holders of the key now."""

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        """The locks that are held, with their keys: those whose key begins with `prefix` and a colon."""

    def inspect(self, key: str) -> KeyState:
        """All that there is of one key, whatever its limit. Looks through all keys of the server."""


#: The most keys of which a journal knows how often in a row a copy was refused; with more, it starts afresh.
KEYS_REMEMBERED = 10_000


class Journal(Protocol):
    """What became of the copies of all messages, and how often. With several nodes, each has a part.

    All methods raise `LockUnavailable` if there is no answer, or an error; what `write` was given may then be written.
    """

    def write(self, counts: Mapping[str, int], entries: Sequence[Entry], *, now: float) -> Sequence[int]:
        """Add to the counts, and to the entries, of which the oldest are forgotten.

        Args:
            counts: by how much each has grown; its names are the caller's.
            entries: what to add.
            now: the present on the clock of their times; readers get them on the server's.

        Returns:
            For each entry, how many copies were refused since a run ended under the key; 0 for other entries.
        """

    def counts(self) -> dict[str, int]:
        """All counts."""

    def entries(self, *, since: float) -> Iterator[Entry]:
        """The entries since then, in the order of writing; seconds since the epoch, by the server's clock."""

    def refused(self) -> dict[str, int]:
        """How many copies were refused in a row, by the key of the lock."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why this beat must not send a tick.

    Attributes:
        last: the entry's last run now, if the tick was sent; None if somebody else is about to send it.
        remaining: seconds until the other claim ends.
        claimer: whose claim it is; empty if that is not known.
    """

    last: int | None
    remaining: float
    claimer: str = ""


#: Seconds for which a ledger still knows the last run of a removed entry: another beat, with the previous schedule, may
#: only now ask for a tick that was sent.
MEMORY = 300.0


class Ledger(Protocol):
    """What beat has sent: the last run of each entry of a schedule, in microseconds since the epoch.

    Every call may be repeated, and may have been carried out for some of the entries when it raises. Each takes a
    `ceiling`: a later time is not believed, but taken for what a wrong clock has left. All methods raise
    `LockUnavailable` if there is no answer, or an error.
    """

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        """The last run of each entry; for an entry that is not known yet, the one that is given here.

        That one is known from then on, unless it is 0. Entries that are not given are forgotten: an entry that comes
        back begins anew, but no tick of it that was sent is sent again, for `MEMORY`.
        """

    def lasts(self) -> dict[str, int]:
        """The last run of each known entry; for people, and changes nothing."""

    def claim(self, entry: str, last: int, owner: str, *, ttl: float, ceiling: int) -> Refused | None:
        """Ask to send the tick of an entry that follows its last run.

        Args:
            entry: its name.
            last: the last run from which the tick follows.
            owner: whose claim it is; it may claim again.
            ttl: seconds after which somebody else may send it, unless it was recorded as sent.
            ceiling: see above.

        Returns:
            Why it is refused; None if it is not.
        """

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        """Record the last run of each entry; 0 for an entry that was claimed and not sent."""

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        """End this owner's claims for some entries, for good: its late claims do not count.

        For a claim that was not answered, since it may be carried out at any time.
        """


class Place(NamedTuple):
    """A process's place in the line of a lock: that of its first copy.

    Attributes:
        key: the lock's key.
        name: see `Mailbox.expect`.
        since: when its message first met a conflict, seconds since the epoch.
        copies: how many copies wait there.
        limit: how many may hold the lock at once.
    """

    key: str
    name: str
    since: float
    copies: int
    limit: int


class Store(Inspector, Protocol):
    """Keeps locks, shows them, and keeps what beat and the journal write. Safe to share between threads, and to use on
    both sides of a fork.

    One of several servers has no semaphores and no order: there, a request's limit is 1, and its arrival None.
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
            timeout: seconds that each step (connect, read) may take; there is no second try here.

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

    def refuse(self, key: str, holder: Holder, record: Record) -> Held | Record | None:
        """Remember that a message is not carried out, unless it is being, or was, carried out.

        Of two copies one ends the message: from then on the others find its record. A repeated call whose record is
        already there finds its own.

        Args:
            key: the lock.
            holder: whose message it is.
            record: of the message.

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

    def place_of(self, key: str) -> Hashable:
        """The server of a key, as far as is known; the same for keys about which nobody answers if it is silent. Asks
        nobody.
        """

    @property
    def mailbox(self) -> Mailbox:
        """Wakes the waiters of this process."""

    def waiter(self, request: LockRequest) -> Waiter:
        """A place in the queue, for an acquire that found the lock held."""

    def look(self, places: Sequence[Place]) -> list[int]:
        """Take these places, again and again as long as the process is in line.

        Returns:
            For each, how many of its copies may begin: there is room, and nobody who is there has waited for longer;
            negative if there is room, and somebody has.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def close(self) -> None:
        """Give back the store's resources (connections); it opens them again when used."""

    def recorded(self, key: str, message: str) -> Record | None:
        """What is remembered of a message (see `Holder.message`); None if there is nothing.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def wake(self, key: str, leaves: str = "") -> bool:
        """Wake the first waiter as if the lock were freed, whether it is or not. Never raises: a waiter that is not
        woken looks by itself.

        Args:
            key: the lock.
            leaves: the name of a waiter that leaves its place before that.

        Returns:
            Whether somebody is woken, as far as is known.
        """

    def leave(self, key: str, name: str) -> None:
        """Give up a waiter's place; if it was woken, and has not asked since, the next one is woken. Never raises."""

    def ledger(self, key: str) -> Ledger:
        """What beat has sent, under keys that begin with `key`."""

    def journal(self, prefix: str, *, size: int) -> Journal:
        """The journal of all locks whose key begins with `prefix`; `size`: entries that are kept."""
