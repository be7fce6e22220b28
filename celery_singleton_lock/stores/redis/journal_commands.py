"""What the journal of all locks is asked: `<prefix>:{journal}` with `:counts`, `:labels` (those of the counts whose
names come from messages, by when they grew), `:entries` (a stream), `:last` (the last run of each key) and `:refused`
(how often in a row).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.stores.journal import MAX_LABELS, Written
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.script import Call, Script, ms

#: Seconds for which the journal is kept after it was written to: 30 days.
JOURNAL_TTL = 2_592_000.0

#: Keys of which the journal knows the last run, and how often in a row a copy was refused.
KEYS_REMEMBERED = 10_000

_PARTS = "counts", "entries", "last", "refused", "labels", "scratch"

WRITE = Script("now", "journal/write")


def write(
    prefix: str,
    size: int,
    counts: Mapping[str, int],
    entries: Sequence[Entry],
    slack: float,
    coarse: Mapping[str, str],
) -> Call:
    """See `Journal.write`."""
    args: list[object] = [ms(JOURNAL_TTL), size, KEYS_REMEMBERED, MAX_LABELS, len(counts)]
    args += [arg for name, count in counts.items() for arg in (name, coarse.get(name, ""), count)]
    for it in entries:
        times = (round(it.began * 1000), round(it.ended * 1000), round(slack * 1000, 3))
        args += [_treated_as(it), it.key, *times, it.fence, it.dumps()]
    return Call(WRITE, [keyspace.journal_key(prefix, part) for part in _PARTS], args)


def written(answer: Any) -> Written:
    """What a `write` has found."""
    now, rows, overlaps = answer
    return Written(now / 1_000_000, rows, [Entry.loads(overlap) if overlap else None for overlap in overlaps])


def _treated_as(entry: Entry) -> str:
    if entry.kind == "run":
        return "run" if entry.limit == 1 else "turn"
    return "refusal" if entry.kind in REFUSALS else "note"
