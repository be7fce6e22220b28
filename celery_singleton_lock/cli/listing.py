"""Lists the held locks, with their holders, and how long they have held them."""

from __future__ import annotations

from typing import Any

import click

from celery_singleton_lock import clock
from celery_singleton_lock.cli import command, selection
from celery_singleton_lock.cli.layout import locks_table
from celery_singleton_lock.cli.selection import Selection
from celery_singleton_lock.diagnosis.held import GONE
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.runtime import Runtime

#: Seconds from one list to the next.
INTERVAL = 2.0

#: With a shorter interval, people could not read the list.
MIN_INTERVAL = 0.2


@command.locks_command("list", short_help="List the locks that are held.")
@selection.options
@command.option("--keys", is_flag=True, help="Show the key of each lock, too.")
@command.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@command.option(
    "--interval",
    metavar="SECONDS",
    type=command.Number(min=MIN_INTERVAL),
    default=INTERVAL,
    show_default=True,
    help="Seconds between two lists, with --watch.",
)
@command.as_json
def list_(ctx: click.Context, selection: Selection, watch: bool, interval: float, **how: Any) -> None:
    """List the locks that are held, sorted by task and key: one line each, in which long texts are cut."""
    with command.runtime_of(ctx) as runtime:
        if watch:
            _watch(runtime, selection, interval, **how)
        else:
            _list(runtime, selection, **how)


def _list(runtime: Runtime, selection: Selection, *, keys: bool, as_json: bool, **_: Any) -> None:
    locks = selection.of(runtime)
    if as_json:
        for lock in locks:
            command.say_json(lock.fields())
    elif locks:
        click.echo(locks_table(locks, keys=keys))
        if any(lock.is_left_behind for lock in locks):
            click.echo(f"(gone) {GONE}.", err=True)
    else:
        click.echo(selection.none_in_words() if selection else "No lock is held.", err=True)


def _watch(runtime: Runtime, selection: Selection, interval: float, *, as_json: bool, **how: Any) -> None:
    try:
        while True:
            if not as_json:
                click.clear()
            try:
                _list(runtime, selection, as_json=as_json, **how)
            except LockUnavailable as error:
                command.say(f"Error: {error}", err=True)  # The server may come back.
            clock.sleep(interval)
    except KeyboardInterrupt:
        return
