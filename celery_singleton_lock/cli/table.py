"""Locks that are held, as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celery_singleton_lock import cleaned
from celery_singleton_lock.cli import command
from celery_singleton_lock.diagnosis.held import HeldLock, duration

#: What the columns are called.
COLUMNS = ("KEY", "HOLDER", "NODE", "PID", "HELD FOR", "EXPIRES IN", "WAITERS", "LABEL")


def table(locks: Sequence[HeldLock], width: float = math.inf) -> str:
    """For people: plain text in columns, as other programs of a shell print it; in lines, where that is too wide."""
    rows: list[Sequence[str]] = [COLUMNS, *([cleaned.line(cell) for cell in cells(lock)] for lock in locks)]
    lines = ["  ".join(row).rstrip() for row in command.aligned(rows)]
    if max(map(len, lines)) > width:
        lines = [line for lock in locks for line in (cleaned.line(lock.title()), f"  {cleaned.line(lock.in_words())}")]
    return "\n".join(lines)


def cells(lock: HeldLock) -> tuple[str, ...]:
    """For people, in the `COLUMNS`."""
    return (
        lock.lock_in_words(),
        lock.holder_in_short(),
        lock.holder.node or "-",
        str(lock.holder.pid or "-"),
        "-" if lock.held_for is None else duration(lock.held_for),
        "never" if lock.expires_in is None else duration(lock.expires_in),
        str(lock.held.waiters),
        lock.holder.label,
    )
