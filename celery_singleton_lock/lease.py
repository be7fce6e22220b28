"""A lease: the right to run under a key until a moment on this host's clock.

The holder trusts its lease from before the command that took or renewed it was *sent*, not from the answer: the server
counts from some moment in between, so the holder always stops trusting first. What clocks may differ in rate over one
lease is taken off as well (1 % and 2 ms, as the Redlock description has it).
"""

from __future__ import annotations

import binascii
import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.errors import LockConflict, LockLost

#: Characters of an owner: 128 random bits in hex, so that every script finds it by position.
OWNER_LENGTH = 32

#: Characters of an owner that are the same in each attempt to get a majority of a Redlock.
PERSON = 28

_encode = json.JSONEncoder(separators=(",", ":")).encode

#: Messages that a `Sight` shows at most.
MARKS = 100

#: The attempt (see `Holder.attempt`) of a message that is no retry and no replacement.
FIRST = (0, 0)

#: Parts of a holder beside an owner.
_FIELDS = 9

#: In the place of `Holder.replaced`: no message has this number, so that none takes the lock for its own.
NOBODY = -1


def _hash_tag(key: str) -> str | None:
    """The part of a key that says in which slot of a cluster it is; None where all of it does."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return tag if opened and closed and tag else None


def _slot_of(text: str) -> int:
    return binascii.crc_hqx(text.encode("utf-8", "surrogatepass"), 0) % 16384


@lru_cache(maxsize=1024)
def _tag_of_slot(slot: int) -> str:
    """A text that is in this slot of a cluster."""
    return next(text for text in map(str, itertools.count()) if _slot_of(text) == slot)


class Name(str):
    """The key of a lock outside of tasks: the lock is at this very key, as that of `redis.lock.Lock` is.

    Attributes:
        base: what the keys beside it begin with; in the same slot of a cluster.
    """

    __slots__ = ("base",)

    base: str

    def __new__(cls, name: str) -> Name:
        """Make it of a name."""
        made = super().__new__(cls, name)
        if _hash_tag(name) is not None:
            made.base = name
        elif name and "}" not in name:
            made.base = f"{{{name}}}"
        else:
            made.base = f"{{{_tag_of_slot(_slot_of(name))}}}{name}"
        return made


def new_owner() -> str:
    """A random owner: new for every delivery of a message, since a redelivery has the same task id."""
    return secrets.token_hex(OWNER_LENGTH // 2)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock; for people, and to tell a redelivery from another task.

    Attributes:
        task_id: the id of the task, None outside of one.
        retries: how often the task was retried before.
        node: the worker's node name.
        pid: the process that runs it.
        since: seconds since the epoch.
        replaced: how often `Task.replace` passed the task's id on before.
        process: see `process_identity.own`.
        ttl: seconds that each renewal of the lease is good for; 0 where it is not renewed, as between two attempts, and
            for a holder that does not hold it yet.
        sending: the name of the sending that the message belongs to, see `identity`; by default the task's id. Copies
            of one message have the same, and no other message has.
        record: the name of what is remembered of the message; by default its sending.
    """

    task_id: str | None = None
    retries: int = 0
    node: str | None = None
    pid: int = 0
    since: float = 0.0
    replaced: int = 0
    process: str = ""
    ttl: float = field(default=0.0, compare=False)
    sending: str = ""
    record: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.sending and self.task_id is not None:
            object.__setattr__(self, "sending", self.task_id)

    @property
    def attempt(self) -> tuple[int, int]:
        """Which of the messages of its sending it is; a later one is greater. Copies of one message are equal."""
        return self.replaced, self.retries

    @property
    def message(self) -> str:
        """A name for the message, the same for each copy of it."""
        return f"{self.record or self.sending}:{self.replaced}.{self.retries}"

    def is_copy_of(self, other: Holder) -> bool:
        """Whether both carry out messages of one sending."""
        return self.sending != "" and self.sending == other.sending

    def dumps(self, ttl: float = 0.0) -> str:
        """As it stands beside the owner in the value of a lock that it holds with this ttl."""
        beginning = [self.sending, self.task_id, self.retries, self.node, self.pid, self.since]
        return _encode([*beginning, self.replaced, self.process, ttl])

    @classmethod
    def loads(cls, text: str | bytes) -> Holder | None:
        """The holder as written by `dumps`; None when somebody else wrote it."""
        fields = cleaned.array(text)
        if fields is None or len(fields) < _FIELDS:
            return None
        # What a later version may add stands behind.
        sending, task_id, retries, node, pid, since, replaced, process, ttl = fields[:_FIELDS]
        return cls(
            cleaned.text_or_none(task_id),
            cleaned.count(retries),
            cleaned.text_or_none(node),
            cleaned.count(pid),
            cleaned.seconds(since),
            replaced if replaced == NOBODY else cleaned.count(replaced),
            cleaned.text(process),
            cleaned.seconds(ttl),
            cleaned.text(sending),
        )


def heir_of(holder: Holder) -> str:
    """The owner under which a lock is kept for `holder`'s message between two attempts of a task."""
    return hashlib.sha256(f"heir:{holder.message}".encode()).hexdigest()[:OWNER_LENGTH]


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to an acquire that found the lock taken.

    Attributes:
        holder: who has it; None when the value is not one that this package wrote.
        owner: of the hold.
        remaining: seconds until the lease ends unless it is renewed; infinite for a key without an end,
            a stranger's or one that somebody took it from (PERSIST).
        slot: where in a semaphore that is; None when it was not told.
        waiters: how many wait for the lock, as far as a store tells that: a look does, an acquire does not.
    """

    holder: Holder | None
    owner: str
    remaining: float
    slot: int | None = None
    waiters: int = 0

    def lease(self, key: str, *, ttl: float, limit: int = 1) -> Lease:
        """The hold, for those who free it in the holder's stead."""
        return Lease(key, self.owner, ttl=ttl, fence=0, sent_at=clock.now(), limit=limit, slot=self.slot)

    def conflict(self, key: str) -> LockConflict:
        """The error that tells about it."""
        return LockConflict(key, self.holder.task_id if self.holder else None, self.remaining)


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to an acquire for a message that has been carried out already.

    Attributes:
        record: what was recorded of it, see `Mark`.
        remaining: seconds that it is still remembered.
    """

    record: bytes
    remaining: float


class Mark(NamedTuple):
    """What a release leaves behind for the other copies of a message.

    Attributes:
        message: see `Holder.message`.
        record: for whoever finds it; a store does not look into it.
        seconds: how long it is kept.
    """

    message: str
    record: bytes
    seconds: float

    def after(self, seconds: float) -> Mark | None:
        """What is left to be said so many seconds later; None if that is over.

        The record stays as it is: whoever finds it sees by its remaining time how old it is.
        """
        return self._replace(seconds=self.seconds - seconds) if seconds < self.seconds else None


@dataclass(frozen=True, slots=True)
class Sight:
    """All that a store has of one key.

    Attributes:
        holds: by whom it is held, in the order of the slots.
        fence: the last fencing token that was given out; None when that is forgotten, or there was none.
        waiters: how many wait for it.
        marks: the messages that are remembered as carried out, the latest first, and for how many seconds still; at
            most `MARKS`, and the beginnings of their records.
    """

    holds: tuple[Held, ...]
    fence: int | None
    waiters: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Heir:
    """The next attempt of a task, to which a release passes the lock on.

    Attributes:
        holder: whose message it is.
        seconds: how long the lock waits for it.
    """

    holder: Holder
    seconds: float

    def after(self, seconds: float) -> Heir | None:
        """What is left to be said so many seconds later; None if that is over."""
        return replace(self, seconds=self.seconds - seconds) if seconds < self.seconds else None


class Lease:
    """One execution's hold of a lock.

    Written by the thread that renews it (`extend`, `lose`), read by the one that runs under it; each attribute is
    replaced whole, so neither needs a mutex.

    Attributes:
        key: the key of the lock.
        owner: what tells this hold from every other.
        ttl: seconds that each renewal is good for.
        limit: how many may hold the key at once; each holds another slot of it.
        slot: which one; None where only the owner is known.
        fence: a number that is higher for every later holder of the same key. Let the system that you write to refuse
            a lower one than it has seen, and a stale holder cannot do harm. 0 when no lock is held.
        trusted_until: on `clock.now()`; after it somebody else may hold the lock.
        good_for: seconds for which a renewal is trusted: the ttl, or less (see `doubt`).
        reason: why the lease was lost; None while it is not.
        ending: whether its release was sent, and not answered.
        ask: asks the store whether a lease is still ours, and extends or loses it; set by who renews it.
    """

    __slots__ = (
        *("__weakref__", "_bound", "acquired_at", "ask", "ending", "fence", "key", "limit", "owner"),
        *("pid", "reason", "renewals", "slot", "trusted_until", "ttl"),
    )

    def __init__(
        self, key: str, owner: str, *, ttl: float, fence: int, sent_at: float, limit: int = 1, slot: int | None = None
    ) -> None:
        self.key = key
        self.owner = owner
        self.ttl = ttl
        self.limit = limit
        self.slot = slot
        self.fence = fence
        self.pid = os.getpid()
        self.reason: str | None = None
        self.ask: Callable[[Lease], None] | None = None
        self.ending = False
        self.trusted_until = sent_at
        self._bound = float("inf")
        self.begin(sent_at)

    def __repr__(self) -> str:
        return f"<Lease {self.key} fence={self.fence} remaining={self.remaining:.1f}>"

    @property
    def held(self) -> bool:
        """Whether the lock can still be believed to be ours."""
        return self.reason is None and self.remaining > 0

    @property
    def good_for(self) -> float:
        """Seconds for which a renewal is trusted."""
        return min(self.ttl, self._bound)

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is still trusted; renewals push the end out."""
        return self.trusted_until - clock.now()

    def check(self) -> None:
        """Say so if the lock is lost; costs no round trip while the lease is trusted.

        A process that slept past the end of its lease asks the store: what is still there under our owner was nobody
        else's in between. Nothing stops one that is paused right after this call: where that matters, use `fence`.

        Raises:
            LockLost: the lease ended or was taken.
        """
        if self.reason is None and self.remaining <= 0 and self.ask is not None:
            self.ask(self)
        if not self.held:
            raise LockLost(self.key, self.reason or "the lease ended")

    def begin(self, sent_at: float) -> None:
        """Trust the lease from `sent_at`, when the command that took it was sent."""
        self.acquired_at, self.renewals = sent_at, -1
        self.extend(sent_at)

    def extend(self, sent_at: float) -> None:
        """Trust the lease anew from `sent_at`, when the command that renewed it was sent."""
        self.renewals += 1
        self.trusted_until = _end(sent_at, self.good_for)

    def asked_for(self, ttl: float) -> Lease:
        """The same hold, as it will be if the store gives it another ttl."""
        return Lease(
            *(self.key, self.owner),
            ttl=ttl,
            fence=self.fence,
            sent_at=clock.now(),
            limit=self.limit,
            slot=self.slot,
        )

    def become(self, asked: Lease) -> None:
        """Have the ttl of `asked`, which the store has renewed."""
        self.ttl = asked.ttl
        self.extend(asked.acquired_at)

    def doubt(self, ttl: float, sent_at: float) -> None:
        """Not know whether a renewal with this ttl, sent at that time, was carried out, or will be.

        Whatever came of it, and whenever it comes: the lease lasts for the shorter ttl from its last renewal. As nobody
        knows how late it may come, that holds for every later renewal too.
        """
        self._bound = min(self._bound, ttl)
        self.trusted_until = min(self.trusted_until, _end(sent_at, ttl))

    def lose(self, reason: str) -> None:
        """Trust it no more."""
        self.reason = reason


def _end(sent_at: float, ttl: float) -> float:
    """Until when to trust a lease of so many seconds; less what clocks may differ in rate."""
    return sent_at + ttl - (ttl * 0.01 + 0.002)


def unheld() -> Lease:
    """The lease of an execution that holds no lock: fence 0, never `held`."""
    lease = Lease("", "", ttl=0.0, fence=0, sent_at=0.0)
    lease.lose("this execution holds no lock")
    return lease
