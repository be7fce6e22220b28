"""The locks that the servers hold, for the checkers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

#: Length of the part of an owner that all its attempts share, and of the whole owner.
STEM, WHOLE = 28, 32

#: How the owner of a hold ends that was counted, and names no attempt.
COUNTED = "0000"


def on_most(servers: Sequence[Any], names: frozenset[str] = frozenset()) -> dict[str, bytes]:
    """By key, the holds on most servers: a leftover on one node of a Redlock keeps nobody out."""
    if len(servers) == 1:
        return dict(on(servers[0], names))
    holds = [hold for server in servers for hold in on(server, names)]
    each = Counter((key, stem(value)) for key, value in holds)
    return {key: value for key, value in holds if each[key, stem(value)] * 2 > len(servers)}


def is_noted(server: Any, name: bytes) -> bool:
    """Whether a message with this name is among the ended messages whose contents are forgotten."""
    texts = [value for key, value in server.living_values() if ":ended" in key]
    return any(text[at : at + 8] == name for text in texts for at in range(0, len(text), 12))


def on(server: Any, names: frozenset[str] = frozenset()) -> list[tuple[str, bytes]]:
    """The keys and values of the holds on a server; locks outside of tasks have these names."""
    return [(key, value) for key, value in server.living_values() if ":run" in key or key in names]


def of_given_up(server: Any, names: frozenset[str] = frozenset()) -> str | None:
    """What is wrong if a server holds a lock for an owner of whom it knows that it was given up.

    Not so a lock that is kept: if nobody could record that its message has ended, it may be kept after that. Nor what
    an attempt has left in another slot of a Redlock's node: freeing names one slot, and what undoes the attempt comes.
    """
    every = {name for name, _ in server.living_values()}
    over = {name.rpartition(":over:")[2] for name in every if ":over:" in name}
    for key, value in on(server, names) if over else ():
        owner = value[:WHOLE].decode(errors="replace")
        has_slots = f"{key.rpartition(':run')[0] or key}:slots" in every
        known_as = (owner,) if has_slots and not owner.endswith(COUNTED) else (owner, owner[:STEM])
        if not over.isdisjoint(known_as) and pid_in(value):
            return f"{server.host.name} holds {key} for {owner}, which was given up"
    return None


def stem(value: bytes) -> str:
    """The beginning of the owner, the same for all its attempts."""
    return value[:STEM].decode(errors="replace")


@lru_cache(maxsize=256)  # The checkers ask for the same ones at each look.
def pid_in(value: bytes) -> int:
    """The process that holds a lock; 0 for a reservation, and for a hold that a node got back."""
    fields = json.loads(value[32:]) if value[32:].startswith(b"[") else [""] * 8
    return int(fields[7].split("/")[1]) if fields[7] else 0


def task_id_in(value: bytes) -> str:
    """The message that holds a lock; empty for a reservation, and for a hold that a node got back."""
    return str(json.loads(value[32:])[1] or "") if value[32:].startswith(b"[") else ""
