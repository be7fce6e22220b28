"""The journal's counts: their names, what each of them counts, and how to read them."""

from __future__ import annotations

import json
from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock.journal_entry import LOST, REFUSALS, SUPERSEDED, Entry


class Counter(NamedTuple):
    """A number that only grows.

    Attributes:
        label: the label that divides it, besides the task; '' for none.
    """

    name: str
    label: str
    text: str


COUNTERS = (
    Counter("runs", "outcome", "Executions that held their lock, by how they ended."),
    Counter("conflicts", "policy", "Messages that met a held lock, by what was done about it."),
    Counter("duplicates", "policy", "Calls that met another message's lock when sent, by what the caller got."),
    Counter("joined", "", "Executions that joined another one and ended as it did."),
    Counter("superseded", "", "Executions that a newer one superseded: it came while they waited or ran."),
    Counter("refused_ticks", "", "Ticks of beat's schedule that were refused."),
    Counter("renewals", "", "Renewals of the locks of executions."),
    Counter("losses", "", "Executions that lost their lock while they ran."),
    Counter(
        "redeliveries",
        "kind",
        "Copies of a message that stood by or were dropped because another one was running, or had run.",
    ),
    Counter("takeovers", "", "Locks that were freed because the process that held them had died."),
    Counter("blocked", "", "Warnings that copies were refused many times in a row."),
)

#: The sums of times: of all runs, in milliseconds.
TIMES = {"waited": "Seconds until an execution had its lock.", "held": "Seconds for which a lock was held."}

#: The names of the counters with a label, and of those without.
DIVIDED = tuple(counter.name for counter in COUNTERS if counter.label)
PLAIN = tuple(counter.name for counter in COUNTERS if not counter.label)


class Count(NamedTuple):
    """One number of the journal.

    Attributes:
        name: the name of a counter, or of a sum of times.
        label: a counter's label. There are few of each: policies, outcomes, kinds.
    """

    name: str
    task: str
    label: str = ""


def dumps(count: Count) -> str:
    """The name of a count in the journal."""
    return json.dumps([cleaned.text(part) for part in count], ensure_ascii=False)


def of(entry: Entry) -> Iterator[tuple[Count, int]]:
    """The counts to which an entry adds, and how much."""
    task, kind, outcome = entry.task, entry.kind, entry.outcome
    if entry.ran:
        yield Count("runs", task, outcome), 1
        yield Count("waited", task), round(entry.waited * 1000)
        yield Count("held", task), round((entry.ended - entry.began) * 1000)
    if kind == "run":
        if entry.renewals:
            yield Count("renewals", task), entry.renewals
        if (name := {LOST: "losses", SUPERSEDED: "superseded"}.get(outcome)) is not None:
            yield Count(name, task), 1
    elif kind == "free":
        yield Count("takeovers", task), 1
    elif kind in ("joined", "superseded"):
        yield Count(kind, task), 1
    elif kind in ("stand-by", "drop", "repeat"):
        yield Count("redeliveries", task, kind), 1
    elif kind == "duplicate":
        yield Count("duplicates", task, outcome), 1
    else:
        yield Count("conflicts", task, kind), 1
        if entry.scheduled and kind in REFUSALS:
            yield Count("refused_ticks", task), 1


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
        yield {"task": task, **divided, **plain, **{name: seconds(name, task, its) for name in TIMES}}


def in_words(counts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The counts of a task that are not zero, by their names; without times."""
    for name in (*DIVIDED, *PLAIN):
        if count := counts.get(name):
            yield name.replace("_", " "), divided(count) if name in DIVIDED else str(count)


def divided(counts: Mapping[str, int]) -> str:
    """A sum, and its parts by label; a single part is the sum."""
    each = (label if len(counts) == 1 else f"{label} {count}" for label, count in counts.items())
    return f"{sum(counts.values())} ({', '.join(each)})" if counts else "0"


def seconds(name: str, task: str, counts: Mapping[Count, int]) -> float:
    """A sum of times of a task's runs."""
    return counts.get(Count(name, task), 0) / 1000


def runs(task: str, counts: Mapping[Count, int]) -> int:
    """How many runs the sums of a task's times are of."""
    return sum(value for count, value in counts.items() if (count.name, count.task) == ("runs", task))
