"""Freeing locks that were left behind, and with `--force` those that were not.

What the operator has seen is freed, and nothing else: it is freed by its owner, so that nothing happens to whoever has
the lock by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from celery_singleton_lock.cli import command, selection, target
from celery_singleton_lock.cli.held import HeldLock, in_order, table
from celery_singleton_lock.cli.selection import Selection
from celery_singleton_lock.cli.verdict import TO_FREE, Verdict, longest_watch, verdicts
from celery_singleton_lock.runtime import Runtime


def _how(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that both commands have."""
    force = command.option(
        "--force",
        is_flag=True,
        help="Free also what its holder may still need: others may start at once, and the holder is stopped when it "
        "notices, after a third of the ttl at most.",
    )
    yes = command.option("--yes", "-y", is_flag=True, help="Do not ask.")
    return force(yes(command.as_json(function)))


@command.locks_command("release")
@click.argument("words", nargs=-1, required=True, metavar="KEY | TASK [ARG]...")
@_how
def release(ctx: click.Context, words: tuple[str, ...], force: bool, yes: bool, as_json: bool, **_: Any) -> None:
    """Free one lock whose holder is gone: that of KEY, or of a call of TASK.

    Refuses while the holder may be alive, which it may take a while to find out: see docs/operating.md.
    """
    with command.runtime_of(ctx) as runtime:
        key = target.key_of(ctx.obj.app, runtime.settings, words)
        locks = [HeldLock.of(key, held) for held in runtime.store.inspect(key).held]
        if not locks:
            raise click.ClickException(f"{key} is not held")
        ctx.exit(_free(runtime, locks, force=force, yes=yes, as_json=as_json))


@command.locks_command("clear")
@selection.options
@_how
def clear(ctx: click.Context, selection: Selection, force: bool, yes: bool, as_json: bool, **_: Any) -> None:
    """Free the locks of a task or of a node whose holders are gone, and leave the others."""
    if not selection:
        raise click.UsageError("say of which locks: --task NAME, --node NAME, --older-than SECONDS ('*' for all nodes)")
    with command.runtime_of(ctx) as runtime:
        locks = in_order(selection.of(runtime))
        if not locks:
            click.echo("No lock is held of these.", err=True)
            return
        ctx.exit(_free(runtime, locks, force=force, yes=yes, as_json=as_json))


def _free(runtime: Runtime, locks: Sequence[HeldLock], *, force: bool, yes: bool, as_json: bool) -> int:
    """Free what may be freed, and say what was; the exit status: 1 where one of the locks is still held."""
    if not yes:
        click.echo(table(locks), err=True)
        click.confirm(_question(len(locks), force), abort=True, err=True)
    left = 0
    for lock, verdict in _judged(runtime, locks, force):
        why, is_free = verdict.value, verdict is Verdict.ENDED
        if verdict in TO_FREE:
            ttl = lock.ttl or runtime.settings.defaults["ttl"]
            is_free = bool(runtime.store.free(lock.held.hold(lock.key, ttl=ttl, limit=lock.slot + 1)))
            why = why if is_free else "it has changed hands meanwhile"
        left += not is_free
        if as_json:
            command.say_json({**lock.fields(), "freed": is_free, "why": why})
        else:
            command.say(f"{'freed' if is_free else 'left '}  {lock.cells()[0]}  {lock.holder_in_words()}: {why}")
    return 1 if left else 0


def _question(count: int, force: bool) -> str:
    if count == 1:
        return "Free it though its holder may be alive?" if force else "Free it if its holder is gone?"
    return f"Free these {count} locks though holders may be alive?" if force else f"Free those of {count} left behind?"


def _judged(runtime: Runtime, locks: Sequence[HeldLock], force: bool) -> Iterator[tuple[HeldLock, Verdict]]:
    if force:
        for lock in locks:
            yield lock, Verdict.FOREIGN if lock.held.holder is None else Verdict.FORCED
        return
    seconds = longest_watch(lock.held for lock in locks)
    if seconds > 0:
        click.echo(f"Watching whether it is renewed, for {seconds:.0f} s at most.", err=True)
    yield from verdicts(runtime.store, locks)
