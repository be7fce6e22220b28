"""Decisions that are derived from bytes: the same bytes make the same case.

So Hypothesis only makes bytes, and reduces them. Where the bytes end, each decision is the simplest one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Values that have broken something somewhere.
NASTY: Sequence[Any] = (
    None,
    "",
    0,
    -1,
    1,
    True,
    False,
    [],
    {},
    0.0,
    -0.0,
    1.5,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    2**31,
    2**53,
    2**63,
    2**64,
    -(2**63),
    10**400,
    "0",
    "-1",
    "nan",
    "1e999",
    "true",
    "\x00",
    "\x1b[2J\x1b]0;owned\x07",
    "\ud800",
    "\u202e",
    "é" * 300,
    "x" * 300,
    "a:b{c}d%s{0}/../",
    "0" * 32,
    "f" * 32,
    "2026-01-01T00:00:00+00:00",
    "9999-12-31T23:59:59.999999-23:59",
    [[[[]]]],
    [None] * 20,
    {"": None},
    {"a": {"a": {"a": []}}},
    "not",
    "celery",
)

#: Deeper than any reader goes, and longer than any output should be.
HUGE: Sequence[Any] = ("x" * 70_000, "\x1b" * 5000, [0] * 3000, {str(each): each for each in range(500)})


def nested(depth: int, *, mapping: bool = False) -> Any:
    """A list in a list, or a dictionary in a dictionary."""
    value: Any = []
    for _ in range(depth):
        value = {"task_id": "x", "a": value} if mapping else [value]
    return value


class Choices:
    """Decisions that are derived from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, count: int) -> int:
        """A whole number from 0 to `count` - 1."""
        number, reach = 0, 1
        while reach < count:
            number = number * 256 + (self._data[self._at] if self._at < len(self._data) else 0)
            reach *= 256
            self._at += 1
        return number % count

    def one_in(self, count: int) -> bool:
        return self.below(count) == count - 1

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], *, most: int = 4) -> list[T]:
        return [self.pick(options) for _ in range(self.below(most + 1))]

    def content(self, most: int = 40) -> bytes:
        """The next bytes, unchanged."""
        length = self.below(most + 1)
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken

    def text(self) -> str:
        return self.content(24).decode("utf-8", "surrogateescape" if self.one_in(4) else "replace")

    def value(self, depth: int = 3) -> Any:
        """Anything that a message, a setting or a line of JSON can hold."""
        kind = self.below(12)
        if kind < 5:
            return self.pick(NASTY)
        if kind < 7:
            return self.text()
        if kind == 7:
            return self.below(2**32) - 2**31
        if kind == 8:
            return nested(self.pick((2, 5, 40, 400)), mapping=self.one_in(2)) if depth == 3 else self.pick(NASTY)
        if kind == 9:
            return self.pick(HUGE if self.one_in(8) else NASTY)
        if depth == 0:
            return None
        if kind == 10:
            return [self.value(depth - 1) for _ in range(self.below(4))]
        return {self.text(): self.value(depth - 1) for _ in range(self.below(4))}

    def mutated(self, valid: Any, times: int = 4) -> Any:
        """The same value, changed in up to `times` places."""
        for _ in range(self.below(times + 1)):
            valid = self._mutated_once(valid)
        return valid

    def spoiled(self, content: bytes) -> bytes:
        """The same bytes, with some of them changed, cut, doubled or inserted."""
        for _ in range(self.below(4)):
            at, kind = self.below(len(content) + 1), self.below(6)
            if kind == 0:
                content = content[:at]
            elif kind == 1:
                content = content[at:]
            elif kind == 2:
                content = content[:at] + self.content(12) + content[at:]
            elif kind == 3:
                content = content[:at] + bytes([self.below(256)]) + content[at + 1 :]
            elif kind == 4:
                content = content[:at] + content[at:] * 2
            else:
                content = content[:at] + self.pick(_PIECES) + content[at + self.below(4) :]
        return content

    def written(self, valid: Any) -> bytes:
        """A valid value, mutated, as JSON whose bytes may be spoiled."""
        content = json.dumps(self.mutated(valid)).encode()
        return self.spoiled(content) if self.one_in(3) else content

    def _mutated_once(self, valid: Any) -> Any:
        if isinstance(valid, dict) and valid and not self.one_in(6):
            name = self.pick(sorted(valid, key=repr))
            how = self.below(8)
            if how == 0:
                return {other: value for other, value in valid.items() if other != name}
            if how == 1:
                return {**valid, self.text(): self.value()}
            return {**valid, name: self._mutated_once(valid[name])}
        if isinstance(valid, (list, tuple)) and valid and not self.one_in(6):
            at, how = self.below(len(valid)), self.below(8)
            parts = list(valid)
            if how == 0:
                del parts[at]
            elif how == 1:
                parts.insert(at, self.value())
            else:
                parts[at] = self._mutated_once(parts[at])
            return parts if isinstance(valid, list) else tuple(parts)
        if isinstance(valid, str) and self.one_in(3):
            return self.spoiled(valid.encode("utf-8", "surrogatepass")).decode(errors="replace")
        return self.value()


_PIECES = (b"[" * 2000, b"9" * 5000, b"1e999", b"\xff\xfe", b"\n", b'"', b"\\ud800", b"NaN", b"-", b"\x00", b"]", b"}")


class Stuck(BaseException):
    """A case that does not end; not caught by any code under test."""


#: A case: does something with the choices, and checks the outcome.
Case = Callable[[Choices], None]
