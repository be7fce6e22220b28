"""Draws a picture of what happened."""

from __future__ import annotations

from itertools import chain
from typing import Any

import click

from celery_singleton_lock import clock
from celery_singleton_lock.cli import command
from celery_singleton_lock.journal.timeline import Window, page, running

#: Seconds before the first entry that the picture shows.
MARGIN = 1.0


@command.locks_command(short_help="Draw who held which lock when.")
@command.option(
    "--minutes",
    type=command.Number(0.01, 43_200),
    default=10.0,
    show_default=True,
    help="How far to look back; the journal may not reach that far.",
)
@command.option(
    "--output",
    type=click.File("w", encoding="utf-8", lazy=True),
    default="timeline.html",
    show_default=True,
    help="The file to write; - for standard output.",
)
def timeline(ctx: click.Context, minutes: float, output: Any, **_: Any) -> None:
    """Draw who held which lock when, and what happened to the copies, on an HTML page."""
    with command.runtime_of(ctx) as runtime:
        settings, store = runtime.settings, runtime.store
        if not settings.journal:
            raise click.ClickException("there is no journal: setting singleton_lock_journal is 0")
        journal = store.journal(settings.prefix, size=settings.journal)
        now = clock.wall()
        window = Window(now - minutes * 60, now)
        held = [running(key, held, now) for key, held in store.all_held(settings.prefix)]
        entries = [*chain(journal.entries(since=window.since), (entry for entry in held if entry is not None))]
    if entries:  # The picture begins with them.
        window = Window(max(window.since, min(it.began - it.waited for it in entries) - MARGIN), now)
    output.write(page(f"Locks of {ctx.obj.app.main or 'the app'}", entries, window))
    if output.name != "-":
        command.say(f"{len(entries)} entries in {output.name}")
