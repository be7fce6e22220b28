"""A lock that is held, as the commands show it: to people, and with `--json` to programs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from celery_singleton_lock import clock
from celery_singleton_lock.keys.key import name_in
from celery_singleton_lock.stores.base import Held

#: What the columns of a table are called.
COLUMNS = ("KEY", "HOLDER", "NODE", "PID", "HELD FOR", "EXPIRES IN", "WAITERS")

#: Names of this kind are of beat's schedules.
_BEAT = "beat:"


@dataclass(frozen=True, slots=True)
class Line:
    """A lock that is held. Seconds everywhere.

    Attributes:
        key: the whole key.
        name: what the lock is of: a task's name, or "beat:" and a schedule's.
        task_id: of the task that holds it; None for beat's leader, and where a stranger wrote the value.
        node: the worker or beat that holds it.
        pid: its process; 0 where nobody runs, as between two attempts.
        held_for: since it was asked for.
        expires_in: unless it is renewed; None where it never does, because a stranger wrote it so.
        slot: of a semaphore.
        ttl: that each renewal is good for; None where it is not renewed, as between two attempts.
        waiters: how many wait for it; those that gave up within the last seconds among them.
        scope: when the lock is held, as `lock_scope` says; None where no task holds it.
    """

    key: str
    name: str
    task_id: str | None
    node: str | None
    pid: int
    held_for: float | None
    expires_in: float | None
    slot: int
    ttl: float | None
    waiters: int
    scope: str | None

    @classmethod
    def of(cls, key: str, held: Held) -> Line:
        """Of a look at a lock."""
        holder = held.holder
        return cls(
            key,
            name_in(key),
            *((holder.task_id, holder.node, holder.pid) if holder else (None, None, 0)),
            held_for=None if holder is None else round(max(clock.wall() - holder.since, 0.0), 3),
            expires_in=None if math.isinf(held.remaining) else round(held.remaining, 3),
            slot=held.slot or 0,
            ttl=holder.ttl or None if holder else None,
            waiters=held.waiters,
            scope="while_executing" if holder and holder.task_id else None,
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """What it shows in the `COLUMNS` of a table."""
        return (
            self.key + (f" slot {self.slot}" if self.slot else ""),
            self.who,
            self.node or "-",
            str(self.pid or "-"),
            "-" if self.held_for is None else duration(self.held_for),
            "never" if self.expires_in is None else duration(self.expires_in),
            str(self.waiters),
        )

    @property
    def who(self) -> str:
        """The holder in short."""
        if self.task_id is not None:
            return self.task_id if self.pid else f"{self.task_id} (kept)"
        return "unknown" if self.node is None else "leader" if self.name.startswith(_BEAT) else "nobody (kept)"

    @property
    def holder(self) -> str:
        """The holder in words."""
        who = f"task {self.task_id}" if self.task_id else self.who
        kept = "kept for " if self.task_id and not self.pid else ""
        pid = f" (pid {self.pid})" if self.pid else ""
        return f"{kept}{who}" + (f" on {self.node}{pid}" if self.node else "")


def in_order(lines: Iterable[Line]) -> list[Line]:
    """Sorted by what they are of; each once, though a search may find one twice."""
    once = {(line.name, line.key, line.slot): line for line in lines}
    return [once[place] for place in sorted(once)]


def duration(seconds: float) -> str:
    """A time as people say it."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
