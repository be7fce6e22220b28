"""The data of a server: keys with values and times to live. The type of a value is its Python type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.simulation.redis.replies import UnknownCommand


class Scores(dict[bytes, float]):
    """A sorted set: members with their scores."""

    def in_order(self) -> list[bytes]:
        return sorted(self, key=lambda member: (self[member], member))


TYPES = {bytes: b"string", list: b"list", dict: b"hash", Scores: b"zset"}


class Change(NamedTuple):
    """The new state of a key: its value (None: it is gone) and its expiry time in ms (None: it has none)."""

    database: int
    key: bytes
    value: Any
    ends_at: int | None


class Database:
    """The keys of one database."""

    __slots__ = ("ends_at", "values")

    def __init__(self) -> None:
        self.values: dict[bytes, Any] = {}
        self.ends_at: dict[bytes, int] = {}


class Dataset:
    """All databases of a server."""

    def __init__(self) -> None:
        self.databases: dict[int, Database] = {}

    def database(self, index: int) -> Database:
        if index not in self.databases:
            self.databases[index] = Database()
        return self.databases[index]

    def copy(self) -> Dataset:
        copy = Dataset()
        for change in self.changes():
            copy.apply(change)
        return copy

    def changes(self) -> Iterator[Change]:
        """The changes that turn an empty dataset into this one."""
        for index, database in self.databases.items():
            for key, value in database.values.items():
                yield Change(index, key, copied(value), database.ends_at.get(key))

    def apply(self, change: Change) -> None:
        database = self.database(change.database)
        database.ends_at.pop(change.key, None)
        if change.value is None:
            database.values.pop(change.key, None)
            return
        database.values[change.key] = copied(change.value)
        if change.ends_at is not None:
            database.ends_at[change.key] = change.ends_at


def copied(value: Any) -> Any:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, Scores):
        return Scores(value)
    if isinstance(value, (list, dict)):
        return value.copy()
    raise UnknownCommand(f"a value of type {type(value)}")
