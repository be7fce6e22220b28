"""Lists the held locks, with their holders, and how long they have held them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from celery_singleton_lock import clock
from celery_singleton_lock.cli import command, selection
from celery_singleton_lock.cli.layout import locks_table
from celery_singleton_lock.diagnosis.held import GONE
from celery_singleton_lock.errors import LockUnavailable

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
def list_(ctx: click.Context, keys: bool, watch: bool, interval: float, as_json: bool, **how: Any) -> None:
    """List the locks that are held, sorted by task and key: one line each, in which long texts are cut."""

    def show() -> None:
        locks = selection.selected(ctx, runtime, **how)
        if as_json:
            for lock in locks:
                command.say_json(lock.fields())
        elif locks:
            click.echo(locks_table(locks, keys=keys))
            if any(lock.is_left_behind for lock in locks):
                click.echo(f"(gone) {GONE}.", err=True)

    with command.runtime_of(ctx) as runtime:
        if not watch:
            show()
        else:
            _repeat(show, interval, clear=not as_json)


def _repeat(show: Callable[[], None], interval: float, *, clear: bool) -> None:
    try:
        while True:
            if clear:
                click.clear()
            try:
                show()
            except LockUnavailable as error:
                command.say(f"Error: {error}", err=True)  # The server may come back.
            clock.sleep(interval)
    except KeyboardInterrupt:
        return
