"""Locks that are held, as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celery_singleton_lock.cli import layout
from celery_singleton_lock.diagnosis.held import HeldLock, duration

#: What the columns are called.
COLUMNS = ("KEY", "HOLDER", "NODE", "PID", "HELD FOR", "EXPIRES IN", "WAITERS", "LABEL")


def table(locks: Sequence[HeldLock], width: float = math.inf) -> str:
    """For people: in columns, as other programs of a shell print it; a paragraph each where that is too wide."""
    lines = layout.columns([COLUMNS, *map(cells, locks)])
    if max(map(len, lines)) > width:
        lines = [line for lock in locks for line in layout.paragraph(lock.title(), lock.in_words(), width=width)]
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
