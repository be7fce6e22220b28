"""The data of a server: keys with values and times to live. The type of a value is its Python type."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.simulation.redis.replies import UnknownCommand


class Scores(dict[bytes, float]):
    """A sorted set: members with their scores."""

    def in_order(self) -> list[bytes]:
        return sorted(self, key=lambda member: (self[member], member))


TYPES = {bytes: b"string", list: b"list", dict: b"hash", Scores: b"zset"}


class Change(NamedTuple):
    """The new state of a key: its value (None: it is gone) and its expiry time in ms (None: it has none)."""

    key: bytes
    value: Any
    ends_at: int | None


class Dataset:
    """The keys of a server, which has one database."""

    __slots__ = ("ends_at", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}
        self.ends_at: dict[bytes, int] = {}

    def copy(self) -> Dataset:
        copy = Dataset()
        for key, value in self.values.items():
            copy.apply(Change(key, value, self.ends_at.get(key)))
        return copy

    def apply(self, change: Change) -> None:
        self.ends_at.pop(change.key, None)
        if change.value is None:
            self.values.pop(change.key, None)
            return
        self.values[change.key] = copied(change.value)
        if change.ends_at is not None:
            self.ends_at[change.key] = change.ends_at


def copied(value: Any) -> Any:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, Scores):
        return Scores(value)
    if isinstance(value, (list, dict)):
        return value.copy()
    raise UnknownCommand(f"a value of type {type(value)}")
