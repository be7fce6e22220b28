"""Counts of each task: all that happened to its locks so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from celery_singleton_lock.cli import command
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.keys.key import name_in


@dataclass(slots=True)
class TaskCounts:
    """The counts of one task, since they were begun.

    Attributes:
        task: its name.
        runs: how many executions, by how they ended.
        conflicts: how many met a held lock, by what was done.
        refused_ticks: how many of them were sent by beat, by the entry of its schedule.
        redeliveries: how many copies stood by or were dropped.
        renewals, losses, takeovers, blocked, overlaps: see `metrics.COUNTERS`.
        waited: seconds that executions waited for their lock, altogether.
        held: seconds for which they held it, altogether.
    """

    task: str
    runs: dict[str, int] = field(default_factory=dict)
    conflicts: dict[str, int] = field(default_factory=dict)
    refused_ticks: dict[str, int] = field(default_factory=dict)
    redeliveries: dict[str, int] = field(default_factory=dict)
    renewals: int = 0
    losses: int = 0
    takeovers: int = 0
    blocked: int = 0
    overlaps: int = 0
    waited: float = 0.0
    held: float = 0.0

    def __str__(self) -> str:
        ran = sum(self.runs.values())
        parts = [f"runs {ran}{_divided(self.runs)}"]
        if ran:
            parts.append(f"held {self.held / ran:.3g} s, waited {self.waited / ran:.3g} s each")
        for name in _DIVIDED[1:]:
            if found := getattr(self, name):
                parts.append(f"{name.replace('_', ' ')} {sum(found.values())}{_divided(found)}")
        parts += [f"{name} {count}" for name in _PLAIN if (count := getattr(self, name))]
        return f"{self.task}  " + "; ".join(parts)


_DIVIDED = tuple(counter.name for counter in metrics.COUNTERS if counter.label)
_PLAIN = tuple(counter.name for counter in metrics.COUNTERS if not counter.label)


@command.locks_command()
@command.as_json
def stats(ctx: click.Context, as_json: bool = False, **_: Any) -> None:
    """Show what the workers counted: runs, conflicts, losses and more, of each task; and whose copies are refused.

    The counts are those of the last seconds before, and live in the lock server until it forgets them.
    """
    with command.runtime_of(ctx) as runtime:
        journal = runtime.store.journal(runtime.settings.prefix, size=runtime.settings.journal)
        counts, refused = metrics.read(journal.counts()), journal.refused()
    for of_task in _by_task(counts):
        command.say_json(asdict(of_task)) if as_json else command.say(str(of_task))
    for key, in_a_row in sorted(refused.items(), key=lambda item: -item[1]):
        found = {"key": key, "name": name_in(key), "refused_in_a_row": in_a_row}
        text = f"{name_in(key)}  refused {in_a_row} times since a run under this key ended  [{key}]"
        command.say_json(found) if as_json else command.say(text)


def _by_task(counts: Mapping[metrics.Count, int]) -> list[TaskCounts]:
    found = {task: TaskCounts(task) for task in sorted({count.task for count in counts})}
    for count, value in sorted(counts.items()):
        if count.name in _DIVIDED:
            getattr(found[count.task], count.name)[count.label] = value
        elif count.name in _PLAIN:
            setattr(found[count.task], count.name, value)
    for task, of_task in found.items():
        of_task.waited, of_task.held = (metrics.sum_of(it, task, counts) for it in (metrics.WAITED, metrics.HELD))
    return [*found.values()]


def _divided(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if counts else ""
