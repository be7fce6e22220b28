"""The locks that the servers hold, for the checkers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.simulation import inside


def on_most(servers: Sequence[Any], names: frozenset[str] = frozenset()) -> dict[str, bytes]:
    """By key, the holds on most servers: a leftover on one node of a Redlock keeps nobody out."""
    if len(servers) == 1:
        return dict(on(servers[0], names))
    holds = [hold for server in servers for hold in on(server, names)]
    each = Counter((key, owner_of(value)) for key, value in holds)
    return {key: value for key, value in holds if each[key, owner_of(value)] * 2 > len(servers)}


def on(server: Any, names: frozenset[str] = frozenset()) -> list[tuple[str, bytes]]:
    """The keys and values of the holds on a server; locks outside of tasks have these names."""
    return [(key, value) for key, value in server.living_values() if inside.part_of(key) == "run" or key in names]


class Tombstones:
    """Checks that an owner that has a tombstone takes no lock.

    On one server it may keep what it has, so it must have been seen with that lock, or not without it. On a node of a
    Redlock it has nothing. Not so a lock that is kept: if nobody could record that its message has ended, it may be
    kept after that.
    """

    def __init__(self, world: Any, names: frozenset[str] = frozenset()) -> None:
        self._world, self._names = world, names
        #: The owners on each server that had a tombstone and no lock at the last look.
        self._without: dict[Any, set[str]] = {}
        #: What owners had while they had a tombstone. A server that has lost its last writes may show it again.
        self._seen: set[bytes] = set()

    def look(self) -> None:
        is_redlock = len(self._world.servers) > 1
        for server in self._world.servers:
            every = {name for name, _ in server.living_values()}
            over = {inside.name_in(name) for name in every if inside.part_of(name) == "tombstone"}
            without = self._without.get(server, set())
            self._without[server] = set(over)
            for key, value in on(server, self._names) if over else ():
                hold = inside.hold_of(value)
                if hold.pid and hold.owner in over:
                    keeps = hold.owner not in without or value in self._seen
                    is_well = keeps and not is_redlock
                    self._world.run.must(
                        is_well, "{} holds {} for {}, which was given up", server.host.name, key, hold.owner
                    )
                    self._seen.add(value)
                    self._without[server].discard(hold.owner)


def owner_of(value: bytes) -> str:
    return inside.hold_of(value).owner
