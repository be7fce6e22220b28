"""How tables are laid out for a terminal: one line for each lock, which fits into 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from celery_singleton_lock import cleaned
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.journal.words import duration

#: The width of a table of locks, and the most characters of a name, a label and a worker in one that would be wider.
WIDTH, NAME, LABEL, WORKER = 100, 30, 24, 14

#: The most characters of a holder's id.
_ID = 8


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The cells of a table, with each column as wide as its widest cell."""
    clean = [[cleaned.line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    return [[*map(str.ljust, row, widths)] for row in clean]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("  ".join(row).rstrip() for row in aligned(rows))


def locks_table(locks: Sequence[HeldLock], *, keys: bool = False) -> str:
    """The locks for people; `keys`: with the key of each, which makes the table wide."""
    titles = ("TASK", "LABEL", "HOLDER", "WORKER", "FOR", "WAITING")
    rows = _narrow([titles, *map(_cells, locks)])
    if keys:
        rows = [[*row, key] for row, key in zip(rows, ["KEY", *(lock.key for lock in locks)], strict=True)]
    return columns(rows)


def refusals_table(refused: Sequence[tuple[str, str, int]]) -> str:
    """For the name and the label of each lock, how often copies were refused in a row."""
    return columns(
        _narrow([("TASK", "LABEL", "TIMES"), *((name, label, str(times)) for name, label, times in refused)])
    )


def _narrow(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The rows of locks, with what is too long cut: a name at its beginning, everything else at its end."""
    rows = [[cleaned.line(cell) for cell in row] for row in rows]
    if max(map(len, columns(rows).splitlines())) <= WIDTH:
        return rows
    return [
        (_end(name, NAME), _beginning(label, LABEL), *(_beginning(cell, WORKER) for cell in others))
        for name, label, *others in rows
    ]


def _cells(lock: HeldLock) -> tuple[str, ...]:
    return (
        lock.shown_name,
        lock.holder.label,
        _holder(lock),
        _where(lock),
        "-" if lock.held_for is None else duration(lock.held_for),
        str(lock.held.waiters),
    )


def _holder(lock: HeldLock) -> str:
    if lock.held.holder is None:
        return "foreign"
    return (lock.holder.task_id or ("beat" if lock.is_of_beat else "nobody"))[:_ID]


def _where(lock: HeldLock) -> str:
    """Where the holder runs, or why it does not."""
    if lock.is_queued:
        return f"({lock.scope})"
    state = "(gone)" if lock.is_left_behind else "(kept)" if lock.holder.task_id and not lock.holder.pid else ""
    return f"{state} {lock.holder.node or '-'}".lstrip()


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]
