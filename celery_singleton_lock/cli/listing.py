"""Lists the held locks, or those that `--task`, `--node` and `--older-than` choose: one line each, which fits into 100
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import click

from celery_singleton_lock import cleaned
from celery_singleton_lock.cli import command
from celery_singleton_lock.diagnosis.held import GONE, HeldLock, held_locks
from celery_singleton_lock.journal_entry import duration
from celery_singleton_lock.keys.key import shown_name
from celery_singleton_lock.runtime import Runtime

#: The width of a table of locks, and the most characters of a name, a label and a worker in one that would be wider.
WIDTH, NAME, LABEL, WORKER = 100, 30, 24, 14

#: The most characters of a holder's id.
_ID = 8


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
    locks = [
        lock
        for lock in held_locks(runtime.store, runtime.settings.prefix)
        if any(fnmatchcase(lock.name, name) for name in names)
        and (node is None or fnmatchcase(lock.holder.node or "", node))
        and (older_than is None or (lock.held_for is not None and lock.held_for >= older_than))
    ]
    if not locks:
        is_all = (task, node, older_than) == (None, None, None)
        click.echo("No lock is held." if is_all else "No such lock is held.", err=True)
    return locks


@command.locks_command("list", short_help="List the locks that are held.")
@options
@command.option("--keys", is_flag=True, help="Show the key of each lock, too.")
@command.as_json
def list_(ctx: click.Context, keys: bool, as_json: bool, **how: Any) -> None:
    """List the locks that are held, sorted by task and key: one line each, in which long texts are cut."""
    with command.runtime_of(ctx) as runtime:
        locks = selected(ctx, runtime, **how)
    if as_json:
        for lock in locks:
            command.say_json(lock.fields())
    elif locks:
        click.echo(locks_table(locks, keys=keys))
        if any(lock.is_left_behind for lock in locks):
            click.echo(f"(gone) {GONE}.", err=True)


def _names(app: Any, task: str) -> tuple[str, ...]:
    """The names of a task's locks: the task's name, and its `lock_name` if it has one."""
    app.loader.import_default_modules()
    lock_name = getattr(app.tasks.get(task), "lock_name", None)
    return (task,) if lock_name is None else (task, shown_name(lock_name))


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table, with each column as wide as its widest cell."""
    clean = [[cleaned.line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in clean)


def locks_table(locks: Sequence[HeldLock], *, keys: bool = False) -> str:
    """The locks for people; `keys`: with the key of each, which makes the table wide."""
    titles = ("TASK", "LABEL", "HOLDER", "WORKER", "FOR", "WAITING")
    rows = _narrow([titles, *map(_cells, locks)])
    if keys:
        rows = [[*row, key] for row, key in zip(rows, ["KEY", *(lock.key for lock in locks)], strict=True)]
    return columns(rows)


def refusals_table(refused: Sequence[tuple[str, str, int]]) -> str:
    """For the name and the label of each lock, how often copies were refused in a row."""
    return columns(
        _narrow([("TASK", "LABEL", "TIMES"), *((name, label, str(times)) for name, label, times in refused)])
    )


def _narrow(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The rows of locks, with what is too long cut: a name at its beginning, everything else at its end."""
    rows = [[cleaned.line(cell) for cell in row] for row in rows]
    if max(map(len, columns(rows).splitlines())) <= WIDTH:
        return rows
    return [
        (_end(name, NAME), _beginning(label, LABEL), *(_beginning(cell, WORKER) for cell in others))
        for name, label, *others in rows
    ]


def _cells(lock: HeldLock) -> tuple[str, ...]:
    return (
        lock.shown_name,
        lock.holder.label,
        _holder(lock),
        _where(lock),
        "-" if lock.held_for is None else duration(lock.held_for),
        str(lock.held.waiters),
    )


def _holder(lock: HeldLock) -> str:
    if lock.held.holder is None:
        return "foreign"
    return (lock.holder.task_id or ("beat" if lock.is_of_beat else "nobody"))[:_ID]


def _where(lock: HeldLock) -> str:
    """Where the holder runs, or why it does not."""
    if lock.is_queued:
        return f"({lock.scope})"
    state = "(gone)" if lock.is_left_behind else "(kept)" if lock.holder.task_id and not lock.holder.pid else ""
    return f"{state} {lock.holder.node or '-'}".lstrip()


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]
