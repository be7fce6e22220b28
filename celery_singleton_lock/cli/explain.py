"""Why a call has its key, where its options come from, and who holds the lock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from celery_singleton_lock.cli import command, target
from celery_singleton_lock.diagnosis.explain import DEFAULT, Explanation, differences
from celery_singleton_lock.diagnosis.explain import explain as explained
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.runtime import Runtime

#: The separator between two calls.
_AND = "vs"


@command.locks_command(short_help="Show a call's key, and who holds its lock.")
@click.argument("call", nargs=-1, required=True, metavar=f"TASK [ARG]... [{_AND} TASK [ARG]...]")
@command.as_json
def explain(ctx: click.Context, call: tuple[str, ...], as_json: bool, **_: Any) -> None:
    """Show who holds the lock of a call, its key, what that was made from, and which options were set, and where.

    Each ARG is JSON, or else a text; name=value is a keyword argument. With two calls: why their keys differ, or what
    differs and does not count. The second one may leave out the task, if it is the same.
    """
    with command.runtime_of(ctx, memory=True) as runtime:
        calls = [target.call_of(ctx.obj.app, words) for words in _of_one_task(ctx.obj.app, _calls(call))]
        explanations = [explained(task, runtime.settings, args, kwargs) for task, args, kwargs in calls]
    for index, explanation in enumerate(explanations):
        locks, unknown = _held(runtime, explanation)
        if as_json:
            held_by = None if unknown else [_holder(lock) for lock in locks]
            click.echo(json.dumps({**asdict(explanation), "held_by": held_by}, default=str))
        else:
            holders = "; ".join(f"{lock.holder_in_words()}, {lock.end_in_words()}" for lock in locks)
            if index:
                click.echo()
            _show(explanation, unknown or holders or "nobody")
    if len(explanations) == 2:
        _compare(*explanations, as_json=as_json)


def _calls(words: Sequence[str]) -> list[Sequence[str]]:
    middle = words.index(_AND) if _AND in words else len(words)
    calls = [words[:middle], *([words[middle + 1 :]] if _AND in words else ())]
    if _AND in calls[-1] or not all(calls):
        raise click.UsageError(f"give one call, or two with {_AND} between them")
    return calls


def _of_one_task(app: Any, calls: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The calls, with the task of the first one where the second begins with an argument."""
    first, *others = calls
    app.loader.import_default_modules()
    return [first, *(call if target.is_like_a_task(app, call[0]) else [first[0], *call] for call in others)]


def _held(runtime: Runtime, explanation: Explanation) -> tuple[list[HeldLock], str]:
    """The holds of the lock, or why they are unknown."""
    if runtime.settings.backend.in_memory:
        return [], command.IN_MEMORY
    try:
        return [HeldLock.of(explanation.key, held) for held in runtime.store.held(explanation.key)], ""
    except LockUnavailable as error:
        return [], f"unknown: {error}"


def _holder(lock: HeldLock) -> dict[str, Any]:
    known = asdict(lock.held.holder) if lock.held.holder else {}
    return {**known, "expires_in": lock.expires_in}


def _show(explanation: Explanation, holders: str) -> None:
    was_set = [option for option in explanation.options if option.source != DEFAULT]
    for title, lines in (
        ("task", [explanation.task]),
        ("held by", [holders]),
        ("key", [explanation.key]),
        ("lock_name", [explanation.lock_name] if explanation.lock_name != explanation.task else []),
        ("lock_key", [explanation.lock_key]),
        ("arguments", [_argument(explanation, name) for name in explanation.arguments]),
        (
            "of these",
            [f"{name} = {it.value}  as  {it.serialized}" for name, it in explanation.counts.items()] or ["none"],
        ),
        ("options", [f"{each.option} = {each.value!r}  from {each.source}" for each in was_set]),
    ):
        for index, line in enumerate(lines):
            command.say(f"{'' if index else title:<11}{line}")


def _argument(explanation: Explanation, name: str) -> str:
    return f"{name} = {explanation.arguments[name]}{'  by default' if name in explanation.defaults else ''}"


def _compare(one: Explanation, other: Explanation, *, as_json: bool) -> None:
    same, reasons = one.key == other.key, differences(one, other)
    if as_json:
        command.say_json({"same": same, "differences": reasons})
        return
    said = "the same key: they exclude each other" if same else "different keys: they do not exclude each other"
    click.echo(f"\n{said}")
    for reason in reasons:
        command.say(f"  {reason}")
