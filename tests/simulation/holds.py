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
    each = Counter((key, stem(value)) for key, value in holds)
    return {key: value for key, value in holds if each[key, stem(value)] * 2 > len(servers)}


def on(server: Any, names: frozenset[str] = frozenset()) -> list[tuple[str, bytes]]:
    """The keys and values of the holds on a server; locks outside of tasks have these names."""
    return [(key, value) for key, value in server.living_values() if inside.part_of(key) == "run" or key in names]


def must_not_be_given_up(run: Any, server: Any, names: frozenset[str] = frozenset()) -> None:
    """Check that a server holds no lock for an owner of whom it knows that it was given up.

    Not so a lock that is kept: if nobody could record that its message has ended, it may be kept after that.
    """
    every = {name for name, _ in server.living_values()}
    over = {inside.name_in(name) for name in every if inside.part_of(name) == "over"}
    for key, value in on(server, names) if over else ():
        hold = inside.hold_of(value)
        if hold.pid:
            is_well = over.isdisjoint((hold.owner, stem(value)))
            run.must(is_well, "{} holds {} for {}, which was given up", server.host.name, key, hold.owner)


def stem(value: bytes) -> str:
    """The beginning of the owner, the same for all its attempts."""
    return inside.stem(inside.hold_of(value).owner)
