"""Held locks, as a table for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celery_singleton_lock.cli import layout
from celery_singleton_lock.diagnosis.held import HeldLock, duration

#: The titles of the columns.
COLUMNS = ("KEY", "HOLDER", "NODE", "PID", "HELD FOR", "EXPIRES IN", "WAITERS", "LABEL")


def table(locks: Sequence[HeldLock], width: float = math.inf) -> str:
    """The locks for people: in columns, as other shell programs print them; in a paragraph each if that is too wide."""
    lines = layout.columns([COLUMNS, *map(cells, locks)])
    if max(map(len, lines)) > width:
        lines = [line for lock in locks for line in layout.paragraph(lock.title(), lock.in_words(), width=width)]
    return "\n".join(lines)


def cells(lock: HeldLock) -> tuple[str, ...]:
    """The cells of a lock, for people, one for each of the `COLUMNS`."""
    return (
        lock.lock_in_words(),
        f"{lock.holder_in_short()}{' (gone)' if lock.is_left_behind else ''}",
        lock.holder.node or "-",
        str(lock.holder.pid or "-"),
        "-" if lock.held_for is None else duration(lock.held_for),
        "never" if lock.expires_in is None else duration(lock.expires_in),
        str(lock.held.waiters),
        lock.holder.label,
    )
