"""The journal's counts: their names, what each of them counts, and how to read them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock.journal_entry import CRASHED, LOST, REFUSALS, SUPERSEDED, Entry


class Counter(NamedTuple):
    """A number that only grows.

    Attributes:
        label: the label that divides it, besides the task; '' for none.
    """

    name: str
    label: str
    text: str


class Histogram(NamedTuple):
    """How often something took how long.

    Attributes:
        name: the name of its two kinds of counts, which have the suffixes _bucket and _sum (milliseconds).
        bounds: the upper bounds of its buckets, in seconds.
        labels: the labels of the buckets, made from their bounds; the last bucket is above all bounds.
    """

    name: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, name: str, bounds: tuple[float, ...], text: str) -> Histogram:
        return cls(name, bounds, (*(f"{bound:g}" for bound in bounds), "+Inf"), text)


COUNTERS = (
    Counter("runs", "outcome", "Executions that held their lock, by how they ended."),
    Counter("conflicts", "policy", "Executions that met a held lock, by what was done about it."),
    Counter("duplicates", "policy", "Calls that met another message's lock when sent, by what the caller got."),
    Counter("joined", "", "Executions that joined another one and ended as it did."),
    Counter("superseded", "", "Executions that a newer one superseded: it came while they waited or ran."),
    Counter("refused_ticks", "entry", "Ticks of beat's schedule that were refused, by the entry."),
    Counter("renewals", "", "Renewals of the locks of executions."),
    Counter("losses", "", "Executions that lost their lock while they ran."),
    Counter(
        "redeliveries",
        "kind",
        "Copies of a message that stood by or were dropped because another one was running, or had run.",
    ),
    Counter("takeovers", "", "Locks that were freed because the process that held them had died."),
    Counter("blocked", "", "Warnings that copies were refused many times in a row."),
    Counter("overlaps", "", "Pairs of executions that held one lock at the same time."),
)
WAITED = Histogram.of("waited", (0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300), "Seconds until an execution had its lock.")
HELD = Histogram.of("held", (0.01, 0.1, 0.5, 1, 5, 30, 120, 600, 3600, 14400), "Seconds for which a lock was held.")
HISTOGRAMS = (WAITED, HELD)

#: The names of the counters with a label, and of those without.
DIVIDED = tuple(counter.name for counter in COUNTERS if counter.label)
PLAIN = tuple(counter.name for counter in COUNTERS if not counter.label)


class Count(NamedTuple):
    """One number of the journal.

    Attributes:
        name: the name of a counter, or of a histogram with _bucket or _sum.
        label: a counter's label, or the upper bound of a bucket in seconds.
    """

    name: str
    task: str
    label: str = ""


#: The same as a plain tuple, since there are several for each execution.
Key = tuple[str, str, str]


#: The counters whose label comes from a message. A journal has a few hundred counts of each (`base.MAX_LABELS`); the
#: rest are counted under the label OTHER. The labels of the other counters (policies, outcomes, kinds) are few.
FREE_LABELS, OTHER = ("refused_ticks",), "(other)"


def dumps(count: Key) -> str:
    """The name of a count in the journal."""
    return json.dumps([cleaned.text(part) for part in count], ensure_ascii=False)


def coarse(count: Key) -> Key | None:
    """The count that replaces this one if there are too many labels; None for counters with few labels."""
    name, task, _ = count
    return (name, task, OTHER) if name in FREE_LABELS else None


def of(entry: Entry) -> list[tuple[Key, int]]:
    """The counts to which an entry adds, and how much."""
    task = entry.task
    if entry.kind == "run":
        found: list[tuple[Key, int]] = [(("runs", task, entry.outcome), 1)]
        found += _observed(WAITED, task, entry.waited)
        found += _observed(HELD, task, entry.ended - entry.began)
        if entry.renewals:
            found.append((("renewals", task, ""), entry.renewals))
        if entry.outcome == LOST:
            found.append((("losses", task, ""), 1))
        if entry.outcome == SUPERSEDED:
            found.append((("superseded", task, ""), 1))
        return found
    if entry.kind in ("stand-by", "drop", "repeat"):
        return [(("redeliveries", task, entry.kind), 1)]
    if entry.kind in ("joined", "superseded"):
        return [((entry.kind, task, ""), 1)]
    if entry.kind == "free":
        ran = (("runs", task, CRASHED), 1), *_observed(HELD, task, entry.ended - entry.began)
        return [(("takeovers", task, ""), 1), *(ran if entry.ran else ())]
    met = ("duplicates", task, entry.outcome) if entry.kind == "duplicate" else ("conflicts", task, entry.kind)
    conflict: tuple[Key, int] = met, 1
    if entry.scheduled and entry.kind in REFUSALS:
        return [conflict, (("refused_ticks", task, entry.scheduled), 1)]
    return [conflict]


def read(counts: Mapping[str, int]) -> dict[Count, int]:
    """The counts of a journal, without any that this package did not write."""
    found: Counted[Count] = Counted()
    for text, value in counts.items():
        parts = cleaned.array(text)
        if parts is not None and len(parts) == len(Count._fields) and all(isinstance(part, str) for part in parts):
            # Two different names that somebody else wrote may be the same once they are cleaned.
            found[Count(*map(cleaned.text, parts))] += value
    return dict(found)


def by_task(counts: Mapping[Count, int]) -> Iterator[dict[str, Any]]:
    """The counts of each task: numbers, or numbers by label; `waited` and `held` are totals in seconds."""
    tasks: defaultdict[str, dict[Count, int]] = defaultdict(dict)
    for count, value in sorted(counts.items()):
        tasks[count.task][count] = value
    for task, its in sorted(tasks.items()):
        divided: dict[str, dict[str, int]] = {name: {} for name in DIVIDED}
        plain = dict.fromkeys(PLAIN, 0)
        for count, value in its.items():
            if count.name in divided:
                divided[count.name][count.label] = value
            elif count.name in plain:
                plain[count.name] = value
        waited, held = (sum_of(histogram, task, its) for histogram in (WAITED, HELD))
        yield {"task": task, **divided, **plain, "waited": waited, "held": held}


def buckets(histogram: Histogram, task: str, counts: Mapping[Count, int]) -> list[tuple[str, int]]:
    """The upper bounds of a histogram, and how many values were not above each; the last count is their number."""
    total, found = 0, []
    for bound in histogram.labels:
        total += counts.get(Count(f"{histogram.name}_bucket", task, bound), 0)
        found.append((bound, total))
    return found


def sum_of(histogram: Histogram, task: str, counts: Mapping[Count, int]) -> float:
    return counts.get(Count(f"{histogram.name}_sum", task), 0) / 1000


def _observed(histogram: Histogram, task: str, seconds: float) -> tuple[tuple[Key, int], tuple[Key, int]]:
    bound = histogram.labels[bisect_left(histogram.bounds, seconds)]
    return ((histogram.name + "_bucket", task, bound), 1), ((histogram.name + "_sum", task, ""), round(seconds * 1000))
