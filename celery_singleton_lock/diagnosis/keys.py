"""Rules for the keys of locks: those that never expire, that others wrote, or that dead processes left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from celery_singleton_lock import process_identity
from celery_singleton_lock.diagnosis.finding import Finding, Subject, judged
from celery_singleton_lock.holder import stem
from celery_singleton_lock.stores.redis.probe import Key
from celery_singleton_lock.stores.store import Store

#: How many keys of one kind are named individually.
MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class KeyContext(Subject):
    """A key, the server that has it, and the store, which can be asked whether it still does."""

    key: Key
    server: str
    store: Store


def of_keys(server: str, found: Iterable[Key], store: Store) -> Iterator[Finding]:
    """Findings about a server's keys, a few of each kind."""
    contexts = [KeyContext(key.name, key, server, store) for key in found]
    for rule in RULES:
        findings = judged([rule], *contexts)
        yield from findings[:MAX_NAMED]
        if (more := len(findings) - MAX_NAMED) > 0:
            first = findings[0]
            yield Finding(first.severity, server, f"and {more} more keys like {first.subject}", "as for those")


def _of_another_type(it: KeyContext) -> Iterator[Finding]:
    if it.key.foreign_type is not None:
        yield it.problem(
            f"on {it.server}, there is a {it.key.foreign_type} in place of a lock: nobody can take that lock",
            f"delete it: DEL '{it.key.name}'",
        )


def _of_a_stranger(it: KeyContext) -> Iterator[Finding]:
    if it.key.held is not None and it.key.held.holder is None:
        yield it.warning(
            f"on {it.server}, it has a value that this package did not write: until that is deleted, nobody "
            "can take the lock",
            f"find out who wrote it, or delete it: DEL '{it.key.name}'",
        )


def _of_the_dead(it: KeyContext) -> Iterator[Finding]:
    holder = it.key.held.holder if it.key.held is not None else None
    if holder is not None and it.key.remaining is not None and _is_over(it):
        yield it.warning(
            f"its holder, process {holder.pid} of {holder.node} on this host, is gone; the lock ends in "
            f"{it.key.remaining:.0f} s",
            f"wait, or start {holder.node} again, which frees it",
        )


def _endless(it: KeyContext) -> Iterator[Finding]:
    if it.key.remaining is not None or it.key.foreign_type is not None:
        return
    text = (
        f"on {it.server}, it has no time to live, though everything that this package writes has one: it stays forever"
    )
    if "}:" in it.key.name:
        yield it.problem(text, f"if no task holds it, delete it: DEL '{it.key.name}'")
    else:
        yield it.note(text, "give the program that wrote it another prefix")


RULES = (_of_another_type, _of_a_stranger, _of_the_dead, _endless)


def _is_over(it: KeyContext) -> bool:
    """Whether the holder's process has ended without freeing the lock."""
    held = it.key.held
    if held is None or held.holder is None or not process_identity.is_over(held.holder.process):
        return False
    key, _, slot = it.key.name.rpartition(":run")
    return any(stem(still.owner) == stem(held.owner) for still in it.store.held(key, limit=int(slot[1:] or 0) + 1))
