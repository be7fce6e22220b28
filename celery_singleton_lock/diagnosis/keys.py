"""Rules for the keys of locks: those that never expire, that others wrote, or that dead processes left behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from celery_singleton_lock import process_identity
from celery_singleton_lock.diagnosis.finding import Finding, judged
from celery_singleton_lock.holder import Holder, stem
from celery_singleton_lock.stores.redis.probe import Key
from celery_singleton_lock.stores.store import Store

#: How many keys of one kind are named individually.
MAX_NAMED = 5


def of_keys(server: str, found: Iterable[Key], store: Store) -> Iterator[Finding]:
    """Findings about a server's keys, a few of each kind; the store can be asked whether it still has them."""
    by_kind: defaultdict[str, list[Finding]] = defaultdict(list)
    for key in found:
        for finding in _of_key(server, key, store):
            by_kind[finding.text].append(finding)
    for findings in by_kind.values():
        yield from findings[:MAX_NAMED]
        if (more := len(findings) - MAX_NAMED) > 0:
            first = findings[0]
            yield Finding(first.severity, server, f"and {more} more keys like {first.subject}", "as for those")


def _of_key(server: str, key: Key, store: Store) -> list[Finding]:
    holder = (key.held.holder if key.held else None) or Holder()
    delete, endless = f"delete it: DEL '{key.name}'", key.remaining is None and key.foreign_type is None
    return judged(
        key.name,
        (
            key.foreign_type is not None,
            "problem",
            f"on {server}, there is a {key.foreign_type} in place of a lock: nobody can take that lock",
            delete,
        ),
        (
            key.held is not None and key.held.holder is None,
            "warning",
            f"on {server}, it has a value that this package did not write: until that is deleted, nobody "
            "can take the lock",
            f"find out who wrote it, or {delete}",
        ),
        (
            key.remaining is not None and _is_of_the_dead(key, store),
            "warning",
            f"on {server}, its holder is gone, a process of this host",
            f"wait {key.remaining or 0:.0f} s for its end, or start {holder.node} again, which frees it",
        ),
        (
            endless,
            "problem" if "}:" in key.name else "note",
            f"on {server}, it has no time to live, though everything that this package writes has one: it stays "
            "forever",
            f"if no task holds it, {delete}" if "}:" in key.name else "give the program that wrote it another prefix",
        ),
    )


def _is_of_the_dead(it: Key, store: Store) -> bool:
    """Whether the holder's process has ended without freeing the lock."""
    if it.held is None or it.held.holder is None or not process_identity.is_over(it.held.holder.process):
        return False
    key, _, slot = it.name.rpartition(":run")
    return any(stem(still.owner) == stem(it.held.owner) for still in store.held(key, limit=int(slot[1:] or 0) + 1))
