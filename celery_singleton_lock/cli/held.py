"""A lock that is held, as the commands show it: to people, and with `--json` to programs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock import clock
from celery_singleton_lock.keys.key import name_in
from celery_singleton_lock.stores.base import Held

#: What the columns of a table are called.
COLUMNS = ("KEY", "HOLDER", "NODE", "PID", "HELD FOR", "EXPIRES IN", "WAITERS")


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that is held.

    Attributes:
        key: the whole key.
        held: by whom.
        held_for: seconds since it was asked for; None where a stranger wrote the value.
    """

    key: str
    held: Held
    held_for: float | None

    @classmethod
    def of(cls, key: str, held: Held) -> HeldLock:
        """As it is now."""
        since = held.holder.since if held.holder else None
        return cls(key, held, None if since is None else round(max(clock.wall() - since, 0.0), 3))

    @property
    def place(self) -> tuple[str, str, int]:
        """What it is of (a task's name, or "beat:" and a schedule's), its key, and its slot of a semaphore."""
        return name_in(self.key), self.key, self.held.slot or 0

    @property
    def name(self) -> str:
        """What it is of."""
        return self.place[0]

    @property
    def slot(self) -> int:
        """Of a semaphore."""
        return self.place[2]

    @property
    def expires_in(self) -> float | None:
        """Seconds, unless it is renewed; None where it never does, because a stranger wrote it so."""
        return None if math.isinf(self.held.remaining) else round(self.held.remaining, 3)

    @property
    def ttl(self) -> float | None:
        """Seconds that each renewal is good for; None where it is not renewed, as between two attempts."""
        return (self.held.holder.ttl or None) if self.held.holder else None

    @property
    def scope(self) -> str | None:
        """When the lock is held, as `lock_scope` says; None where no task holds it."""
        return "while_executing" if self.held.holder and self.held.holder.task_id else None

    def fields(self) -> dict[str, Any]:
        """For programs. Seconds everywhere; what is not known is null, and a pid of 0 where nobody runs."""
        holder = self.held.holder
        return {
            "key": self.key,
            "name": self.name,
            "task_id": holder.task_id if holder else None,
            "node": holder.node if holder else None,
            "pid": holder.pid if holder else 0,
            "held_for": self.held_for,
            "expires_in": self.expires_in,
            "slot": self.slot,
            "ttl": self.ttl,
            "waiters": self.held.waiters,
            "scope": self.scope,
        }

    def cells(self) -> tuple[str, ...]:
        """For people, in the `COLUMNS` of a table."""
        holder = self.held.holder
        return (
            self.key + (f" slot {self.slot}" if self.slot else ""),
            self.holder_in_short(),
            (holder.node if holder else None) or "-",
            str((holder.pid if holder else 0) or "-"),
            "-" if self.held_for is None else duration(self.held_for),
            "never" if self.expires_in is None else duration(self.expires_in),
            str(self.held.waiters),
        )

    def holder_in_short(self) -> str:
        """As it fits into a column."""
        holder = self.held.holder
        if holder is None:
            return "unknown"
        if holder.task_id is not None:
            return holder.task_id if holder.pid else f"{holder.task_id} (kept)"
        return "leader" if self.name.startswith("beat:") else "nobody (kept)"

    def holder_in_words(self) -> str:
        """And where it runs."""
        holder = self.held.holder
        if holder is None or holder.task_id is None:
            who = self.holder_in_short()
        else:
            who = f"task {holder.task_id}" if holder.pid else f"kept for task {holder.task_id}"
        return who if holder is None or holder.node is None else f"{who} on {holder.place}"

    def end_in_words(self) -> str:
        """When it expires."""
        if self.expires_in is None:
            return "never expires"
        renewed = f" unless renewed (ttl {self.ttl:g} s)" if self.ttl else "; nobody renews it"
        return f"expires in {duration(self.expires_in)}{renewed}"


def in_order(locks: Iterable[HeldLock]) -> list[HeldLock]:
    """Sorted by what they are of; each once, though a search may find one twice."""
    once = {lock.place: lock for lock in locks}
    return [once[place] for place in sorted(once)]


def duration(seconds: float) -> str:
    """A time as people say it."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
