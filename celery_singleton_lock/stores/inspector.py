"""Looking at the locks of others; for people, and for executions that find a lock held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from celery_singleton_lock.stores.base import Held, Record

#: The most records that a `KeyState` shows.
MOST_RECORDS = 100


@dataclass(frozen=True, slots=True)
class KeyState:
    """All that a store has of one key.

    Attributes:
        held: its holders, in the order of the slots.
        fence: the last fencing token that was given out; None if there was none, or it is forgotten.
        waiters: how many wait for it.
        records: the records of messages that are over, the latest first; at most `MOST_RECORDS`, and only the
            beginning of each.
    """

    held: tuple[Held, ...]
    fence: int | None
    waiters: int
    records: tuple[Record, ...]


class Inspector(Protocol):
    """Looks at locks, and changes nothing.

    All methods raise `LockUnavailable` if there is no answer, or an error.
    """

    def held(self, key: str, *, limit: int = 1) -> list[Held]:
        """The holders of the key now, also beyond the limit."""

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        """The locks that are held, with their keys: those whose key begins with `prefix` and a colon."""

    def inspect(self, key: str) -> KeyState:
        """All that there is of one key, whatever its limit. Looks through all keys of the server."""
