"""Cleans values from a message, from Redis or from another worker, before they are kept or shown.

A sender or writer can choose the type, the length and each character of a value. The functions here do not raise, and
their results are bounded, can be encoded, and do no harm to a terminal. A clean value stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from typing import Any

#: The most bytes (as UTF-8) of a text: the longest task id in the tables of result backends.
MAX_BYTES = 255

#: The most bytes of a key: for its prefix, a lock's name, and a digest. No key that is made here is longer.
MAX_KEY_BYTES = 600

#: The most bytes of a line for people: an explanation may be long, but not as long as a key of megabytes.
MAX_LINE_BYTES = 20_000

#: Hex digits that distinguish a text that was cut from others with the same beginning.
_DIGITS = 16

#: The largest integer: every count fits, and Lua, JSON and Redis can represent it.
MAX_COUNT = 2**53

#: The latest moment, in seconds since the epoch, and the longest time: the end of the year 9998.
MAX_SECONDS = 253_370_764_800.0


def text(value: object, *, most: int = MAX_BYTES) -> str:
    """A printable text of at most `most` bytes; a longer text is cut and ends with a digest of the whole text."""
    if type(value) is str and value.isascii() and value.isprintable() and len(value) <= most:
        return value
    found = value if isinstance(value, str) else _in_short(value)
    shown = printable(found[:most])  # Megabytes would take too long.
    content = shown.encode()
    if len(found) <= most and len(content) <= most:
        return shown
    digest = hashlib.sha256(found.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
    return content[: most - _DIGITS - 3].decode(errors="ignore") + "\u2026" + digest


def text_or_none(value: object) -> str | None:
    """The same; None stays None."""
    return None if value is None else text(value)


def line(value: object) -> str:
    """A line for an operator's terminal."""
    return text(value, most=MAX_LINE_BYTES)


def key(value: object) -> str:
    """The key of a lock; a key longer than any that is made here is cut."""
    return text(value, most=MAX_KEY_BYTES)


def printable(value: object) -> str:
    """A text of printable characters, in one line; other characters are escaped as in Python source."""
    found = value if isinstance(value, str) else _in_short(value)
    if found.isprintable():
        return str(found)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in found)


def value_shown(value: object) -> str:
    """A value for an error message: its `repr`, shortened."""
    return printable(_in_short(value))


def count(value: object) -> int:
    """An integer from 0 to `MAX_COUNT`; 0 for anything else."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0


def seconds(value: object) -> float:
    """A time from 0 to `MAX_SECONDS`; 0 for anything else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 <= value <= MAX_SECONDS else 0.0  # NaN is not in this range.


def whole(digits: object) -> int | None:
    """The integer that Redis keeps as text; None for anything else, and for an integer beyond `MAX_COUNT`."""
    try:
        found = int(digits) if isinstance(digits, bytes) and len(digits) < 20 else None
    except ValueError:
        return None
    return found if found is not None and abs(found) <= MAX_COUNT else None


def array(content: str | bytes) -> list[Any] | None:
    """The list in a JSON text; None for anything else."""
    try:
        found = json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, list) else None


class _Short(reprlib.Repr):
    """A shortened `repr`, for whatever may be in a message or a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = MAX_BYTES
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write an integer with thousands of digits."""
        if x.bit_length() > 1024:
            return f"a whole number of about {round(x.bit_length() * math.log10(2))} digits"
        return super().repr_int(x, level)


_short = _Short()


def _in_short(value: object) -> str:
    try:
        return _short.repr(value)
    except Exception:  # noqa: BLE001 - a `__repr__` may raise anything
        return f"<{type(value).__name__}>"
