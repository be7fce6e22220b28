"""What the journal knows: its counts, for people and for Prometheus, and a picture of what happened."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import click

from celery_singleton_lock import clock
from celery_singleton_lock.cli import command
from celery_singleton_lock.cli.listing import columns, refusals_table
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal.timeline import Window, page, running
from celery_singleton_lock.journal_entry import seconds
from celery_singleton_lock.keys.key import name_in

#: The columns of the table of counts.
_COLUMNS = ("TASK", "RUNS", "HELD EACH", "WAITED EACH", "OTHERWISE")

#: Seconds before the first entry that the picture shows.
MARGIN = 1.0


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
        click.echo(columns([_COLUMNS, *(_cells(**fields) for fields in tasks)]))
    if in_a_row:
        click.echo("\nCopies refused in a row, since the last run under the lock ended:")
        click.echo(refusals_table([(name_in(key), labels.get(key, ""), times) for key, times in in_a_row]))


def _cells(task: str, runs: Mapping[str, int], waited: float, held: float, **others: Any) -> tuple[str, ...]:
    ran = sum(runs.values())
    each = (seconds(held / ran), seconds(waited / ran)) if ran else ("-", "-")
    otherwise = "; ".join(f"{name} {count}" for name, count in metrics.in_words(others))
    return task, metrics.divided(runs), *each, otherwise


@command.locks_command(short_help="Serve metrics to Prometheus.")
@command.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9808,
    show_default=True,
    help="The port to listen on; 0 picks a free one.",
)
@command.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
def exporter(ctx: click.Context, port: int, host: str, **_: Any) -> None:
    """Serve the counts of `stats`, and what is held now, to Prometheus, until Ctrl-C. Needs the extra "prometheus"."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from celery_singleton_lock.contrib.prometheus import LockCollector
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    with command.runtime_of(ctx):
        registry = CollectorRegistry()
        registry.register(LockCollector(ctx.obj.app))
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error
        click.echo(f"metrics at http://{host}:{server.server_port}/metrics")
        try:
            thread.join()
        except KeyboardInterrupt:
            server.shutdown()


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
