"""Lists the held locks, and those of them that `--task`, `--node` and `--older-than` choose."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import click

from celery_singleton_lock import clock
from celery_singleton_lock.cli import command
from celery_singleton_lock.cli.layout import locks_table
from celery_singleton_lock.diagnosis.held import GONE, HeldLock, in_order
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.keys.key import shown_name
from celery_singleton_lock.runtime import Runtime

#: Seconds from one list to the next.
INTERVAL = 2.0

#: With a shorter interval, people could not read the list.
MIN_INTERVAL = 0.2


def options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options; `selected` takes them."""
    task = command.option(
        "--task", metavar="NAME", help="Only locks of this task or lock_name; `*` stands for any text."
    )
    node = command.option(
        "--node", metavar="NAME", help="Only locks that this worker or beat holds; `*` stands for any text."
    )
    older_than = command.option(
        "--older-than",
        metavar="SECONDS",
        type=command.Number(min=0),
        help="Only locks that have been held for at least this long.",
    )
    return task(node(older_than(function)))


def selected(
    ctx: click.Context, runtime: Runtime, *, task: str | None, node: str | None, older_than: float | None, **_: Any
) -> list[HeldLock]:
    """The held locks that are requested, in order; says so if there is none. None for an option that was not given.

    Args:
        ctx: the context of the command.
        runtime: the app's locks.
        task: the name of a task, or of locks, as a shell pattern.
        node: the node name of the worker, as a pattern.
        older_than: the shortest time in seconds for which a lock has been held.
    """
    names = _names(ctx.obj.app, task or "*")
    locks = in_order(
        lock
        for lock in (HeldLock.of(key, held) for key, held in runtime.store.all_held(runtime.settings.prefix))
        if any(fnmatchcase(lock.name, name) for name in names)
        and (node is None or fnmatchcase(lock.holder.node or "", node))
        and (older_than is None or (lock.held_for is not None and lock.held_for >= older_than))
    )
    if not locks:
        is_all = (task, node, older_than) == (None, None, None)
        click.echo("No lock is held." if is_all else "No such lock is held.", err=True)
    return locks


@command.locks_command("list", short_help="List the locks that are held.")
@options
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
        locks = selected(ctx, runtime, **how)
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


def _names(app: Any, task: str) -> tuple[str, ...]:
    """The names of a task's locks: the task's name, and its `lock_name` if it has one."""
    app.loader.import_default_modules()
    lock_name = getattr(app.tasks.get(task), "lock_name", None)
    return (task,) if lock_name is None else (task, shown_name(lock_name))
