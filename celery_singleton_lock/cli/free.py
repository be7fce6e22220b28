"""Frees locks that were left behind, and with `--force` also others.

Only the holds that the operator has seen are freed: they are freed by their owner tokens, so a new holder that has the
lock by then keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import click

from celery_singleton_lock.cli import command, listing, target
from celery_singleton_lock.cli.listing import locks_table
from celery_singleton_lock.diagnosis.held import HeldLock, holds_of
from celery_singleton_lock.diagnosis.verdict import TO_FREE, Verdict, free, judged
from celery_singleton_lock.journal_entry import duration
from celery_singleton_lock.runtime import Runtime


def _how(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that both commands have."""
    force = command.option(
        "--force",
        is_flag=True,
        help="Free even what its holder may still need: others may start at once, and the holder is stopped when "
        "it notices, after at most a third of the ttl.",
    )
    yes = command.option("--yes", "-y", is_flag=True, help="Do not ask.")
    dry_run = command.option("--dry-run", is_flag=True, help="Only print what would be freed, and why.")
    return force(yes(dry_run(command.as_json(function))))


@command.locks_command(short_help="Free one lock whose holder is gone.")
@click.argument("words", nargs=-1, required=True, metavar="KEY | TASK [ARG]...")
@_how
def release(ctx: click.Context, words: tuple[str, ...], **how: Any) -> None:
    """Free one lock whose holder is gone: that of KEY, or of a call of TASK.

    Refuses while the holder may be alive. Workers are asked first; then it takes up to the ttl to find out.
    """
    with command.runtime_of(ctx) as runtime:
        key = target.key_of(ctx.obj.app, runtime.settings, words)
        locks = holds_of(runtime.store, key)
        if not locks:
            raise click.ClickException(f"{key} is not held")
        ctx.exit(_free_those_left_behind(ctx.obj.app, runtime, locks, **how))


@command.locks_command(short_help="Free the locks of a task or node.")
@listing.options
@_how
def clear(ctx: click.Context, **how: Any) -> None:
    """Free the locks of a task or a node whose holders are gone; leave all others.

    The lock that a message has held since it was sent is left, because the message may still come: it ends by itself in
    the time that is shown, or with --force.
    """
    if all(how[name] is None for name in ("task", "node", "older_than")):
        raise click.UsageError("choose the locks: --task NAME, --node NAME ('*' for all), or --older-than SECONDS")
    with command.runtime_of(ctx) as runtime:
        if locks := listing.selected(ctx, runtime, **how):
            ctx.exit(_free_those_left_behind(ctx.obj.app, runtime, locks, **how))


def _free_those_left_behind(
    app: Any,
    runtime: Runtime,
    locks: Sequence[HeldLock],
    *,
    force: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **_: Any,
) -> int:
    """Free the locks that may be freed, and print what happened; returns the exit status: 1 if any is still held."""
    if not (yes or dry_run):
        click.echo(locks_table(locks), err=True)
        click.confirm(_question(len(locks), force), abort=True, err=True)
    left = 0
    for lock, verdict in _judged(app, runtime, locks, force):
        why, is_free, may_be_freed = verdict.value, verdict is Verdict.ENDED, verdict in TO_FREE
        if verdict is Verdict.QUEUED:
            why = f"it ends by itself in {duration(lock.held.remaining)}: {why}"
        if may_be_freed and dry_run:
            why = f"would be freed: {why}"
        elif may_be_freed:
            is_free = free(runtime, lock)
            why = why if is_free else "it has changed hands meanwhile"
        left += not (is_free or (may_be_freed and dry_run))
        if as_json:
            command.say_json({**lock.fields(), "freed": is_free, "why": why})
        else:
            command.say(f"{'freed' if is_free else 'left '}  {lock}  {lock.holder_in_words()}: {why}")
    return 1 if left else 0


def _question(count: int, force: bool) -> str:
    which = "this lock" if count == 1 else f"these {count} locks"
    return f"Free {which} even if the holder may be alive?" if force else f"Free {which} if the holder is gone?"


def _judged(app: Any, runtime: Runtime, locks: Sequence[HeldLock], force: bool) -> Iterable[tuple[HeldLock, Verdict]]:
    if force:
        return [(lock, Verdict.FOREIGN if lock.held.holder is None else Verdict.FORCED) for lock in locks]
    return judged(runtime.store, app, locks, say=partial(click.echo, err=True))
