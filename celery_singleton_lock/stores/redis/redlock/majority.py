"""Combines what the nodes of a Redlock show into what a majority shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.stores.store import MOST_RECORDS, KeyState


def agreed(each: Iterable[Iterable[tuple[str, Held]]], quorum: int) -> Iterator[tuple[str, Held]]:
    """The locks that at least this many nodes show."""
    by_owner: defaultdict[tuple[str, str], list[Held]] = defaultdict(list)
    for of_node in each:
        # A search may find a key twice.
        once = {(key, held.owner): held for key, held in of_node}
        for place, held in once.items():
            by_owner[place].append(held)
    for (key, owner), alike in by_owner.items():
        if len(alike) >= quorum:
            holder = next((held.holder for held in alike if held.holder is not None), None)
            remaining, waiters = max(held.remaining for held in alike), max(held.waiters for held in alike)
            yield key, Held(holder, owner, remaining, waiters)


def merged(states: Sequence[KeyState], quorum: int) -> KeyState:
    """What the nodes have of one key."""
    records = {each.message: each for it in states for each in sorted(it.records, key=lambda each: each.seconds)}
    return KeyState(
        tuple(held for _, held in agreed([[("", held) for held in it.held] for it in states], quorum)),
        max((it.fence for it in states if it.fence is not None), default=None),
        max(it.waiters for it in states),
        tuple(sorted(records.values(), key=lambda each: each.seconds, reverse=True)[:MOST_RECORDS]),
    )
