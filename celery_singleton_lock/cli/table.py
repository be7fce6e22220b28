"""A table for people: plain text in columns, as other programs of a shell print it."""

from __future__ import annotations

from collections.abc import Sequence

from celery_singleton_lock import cleaned


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows under their titles, each column as wide as it has to be."""
    rows = [[cleaned.line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in (titles, *rows))
    return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines)
