"""Shows the counts of each task: all that has happened to its locks so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from celery_singleton_lock.cli import command, layout
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal.words import seconds
from celery_singleton_lock.keys.key import name_in

_COLUMNS = ("TASK", "RUNS", "HELD EACH", "WAITED EACH", "OTHERWISE")


@command.locks_command(short_help="Show what was counted for each task.")
@command.as_json
def stats(ctx: click.Context, as_json: bool, **_: Any) -> None:
    """Show what the workers counted for each task: runs, conflicts, losses and more, and copies refused in a row.

    Counts lag behind by up to five seconds. The lock server keeps them for 30 days after the last one.
    """
    with command.runtime_of(ctx) as runtime:
        journal = runtime.store.journal(runtime.settings.prefix, size=runtime.settings.journal)
        counts, refused = metrics.read(journal.counts()), journal.refused()
        entries = journal.entries(since=0.0) if refused else ()
        labels = {entry.key: entry.label for entry in entries if entry.label and entry.key in refused}
    tasks = [*metrics.by_task(counts)]
    in_a_row = sorted(refused.items(), key=lambda item: -item[1])
    if as_json:
        for fields in tasks:
            command.say_json(fields)
        for key, times in in_a_row:
            fields = {"key": key, "name": name_in(key), "label": labels.get(key, ""), "refused_in_a_row": times}
            command.say_json(fields)
        return
    if not tasks:
        click.echo("Nothing has been counted yet.", err=True)
    else:
        click.echo(layout.columns([_COLUMNS, *(_cells(**fields) for fields in tasks)]))
    if in_a_row:
        click.echo("\nCopies refused in a row, since the last run under the lock ended:")
        click.echo(layout.refusals_table([(name_in(key), labels.get(key, ""), times) for key, times in in_a_row]))


def _cells(task: str, runs: Mapping[str, int], waited: float, held: float, **others: Any) -> tuple[str, ...]:
    ran = sum(runs.values())
    each = (seconds(held / ran), seconds(waited / ran)) if ran else ("-", "-")
    otherwise = "; ".join(f"{name} {count}" for name, count in metrics.in_words(others))
    return task, metrics.divided(runs), *each, otherwise
