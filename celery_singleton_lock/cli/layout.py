"""How text is laid out on a terminal: in columns, or in paragraphs if columns would be too wide."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from functools import partial

from celery_singleton_lock import cleaned


def width() -> float:
    """The width of the terminal in characters; infinite for a file or another program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def aligned(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The cells of a table, with each column as wide as its widest cell."""
    clean = [[cleaned.line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    return [[*map(str.ljust, row, widths)] for row in clean]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return ["  ".join(row).rstrip() for row in aligned(rows)]


def paragraph(title: str, text: str, *, width: float) -> list[str]:
    """The lines of a title and its text. No word is split, so that you can copy keys and ids."""
    wrapped = partial(textwrap.wrap, width=int(width), break_long_words=False, break_on_hyphens=False)
    return [
        *wrapped(cleaned.line(title), subsequent_indent="  "),
        *wrapped(cleaned.line(text), initial_indent="  ", subsequent_indent="  "),
    ]
