"""The key of a lock, and the keys beside it: their names. `docs/stored.md` says what each holds.

All keys of one lock, and those of one schedule of beat, are in one hash slot of a cluster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from redis.crc import key_slot

from celery_singleton_lock.lease import Hold

#: The prefix of the keys that locks outside of tasks share.
SHARED_PREFIX = "singleton_lock:1:"

#: The first hash tag; others differ from it in some of the lower four bits of their letters.
_FIRST_TAG = 0x40404040  # @@@@


def run_key(key: str, slot: int = 0) -> str:
    """The key of a lock, or of a slot of a semaphore: a semaphore with one slot is a plain lock."""
    if slot:
        return _beside(key, f"run:{slot}")
    return key if isinstance(key, PlainKey) else _beside(key, "run")


def wake_key(key: str) -> str:
    """The list whose elements wake waiters."""
    return _beside(key, "wake")


def fence_key(key: str) -> str:
    """The counter of fencing tokens of one lock, on a node of a Redlock."""
    return _beside(key, "fence")


@lru_cache(maxsize=1024, typed=True)
def shared(key: str) -> str:
    """The prefix of the keys that all locks in the same slot of a cluster share."""
    prefix, opened, _ = key.partition("{")
    if not (prefix and opened) or isinstance(key, PlainKey):
        prefix = SHARED_PREFIX
    return f"{prefix}{{{_tag_of_slot(_slot_of(key))}}}"


def shared_fence_key(begins: str) -> str:
    """The highest fencing token that was given out for any of the locks that share this key; see `shared`."""
    return f"{begins}:fence"


def slots_key(key: str) -> str:
    """How many slots are in use, if that is more than one."""
    return _beside(key, "slots")


def waiting_key(key: str) -> str:
    """The waiters: a sorted set of owners."""
    return _beside(key, "waiting")


def line_key(key: str) -> str:
    """How many copies wait in the main processes: a hash, by the names that these have in `waiting_key`."""
    return _beside(key, "line")


def order_key(key: str, order: str) -> str:
    """The messages of an order (see `Arrival`), of which only the newest runs: a sorted set, by when they came."""
    return _beside(key, f"order:{order}")


def nudge_key(key: str, process: str) -> str:
    """The list whose elements unblock a process that has something else to send; in the slot of `key`."""
    return _beside(key, f"nudge:{process}")


def done_key(key: str, message: str) -> str:
    """What is remembered of a message that was carried out."""
    return _beside(key, f"done:{message}")


def ended_keys(begins: str, name: bytes) -> tuple[str, str]:
    """The messages that are over, of all locks that share these keys (see `shared`), and more of them for this name."""
    return f"{begins}:ended", f"{begins}:ended:{name[:1].hex()}"


def aside_key(begins: str) -> str:
    """Nothing is ever there when no script runs; see `now.lua`."""
    return f"{begins}:aside"


def ended_name(key: str, message: str) -> bytes:
    """The name of a message in `ended_keys`."""
    return hashlib.blake2b(f"{key} {message}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def ledger_key(key: str) -> str:
    """The hash of what beat has sent."""
    return _beside(key, "ledger")


def secret_key(key: str) -> str:
    """What the ids of beat's ticks are made with."""
    return _beside(key, "secret")


def journal_key(prefix: str, part: str) -> str:
    """A part of the journal."""
    return f"{prefix}:{{journal}}:{part}"


def stops_key(prefix: str, process: str) -> str:
    """The list whose elements stop runs of a process."""
    name = hashlib.blake2b(process.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{prefix}:{{stops:{name}}}"


def claim_keys(key: str, entries: Iterable[str]) -> list[str]:
    """The claims to send ticks of some of beat's entries."""
    # The colon at the end: an entry may be called "x:run", and is not a lock.
    return [_beside(key, f"claim:{entry}:") for entry in entries]


def gone_keys(key: str, entries: Iterable[str]) -> list[str]:
    """The last runs of entries that were just removed."""
    return [_beside(key, f"gone:{entry}:") for entry in entries]


def places_of(hold: Hold) -> list[str]:
    """The keys where a hold may be: in its slot, or in any slot if that is not known."""
    slots = range(hold.limit) if hold.slot is None else (hold.slot,)
    return [run_key(hold.key, slot) for slot in slots]


def over_key(key: str, name: str) -> str:
    """A tombstone: the owner, or the request, of this name was given up."""
    return _beside(key, f"over:{name}")


def _beside(key: str, what: str) -> str:
    return f"{key.base if isinstance(key, PlainKey) else key}:{what}"


def _hash_tag(key: str) -> str | None:
    """The part of a key that decides its slot in a cluster; None if the whole key does."""
    _, opened, rest = key.partition("{")
    tag, closed, _ = rest.partition("}")
    return tag if opened and closed and tag else None


def _slot_of(key: str) -> int:
    return key_slot(key.encode("utf-8", "surrogatepass"))


def _tag_of_slot(slot: int) -> str:
    """A text of four letters that is in this slot of a cluster."""
    tag, left = _FIRST_TAG, slot ^ key_slot(_FIRST_TAG.to_bytes(4, "big"))
    for highest, (moves, bits) in _steps().items():
        if left >> highest & 1:
            tag, left = tag ^ bits, left ^ moves
    return tag.to_bytes(4, "big").decode()


@lru_cache(maxsize=1)
def _steps() -> dict[int, tuple[int, int]]:
    """By the highest bit of a slot that it changes, how a change of a tag's bits moves the slot; highest first.

    A CRC is linear: the changes of several bits move it by the sum (exclusive or) of what each of them does.
    """
    first, found = key_slot(_FIRST_TAG.to_bytes(4, "big")), dict[int, tuple[int, int]]()
    for bit in (1 << place for place in range(32) if place % 8 < 4):
        bits, moves = bit, key_slot((_FIRST_TAG ^ bit).to_bytes(4, "big")) ^ first
        for highest in sorted(found, reverse=True):
            if moves >> highest & 1:
                moves, bits = moves ^ found[highest][0], bits ^ found[highest][1]
        if moves:
            found[moves.bit_length() - 1] = moves, bits
    return dict(sorted(found.items(), reverse=True))


@lru_cache(maxsize=1024, typed=True)  # A text of another class may read otherwise.
def plain_key(text: str) -> PlainKey:
    """The key of a lock with this name; cached, since a program may make a new lock object each time."""
    return PlainKey(text)


class PlainKey(str):
    """The key of a lock outside of tasks: the lock is at exactly this key, as for `redis.lock.Lock`.

    Attributes:
        base: the prefix of the keys beside it; in the same slot of a cluster.
    """

    __slots__ = ("base",)

    base: str

    def __new__(cls, name: str) -> PlainKey:
        made = super().__new__(cls, name)
        if _hash_tag(name) is not None:
            made.base = name
        elif name and "}" not in name:
            made.base = f"{{{name}}}"
        else:
            made.base = f"{{{_tag_of_slot(_slot_of(name))}}}{name}"
        return made
