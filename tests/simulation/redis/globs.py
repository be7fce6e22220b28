"""Patterns of names, as in KEYS and SCAN."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache


@lru_cache(maxsize=256)
def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """A function that tells whether a name matches a pattern."""
    if pattern == b"*":
        return lambda name: True
    compiled = re.compile(_as_regular_expression(pattern), re.DOTALL)
    return lambda name: compiled.fullmatch(name) is not None


def _as_regular_expression(pattern: bytes) -> bytes:
    parts, at = [], 0
    while at < len(pattern):
        each = pattern[at : at + 1]
        at += 1
        if each == b"*":
            parts.append(b".*")
        elif each == b"?":
            parts.append(b".")
        elif each == b"[":
            part, at = _any_of(pattern, at)
            parts.append(part)
        else:
            if each == b"\\" and at < len(pattern):
                each, at = pattern[at : at + 1], at + 1
            parts.append(re.escape(each))
    return b"".join(parts)


def _any_of(pattern: bytes, at: int) -> tuple[bytes, int]:
    """The characters between brackets, and where the rest of the pattern begins."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    parts = []
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            at += 1
            parts.append(re.escape(pattern[at : at + 1]))
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            first, last = sorted((pattern[at : at + 1], pattern[at + 2 : at + 3]))
            parts.append(re.escape(first) + b"-" + re.escape(last))
            at += 2
        else:
            parts.append(re.escape(pattern[at : at + 1]))
        at += 1
    if not parts:
        return (b"." if negated else b"(?!)"), at + 1
    return b"[" + (b"^" if negated else b"") + b"".join(parts) + b"]", at + 1
