"""What a lock store is asked, and what it answers.

acquire gives a `Lease`, `Held` when somebody else has the lock, or a `Record` when the message has been carried out;
only a lease is trusted. A store never guesses: "not held" is an answer, "no answer" is `LockUnavailable`. Every call
may be repeated: acquiring twice with one owner gives the same hold, and a lock that is gone when it is freed *again*
was freed.

A missing answer is not a "no": the request may be carried out later. A caller that does not ask again gives the owner
up (`abandon`), and its successor names that owner (`LockRequest.given_up`). From then on, no late request of that owner
takes the lock.

Protocol: `docs/protocol.md`, sections 2 and 6.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from celery_singleton_lock.errors import LockConflict
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease

#: The most owners that a request names as given up, the latest ones.
MAX_GIVEN_UP = 16


def order_of(task: str) -> str:
    """A name for the order of a task's messages (see `Arrival`)."""
    return hashlib.blake2b(task.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message's place in the order of its key, of which only the newest message runs: the last one that came.

    Attributes:
        number: the number that it got when it came, as far as the caller knows; the higher, the newer. The store
            knows better, if it has not forgotten.
        seconds: how long the store keeps the order after this request, at least.
        task: whose messages these are; those of another task under the same lock are other work, in another order.
        stops: the lock's holder is to stop for it, if the holder names this order (`Holder.order`); a lock that is
            kept for an older message, which no process runs, goes to this one at once.
    """

    number: int | None
    seconds: float
    task: str = ""
    stops: bool = False

    @property
    def order(self) -> str:
        return order_of(self.task)


# Only the store changes a request once it is made, and only what it notes.
@dataclass(slots=True, unsafe_hash=True)
class LockRequest:
    """A request for a lock, by any caller and however often.

    Attributes:
        key: the lock.
        owner: see `holder.new_owner`; the same owner acquires again what it already holds. A store on several servers
            changes it if a try has failed: the lease says who has the lock.
        ttl: seconds.
        holder: kept beside the owner, for others that find the lock held.
        waiting: the caller will wait (see `Store.waiter`) if the lock is held: freeing it has to wake somebody. Leaving
            the queue ends the owner; without this, an answer that is not a lease does, if a try was not answered.
        since: since when the caller waits, seconds since the epoch: its place in the queue; 0: since it first asks. One
            that is not `waiting` gets no place, but leaves a free lock to those that have waited for longer; 0: to
            nobody.
        check_finished: first look whether the holder's message has been carried out.
        limit: how many may hold the key at once, but never two for one sending. Whatever is held counts, also what was
            taken under another limit.
        given_up: owners that have asked for this before and are not to have it: what they hold is free, and their late
            requests take nothing.
        arrival: the place of the holder's message in an order: it does not get the lock once a newer message has come.
            None if the order does not matter.
        another: gives the owner of the next try, and notes it for the caller. None if others know the owner already,
            and may have the lock under it: then nothing is undone, and a store on several servers tries once.
        late: whether a try of this owner may still be carried out; noted by the store.
        name, member: the waiter's name, and the one under which it is in the queue; noted by the store.
    """

    key: str
    owner: str
    ttl: float
    holder: Holder
    waiting: bool = False
    since: float = field(default=0.0, compare=False)
    check_finished: bool = False
    limit: int = 1
    given_up: Sequence[str] = ()
    arrival: Arrival | None = None
    another: Callable[[], str] | None = field(default=new_owner, compare=False, repr=False)
    late: bool = field(default=False, compare=False, repr=False)
    name: str = field(default="", compare=False, repr=False)
    member: str = field(default="", compare=False, repr=False)

    def give_up(self, another: str) -> None:
        """Ask as another owner from now on, and for nothing as this one."""
        self.given_up = (*self.given_up, self.owner)[-MAX_GIVEN_UP:]
        self.owner, self.late = another, False

    def hold(self) -> Hold:
        """The hold that the owner may have got, as far as is known without an answer."""
        return Hold(self.key, self.owner, ttl=self.ttl, limit=self.limit)

    def lease(self, *, fence: int, sent_at: float) -> Lease:
        """The lease that the owner has got."""
        return Lease(self.key, self.owner, ttl=self.ttl, fence=fence, sent_at=sent_at, limit=self.limit)


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to an acquire that found the lock taken.

    Attributes:
        holder: who has it; None if this package did not write the value.
        owner: the hold's owner; '' if nobody has it, and it is left to a waiter that has waited for longer.
        remaining: seconds until the lease ends unless it is renewed; infinite for a key without an expiry: a
            stranger's, or one from which somebody removed it (PERSIST).
        waiters: how many wait for the lock, as far as a store reports that: an `Inspector` does, an acquire does not.
        fence: its fencing token, as far as a store reports that.
        arrived: the number of the request's message in the order of its key (see `Arrival`), if it is the newest.
        shared: whether others may hold it, too, as far as a store reports that.
    """

    holder: Holder | None
    owner: str
    remaining: float
    waiters: int = 0
    fence: int | None = None
    arrived: int | None = None
    shared: bool = False

    def hold(self, key: str, *, ttl: float, limit: int = 1) -> Hold:
        """The hold to free in the holder's stead."""
        return Hold(key, self.owner, ttl=ttl, limit=limit)

    def conflict(self, key: str) -> LockConflict:
        """The error that names it."""
        holder = self.holder or Holder()
        return LockConflict(key, holder.task_id if self.owner else "", self.remaining, label=holder.label)


@dataclass(frozen=True, slots=True)
class Superseded(Held):
    """The answer to an acquire whose message is not the newest of its key any more: it is never to run.

    The other fields say who has the lock meanwhile; owner '' if nobody has.

    Attributes:
        by: the id of the newest message, if it has one.
    """

    by: str | None = None


class Record(NamedTuple):
    """What is remembered of a finished message, for the other copies of it.

    Attributes:
        message: see `Holder.message`.
        content: for its reader; a store does not look into it.
        seconds: how long it is kept; for a record that was found, how much longer.
    """

    message: str
    content: bytes
    seconds: float

    def after(self, seconds: float) -> Record | None:
        """The record to leave that many seconds later; None if it is over by then.

        The content stays as it is: its remaining time shows how old it is.
        """
        return self._replace(seconds=self.seconds - seconds) if seconds < self.seconds else None


@dataclass(frozen=True, slots=True)
class Reservation:
    """A hold kept for the next attempt of a task.

    Attributes:
        holder: whose message it is.
        seconds: how long the lock waits for it.
    """

    holder: Holder
    seconds: float

    def after(self, seconds: float) -> Reservation | None:
        """The reservation to leave that many seconds later; None if it is over by then."""
        return replace(self, seconds=self.seconds - seconds) if seconds < self.seconds else None


class Freeing(IntEnum):
    """What became of a hold that was to be freed; true if it is over, and was held as far as is known."""

    #: It was not held any more.
    NOT_OURS = 0
    #: It was held until now, whatever its holder believed.
    NOW = 1
    #: It was gone when freeing was repeated, or nodes did not answer: it was freed before, unless it was lost before.
    UNCLEAR = 2
