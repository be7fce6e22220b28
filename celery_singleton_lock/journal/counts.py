"""The journal's counts: their names, what each of them counts, and how to read them."""

from __future__ import annotations

import json
from collections import Counter as Counted
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock.journal_entry import LOST, REFUSALS, SUPERSEDED, Entry, Kind


class Counter(NamedTuple):
    """A number that only grows.

    Attributes:
        label: the label that divides it, besides the task; '' for none.
    """

    name: str
    label: str
    text: str


#: In the order in which they are shown.
COUNTERS = (
    Counter("runs", "outcome", "Executions that held their lock, by how they ended."),
    Counter("conflicts", "policy", "Messages that met a held lock, by what was done about it."),
    Counter("duplicates", "policy", "Calls that met another message's lock when sent, by what the caller got."),
    Counter(
        "redeliveries",
        "kind",
        "Copies of a message that stood by or were dropped because another one was running, or had run.",
    ),
    Counter("joined", "", "Executions that joined another one and ended as it did."),
    Counter("superseded", "", "Executions that a newer one superseded: it came while they waited or ran."),
    Counter("refused_ticks", "", "Ticks of beat's schedule that were refused."),
    Counter("renewals", "", "Renewals of the locks of executions."),
    Counter("losses", "", "Executions that lost their lock while they ran."),
    Counter("takeovers", "", "Locks that were freed because the process that held them had died."),
    Counter("blocked", "", "Warnings that copies were refused many times in a row."),
)

#: The sums of times: of all runs, in milliseconds.
TIMES = {"waited": "Seconds until an execution had its lock.", "held": "Seconds for which a lock was held."}

#: The counter of each kind of entry but a run; of those that are not here, it is "conflicts".
_OF_KIND: Mapping[Kind, str] = {
    "free": "takeovers",
    "joined": "joined",
    "superseded": "superseded",
    "stand-by": "redeliveries",
    "drop": "redeliveries",
    "repeat": "redeliveries",
    "duplicate": "duplicates",
}

#: The counters of how a run ended, besides "runs".
_OF_OUTCOME = {LOST: "losses", SUPERSEDED: "superseded"}


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
        if outcome in _OF_OUTCOME:
            yield Count(_OF_OUTCOME[outcome], task), 1
    else:
        name = _OF_KIND.get(kind, "conflicts")
        label = {"conflicts": kind, "redeliveries": kind, "duplicates": outcome}.get(name, "")
        yield Count(name, task, label), 1
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
    tasks: defaultdict[str, dict[str, Any]] = defaultdict(_nothing)
    for (name, task, label), value in sorted(counts.items()):
        found = tasks[task].get(name)
        if isinstance(found, dict):
            found[label] = value
        elif found is not None:
            tasks[task][name] = value / 1000 if name in TIMES else value
    for task, fields in sorted(tasks.items()):
        yield {"task": task, **fields}


def _nothing() -> dict[str, Any]:
    return {**{it.name: {} if it.label else 0 for it in COUNTERS}, **dict.fromkeys(TIMES, 0.0)}


def in_words(counts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The counts of a task that are not zero, by their names; without times."""
    for counter in COUNTERS:
        if count := counts.get(counter.name):
            yield counter.name.replace("_", " "), divided(count) if counter.label else str(count)


def divided(counts: Mapping[str, int]) -> str:
    """A sum, and its parts by label; a single part is the sum."""
    each = (label if len(counts) == 1 else f"{label} {count}" for label, count in counts.items())
    return f"{sum(counts.values())} ({', '.join(each)})" if counts else "0"
