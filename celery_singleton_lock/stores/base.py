"""What a lock store does, whatever it keeps the locks in.

acquire gives a `Lease`, `Held` when somebody else has the lock, or `Done` when the message has been carried out; only a
lease can be renewed or released. A store never guesses: "not ours" is an answer, "no answer" is `LockUnavailable`.
Every call may be repeated: acquiring twice with one owner gives the same hold, and a lock that is gone when its release
is *repeated* was released.

A missing answer is not a "no": what was asked for may be carried out later. Who does not ask again gives the owner up
(`abandon`), and whoever comes in its place says so (`given_up`). From then on nothing that arrives of it takes the
lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.lease import Done, Heir, Held, Holder, Lease, Mark, Sight


class Bell(Protocol):
    """Wakes one waiter for each release, the one that has waited longest first."""

    def __enter__(self) -> Bell: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

    def wait(self, timeout: float) -> None:
        """Return when the lock may be free: woken by a release, or after `timeout` seconds, or now and then.

        The place in the queue is kept until a release has woken this waiter.

        Raises:
            LockUnavailable: no answer, or an error.
        """


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a tick is not ours to send.

    Attributes:
        last: it was sent, and this is the entry's last run now; None if somebody else is about to send it.
        remaining: seconds until the other claim ends.
    """

    last: int | None
    remaining: float


#: Seconds for which a ledger knows the last run of an entry that is gone, when a claim is made: another beat, with the
#: schedule of a moment before, may only now ask for a tick that was sent.
MEMORY = 300.0


class Ledger(Protocol):
    """What beat has sent: the last run of each entry of a schedule, in microseconds since the epoch.

    Every call may be repeated, and may have been carried out for some of the entries when it raises. Each takes a
    `ceiling`: nothing later than that is believed, but taken for what a wrong clock has left. All raise
    `LockUnavailable` if there is no answer, or an error.
    """

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        """The last run of each entry, which is what is given here for those of which nothing is known.

        It is known from then on, unless it is 0. Entries that are not given are forgotten: one that comes back begins
        anew, but a claim for what was sent of it is refused for `MEMORY`.
        """

    def claim(self, lasts: Mapping[str, int], owner: str, *, ttl: float, ceiling: int) -> dict[str, Refused]:
        """Ask to send the tick of each entry that follows its last run; which of them are refused.

        Args:
            lasts: the last runs from which the ticks follow.
            owner: whose claim it is; it may claim again.
            ttl: seconds after which somebody else may send it, unless it was recorded as sent.
            ceiling: see above.
        """

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        """Say which is the last run of each entry now; 0 for one that was claimed and not sent."""

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        """End what this owner has claimed of some entries, for good: a claim of its that comes later is none.

        For a claim that was not answered, since it may be carried out at any time.
        """

    def secret(self) -> str:
        """A text that only those know who can read the lock server; made by whoever asks for it first.

        It is the same for all who ask at different times, until the server loses it. Two that ask at the same time for
        one that is just being made may be told different ones by a Redlock, and are told the same when they ask again.
        """


@dataclass(frozen=True, slots=True)
class Written:
    """What the journal knew as it was written to.

    Attributes:
        now: the server's time, seconds since the epoch.
        in_a_row: for each entry, how many copies were refused since a run ended under the key; 0 for other entries.
        overlaps: for each entry, a run of the same key at the same time; None is as it should be.
    """

    now: float
    in_a_row: Sequence[int]
    overlaps: Sequence[Entry | None]


#: Counts of a journal whose names come from messages.
MAX_LABELS = 500


class Turn(Protocol):
    """A waiter's place in the queue of a lock; leave it (`with`) after the last look."""

    def __enter__(self) -> Turn: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

    def ask(self) -> Lease | Held | Done:
        """What `acquire` finds now. Who asks the store itself loses the answer to `__exit__`, which frees what it does
        not know of.

        Raises:
            LockUnavailable: as for `wait`.
        """

    def wait(self, timeout: float) -> Lease | Held | Done:
        """Wait until a release has woken this waiter, or `timeout` seconds, or a few; what `acquire` finds then.

        The place in the queue is kept until a release has woken this waiter, or its connection is cut.

        Raises:
            LockUnavailable: no answer, or an error, for as long as an acquire is patient.
        """


class Journal(Protocol):
    """What became of the copies of all messages, and how often. Of several nodes each has a part.

    All raise `LockUnavailable` if there is no answer, or an error; what `write` was given may have been written then.
    """

    def write(
        self,
        counts: Mapping[str, int],
        entries: Sequence[Entry],
        *,
        slack: float,
        coarse: Mapping[str, str] | None = None,
    ) -> Written:
        """Add to the counts, and to the entries, of which the oldest are forgotten.

        Args:
            counts: by how much each has grown; its names are the caller's.
            entries: their times are the server's.
            slack: seconds by which these may be wrong: runs that overlap by less are none that do.
            coarse: the counts of which `MAX_LABELS` are kept, those that grew last, and for each the count to which it
                is added when it is given up.
        """

    def counts(self) -> dict[str, int]:
        """All counts."""

    def entries(self, *, since: float) -> Iterator[Entry]:
        """The entries since then, as they were written; seconds since the epoch, on the server's clock."""

    def refused(self) -> dict[str, int]:
        """How many copies were refused in a row, by the key of the lock."""


class Store(Protocol):
    """Keeps locks. Safe to share between threads, and to use on both sides of a fork."""

    @property
    def server(self) -> str:
        """Where the locks are kept, for messages: without a password."""

    def acquire(
        self,
        key: str,
        owner: str,
        *,
        ttl: float,
        holder: Holder,
        waiting: bool = False,
        once: bool = False,
        limit: int = 1,
        given_up: Sequence[str] = (),
    ) -> Lease | Held | Done:
        """Take the lock if it is free, or kept for this holder's message, for `ttl` seconds.

        Args:
            key: the lock.
            owner: see `lease.new_owner`; the same owner acquires again what it already holds.
            ttl: seconds.
            holder: kept beside the owner, for whoever finds the lock held.
            waiting: the caller will wait (see `bell`) if the lock is held, so the release has to wake somebody.
            once: look first whether the holder's message has been carried out.
            limit: how many may hold the key at once, but never two for one sending. Whatever is held counts, also what
                was taken under a higher limit.
            given_up: owners that have asked for this before and are not to have it: what they hold is free, and what
                arrives of them later takes nothing.

        Raises:
            LockUnavailable: no answer, or an error. The owner may have the lock, or get it; that is undone when the
                server answers, unless the process ends before. Ask again with another owner, and give this one up.
        """

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        """Give each lease its whole ttl again, in one round trip; False for those that are no longer ours.

        Args:
            leases: those to renew; their `trusted_until` is moved by this call.
            timeout: seconds that each step (connect, read) may take; there is no second try here, but that a broken
                connection is replaced.

        Raises:
            LockUnavailable: no answer, or an error; nothing is known about any of them.
        """

    def release(self, lease: Lease, *, mark: Mark | None = None, heir: Heir | None = None) -> bool:
        """Free the lock if it is still ours, and wake a waiter; False when it was not.

        Args:
            lease: the hold to end.
            mark: left behind in any case, also when the lock is no longer ours.
            heir: who gets the lock instead of everybody.

        Raises:
            LockUnavailable: no answer, or an error. This is said again in the background until it is answered, or the
                process ends; the lock is free when its lease ends.
        """

    def abandon(self, lease: Lease) -> bool | None:
        """Free the lock if it is still ours, for an owner that never asks again: what arrives of it takes nothing.

        Never raises. What is not answered is said again in the background, as a release is.

        Args:
            lease: of the owner; whether it ever had the lock need not be known.

        Returns:
            Whether it had the lock; None if there is no answer yet.
        """

    def leave_mark(self, lease: Lease, mark: Mark) -> None:
        """Leave the mark of a message whose end somebody else has found, and free nothing.

        Never raises, and asks each server once at most, for two seconds or so in all. What is not answered is
        said again in the background, as a release is.

        Args:
            lease: for its key; of an owner that holds nothing.
            mark: of the message.
        """

    def refuse(self, key: str, holder: Holder, mark: Mark, *, limit: int = 1) -> Held | Done | None:
        """Leave the mark of a message that is not carried out, unless it is being, or was.

        Of two copies one ends the message: from then on the others find it done. A repeated call whose mark is there
        already finds its own.

        Args:
            key: the lock.
            holder: whose message it is.
            mark: of the message.
            limit: as for `acquire`.

        Returns:
            None when it was left; `Held` when another copy of the message has the lock, or it is kept for one; `Done`
            when it was carried out, or refused with another record.

        Raises:
            LockUnavailable: no answer, or an error; it may be left later.
        """

    def settle(self, marks: Sequence[tuple[str, Mark]]) -> None:
        """Replace marks that are there, each under its key, by shorter ones; those that are gone stay gone.

        Raises:
            LockUnavailable: no answer, or an error; some may be replaced.
        """

    def bell(self, key: str) -> Bell:
        """A place in the queue of those who wait for the lock; close it (`with`) after the last look."""

    def turn(
        self,
        key: str,
        owner: str,
        *,
        ttl: float,
        holder: Holder,
        once: bool = False,
        limit: int = 1,
        given_up: Sequence[str] = (),
    ) -> Turn:
        """A place in the queue, for an acquire (with `waiting`) that found the lock held; arguments as for that."""

    def look(self, key: str, *, limit: int = 1) -> list[Held]:
        """Who holds the key now, also beyond the limit.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def holds(self, prefix: str) -> Iterator[tuple[str, Held]]:
        """The locks that are held, with their keys: those whose key begins with `prefix` and a colon.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def sight(self, key: str) -> Sight:
        """All that there is of one key, whatever its limit. Looks through all keys, and so is for people.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def ledger(self, key: str) -> Ledger:
        """What beat has sent, under keys that begin with `key`."""

    def journal(self, prefix: str, *, size: int) -> Journal:
        """The journal of all locks whose key begins with `prefix`; `size`: entries that are kept."""

    def close(self) -> None:
        """Give back what the store holds of the machine (connections); it opens them again when used."""
