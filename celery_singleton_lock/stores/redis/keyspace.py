"""The key of a lock, and what is added to it for the keys beside it. `docs/protocol.md` says what each holds.

All keys of one lock, and those of one schedule of beat, are in one hash slot of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import count

from redis.crc import key_slot

#: The highest fencing token that was given out.
FENCE = ":fence"

#: The waiters: a sorted set, by since when each waits.
WAITING = ":waiting"

#: When each waiter asked last, and for how many copies: a hash.
ASKED = ":asked"

#: Before an order (see `Arrival`): its messages, of which only the newest runs: a sorted set, by when they came.
ORDER = ":order:"

#: Before the name of a process: its mailbox, a list of those of its waiters that are woken. It is named after the first
#: lock for which the process waits, so that whoever has the rights for its locks has them for this list.
MAIL = ":mail:"

#: Before the name of a message: what is remembered of it, once it was carried out.
DONE = ":done:"

#: Before the name of an owner, or of an attempt: a tombstone; that one takes nothing any more.
TOMBSTONE = ":tombstone:"

#: The hash of what beat has sent.
LEDGER = ":ledger"


def run_key(key: str) -> str:
    """Where a lock is held: a string; or a sorted set, if several may hold it."""
    return key if isinstance(key, PlainKey) else key + ":run"


def journal_key(prefix: str, part: str) -> str:
    """A part of the journal."""
    return f"{prefix}:{{journal}}:{part}"


def claim_keys(key: str, entries: Iterable[str]) -> list[str]:
    """The claims to send ticks of some of beat's entries."""
    # The colon at the end: an entry may be called "x:run", and is not a lock.
    return [key + f":claim:{entry}:" for entry in entries]


def gone_keys(key: str, entries: Iterable[str]) -> list[str]:
    """The last runs of entries that were just removed."""
    return [key + f":gone:{entry}:" for entry in entries]


def _hash_tag(key: str) -> str | None:
    """The part of a key that decides its slot in a cluster; None if the whole key does."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return tag if opened and closed and tag else None


def _tag_beside(name: str) -> str:
    """A number in the same slot of a cluster as this name, which cannot be a tag itself."""
    slot = key_slot(name.encode())
    return next(tag for tag in map(str, count()) if key_slot(tag.encode()) == slot)


@lru_cache(maxsize=1024, typed=True)  # A text of another class may read otherwise.
def plain_key(text: str) -> PlainKey:
    """The key of a lock with this name; cached, since a program may make a new lock object each time."""
    return PlainKey(text)


class PlainKey(str):
    """The key of a lock outside of tasks: the lock is at exactly this key, as for `redis.lock.Lock`.

    What is added to it begins with its `base`.

    Attributes:
        base: the prefix of the keys beside it; in the same slot of a cluster.
    """

    __slots__ = ("base",)

    base: str

    def __new__(cls, name: str) -> PlainKey:
        name.encode()  # A name that no server can get is refused here, rather than in each call.
        made = super().__new__(cls, name)
        if _hash_tag(name) is not None:
            made.base = name
        elif name and "}" not in name:
            made.base = f"{{{name}}}"
        else:
            made.base = f"{{{_tag_beside(name)}}}{name}"
        return made

    def __add__(self, part: str) -> str:
        """The name of a key beside it."""
        return self.base + part
