"""Counts of each task: all that happened to its locks so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from celery_singleton_lock.cli import command
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.keys.key import name_in


@command.locks_command()
@command.as_json
def stats(ctx: click.Context, as_json: bool, **_: Any) -> None:
    """Show what the workers counted: runs, conflicts, losses and more, of each task; and whose copies are refused.

    The counts are those of the last seconds before, and live in the lock server until it forgets them.
    """
    with command.runtime_of(ctx) as runtime:
        journal = runtime.store.journal(runtime.settings.prefix, size=runtime.settings.journal)
        counts, refused = metrics.read(journal.counts()), journal.refused()
    for fields in metrics.by_task(counts):
        command.say_json(fields) if as_json else command.say(_in_words(**fields))
    for key, in_a_row in sorted(refused.items(), key=lambda item: -item[1]):
        found = {"key": key, "name": name_in(key), "refused_in_a_row": in_a_row}
        text = f"{name_in(key)}  refused {in_a_row} times since a run under this key ended  [{key}]"
        command.say_json(found) if as_json else command.say(text)


def _in_words(task: str, runs: Mapping[str, int], waited: float, held: float, **others: Any) -> str:
    ran = sum(runs.values())
    parts = [f"runs {ran}{_divided(runs)}"]
    if ran:
        parts.append(f"held {held / ran:.3g} s, waited {waited / ran:.3g} s each")
    for name, count in others.items():
        if count and name in metrics.DIVIDED:
            parts.append(f"{name.replace('_', ' ')} {sum(count.values())}{_divided(count)}")
        elif count:
            parts.append(f"{name} {count}")
    return f"{task}  " + "; ".join(parts)


def _divided(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in counts.items())})" if counts else ""
