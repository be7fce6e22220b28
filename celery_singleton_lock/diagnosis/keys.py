"""What should not be among the keys of the locks: what lives for ever, what others wrote, what the dead have left."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from celery_singleton_lock import process_identity
from celery_singleton_lock.diagnosis.finding import Finding
from celery_singleton_lock.holder import STEM_LENGTH
from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.stores.redis.probe import Key
from celery_singleton_lock.stores.store import Store

#: Keys of one kind that are told one by one.
MAX_TOLD = 5


def of_keys(server: str, found: Iterable[Key], store: Store) -> Iterator[Finding]:
    """What should not be there, a few of each kind."""
    of_kind: defaultdict[str, list[Finding]] = defaultdict(list)
    for key in found:
        for kind, finding in _of_key(server, key, store):
            of_kind[kind].append(finding)
    for findings in of_kind.values():
        yield from findings[:MAX_TOLD]
        if len(findings) > MAX_TOLD:
            yield Finding(
                *(findings[0].severity, server),
                f"and {len(findings) - MAX_TOLD} more keys like {findings[0].subject}",
                "as for those",
            )


def _of_key(server: str, key: Key, store: Store) -> Iterator[tuple[str, Finding]]:
    """What is wrong with a key, and which kind of wrong that is."""
    if key.foreign_type is not None:
        text = f"on {server}, there is a {key.foreign_type} where a lock should be: whoever wants that lock fails"
        yield "type", Finding("problem", key.name, text, f"delete it: DEL '{key.name}'")
    elif key.held is not None and key.held.holder is None:
        text = f"on {server}, it has a value that this package did not write: while it is there, nobody gets the lock"
        yield "value", Finding("warning", key.name, text, f"find out who wrote it, or delete it: DEL '{key.name}'")
    elif key.held is not None and key.remaining is not None and _is_over(key.name, key.held, store):
        node, pid = (key.held.holder.node, key.held.holder.pid) if key.held.holder else ("", 0)
        text = f"its holder, process {pid} of {node} on this host, is over; the lock ends in {key.remaining:.0f} s"
        yield "over", Finding("warning", key.name, text, f"wait, or start {node} again, which frees it")
    if key.remaining is None and key.foreign_type is None:
        ours = "}:" in key.name
        text = f"on {server}, it has no time to live, as all that this package writes has: it stays for ever"
        remedy = f"if no task holds it, delete it: DEL '{key.name}'" if ours else "give others another prefix"
        yield "eternal", Finding("problem" if ours else "note", key.name, text, remedy)


def _is_over(name: str, held: Held, store: Store) -> bool:
    """Whether the holder's process has ended, and has not freed the lock before it did."""
    if held.holder is None or not process_identity.is_over(held.holder.process):
        return False
    key, _, slot = name.rpartition(":run")
    limit = int(slot[1:] or 0) + 1
    return any(still.owner[:STEM_LENGTH] == held.owner[:STEM_LENGTH] for still in store.held(key, limit=limit))
