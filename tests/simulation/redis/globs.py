"""Patterns of names, as in SCAN, without sets of characters."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from tests.simulation.redis.replies import UnknownCommand

_PART = re.compile(rb"\\(.)|(.)", re.DOTALL)
_WILD = {b"*": b".*", b"?": b"."}


@lru_cache(maxsize=256)
def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """A function that tells whether a name matches a pattern."""
    parts = _PART.findall(pattern)
    if (b"", b"[") in parts:
        raise UnknownCommand(f"the pattern {pattern!r}")
    compiled = re.compile(
        b"".join(_WILD.get(plain) or re.escape(escaped or plain) for escaped, plain in parts), re.DOTALL
    )
    return lambda name: compiled.fullmatch(name) is not None
