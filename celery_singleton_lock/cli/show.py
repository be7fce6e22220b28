"""All that is known about one lock."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_singleton_lock import process_identity
from celery_singleton_lock.cli import command, target
from celery_singleton_lock.cli.line import Line, duration
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.inspector import MOST_RECORDS
from celery_singleton_lock.task import outcome

#: Messages that people are shown.
_SHOWN = 5


@click.command(cls=CeleryCommand, name="show")
@click.argument("words", nargs=-1, required=True, metavar="KEY | TASK [ARG]...")
@command.as_json
@click.pass_context
@handle_preload_options
def show(ctx: click.Context, words: tuple[str, ...], as_json: bool = False, **_: Any) -> None:
    """Show all that is known about one lock: that of KEY, or of a call of TASK.

    Each ARG is JSON or, where it is not valid JSON, a text; name=value gives a keyword argument.
    """
    with command.runtime_of(ctx) as runtime:
        key = target.key_of(ctx.obj.app, runtime.settings, words)
        state = runtime.store.inspect(key)
    lines = [Line.of(key, held) for held in state.held]
    if as_json:
        command.say_json(
            {
                "key": key,
                "held": [asdict(line) for line in lines],
                "fence": state.fence,
                "waiters": state.waiters,
                "done": [
                    {"message": record.message, "state": _state(record), "seconds": round(record.seconds, 3)}
                    for record in state.records
                ],
            }
        )
        return
    _say("key", key)
    for line, held in zip(lines, state.held, strict=True):
        _say("held by", line.holder + (f", slot {line.slot}" if line.slot else ""))
        _say("", _times(line, held))
    if not lines:
        _say("held by", "nobody")
    _say("scope", next((line.scope for line in lines if line.scope), "-"))
    _say("fence", "-" if state.fence is None else str(state.fence))
    _say("waiters", str(state.waiters))
    for record in state.records[:_SHOWN]:
        _say("done", f"message {record.message}: {_state(record)}, remembered for {duration(record.seconds)}")
    if (more := len(state.records) - _SHOWN) > 0:
        _say("", f"and {more} more" if len(state.records) < MOST_RECORDS else "and many more")


def _say(title: str, text: str) -> None:
    command.say(f"{title:<9}{text}".rstrip())


def _times(line: Line, held: Held) -> str:
    holder = held.holder
    if holder is None:
        return "the value was not written by this package" + ("; it never expires" if line.expires_in is None else "")
    over = "; that process is over" if process_identity.is_over(holder.process) else ""
    renewed = f" unless renewed (ttl {line.ttl:g} s)" if line.ttl else "; nobody renews it"
    return f"for {duration(line.held_for or 0)}, expires in {duration(line.expires_in or 0)}{renewed}{over}"


def _state(record: Record) -> str:
    ended, _ = outcome.read(record)
    return ended.state
