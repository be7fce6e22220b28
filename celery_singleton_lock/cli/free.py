"""Freeing locks that were left behind, and with `--force` those that were not.

What was shown to the operator is freed, and nothing else: a release names the owner, so that it does nothing to whoever
has the lock by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_singleton_lock.cli import command, selection, target
from celery_singleton_lock.cli.line import COLUMNS, Line
from celery_singleton_lock.cli.selection import Selection
from celery_singleton_lock.cli.table import table
from celery_singleton_lock.cli.verdict import TO_FREE, Verdict, longest_watch, verdicts
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held


def _how(function: Callable[..., Any]) -> Callable[..., Any]:
    """How both commands may be told to go about it."""
    force = command.option(
        "--force",
        is_flag=True,
        help="Free also what its holder may still need: others may start at once, and the holder is stopped when it "
        "notices, after a third of the ttl at most.",
    )
    yes = command.option("--yes", "-y", is_flag=True, help="Do not ask.")
    return force(yes(command.as_json(function)))


@click.command(cls=CeleryCommand, name="release")
@click.argument("words", nargs=-1, required=True, metavar="KEY | TASK [ARG]...")
@_how
@click.pass_context
@handle_preload_options
def release(
    ctx: click.Context,
    words: tuple[str, ...],
    force: bool = False,
    yes: bool = False,
    as_json: bool = False,
    **_: Any,
) -> None:
    """Free one lock whose holder is gone: that of KEY, or of a call of TASK.

    Refuses while the holder may be alive, which it may take a while to find out: see docs/operating.md.
    """
    with command.runtime_of(ctx) as runtime:
        key = target.key_of(ctx.obj.app, runtime.settings, words)
        holds = [(Line.of(key, held), held) for held in runtime.store.inspect(key).held]
        if not holds:
            raise click.ClickException(f"{key} is not held")
        ctx.exit(_free(runtime, holds, force=force, yes=yes, as_json=as_json))


@click.command(cls=CeleryCommand, name="clear")
@selection.options
@_how
@click.pass_context
@handle_preload_options
def clear(
    ctx: click.Context,
    selection: Selection,
    force: bool = False,
    yes: bool = False,
    as_json: bool = False,
    **_: Any,
) -> None:
    """Free the locks of a task or of a node whose holders are gone, and leave the others."""
    if not selection:
        raise click.UsageError("say of which locks: --task NAME, --node NAME, --older-than SECONDS ('*' for all nodes)")
    with command.runtime_of(ctx) as runtime:
        holds = {(line.key, line.slot): (line, held) for line, held in selection.of(runtime)}
        if not holds:
            click.echo("No lock is held of these.", err=True)
            return
        ordered = [holds[place] for place in sorted(holds)]
        ctx.exit(_free(runtime, ordered, force=force, yes=yes, as_json=as_json))


def _free(runtime: Runtime, holds: Sequence[tuple[Line, Held]], *, force: bool, yes: bool, as_json: bool) -> int:
    """Free what may be freed, and say what was; the exit status: 1 where one of the locks is still held."""
    if not yes:
        click.echo(table(COLUMNS, [line.cells for line, _ in holds]), err=True)
        click.confirm(_question(len(holds), force), abort=True, err=True)
    left = 0
    for line, held, verdict in _judged(runtime, holds, force):
        why, is_free = verdict.value, verdict is Verdict.ENDED
        if verdict in TO_FREE:
            ttl = line.ttl or runtime.settings.defaults["ttl"]
            is_free = runtime.store.free(held.hold(line.key, ttl=ttl, limit=line.slot + 1))
            why = why if is_free else "it has changed hands meanwhile"
        left += not is_free
        if as_json:
            command.say_json({**asdict(line), "freed": is_free, "why": why})
        else:
            command.say(f"{'freed' if is_free else 'left '}  {line.cells[0]}  {line.holder}: {why}")
    return 1 if left else 0


def _question(count: int, force: bool) -> str:
    if count == 1:
        return "Free it though its holder may be alive?" if force else "Free it if its holder is gone?"
    return f"Free these {count} locks though holders may be alive?" if force else f"Free those of {count} left behind?"


def _judged(runtime: Runtime, holds: Sequence[tuple[Line, Held]], force: bool) -> Iterator[tuple[Line, Held, Verdict]]:
    if force:
        for line, held in holds:
            yield line, held, Verdict.FOREIGN if held.holder is None else Verdict.FORCED
        return
    seconds = longest_watch(held for _, held in holds)
    if seconds > 0:
        click.echo(f"Watching whether it is renewed, for {seconds:.0f} s at most.", err=True)
    lines = {(line.key, line.slot): line for line, _ in holds}
    for key, held, verdict in verdicts(runtime.store, [(line.key, held) for line, held in holds]):
        yield lines[key, held.slot or 0], held, verdict
