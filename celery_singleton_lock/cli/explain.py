"""Why a call has its key, where its options come from, and who holds the lock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from celery_singleton_lock.cli import arguments, command, target
from celery_singleton_lock.diagnosis.explain import Explanation, differences
from celery_singleton_lock.diagnosis.explain import explain as explained
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.runtime import Runtime

#: The separator between two calls.
_AND = "--"


# Options come before the task, so that everything after it is left as it is, including `--`.
@command.locks_command(
    context_settings={"allow_interspersed_args": False}, short_help="Show a call's key, and who holds its lock."
)
@command.as_json
@click.argument("call", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TASK [ARG]... [-- TASK [ARG]...]")
def explain(ctx: click.Context, call: tuple[str, ...], as_json: bool, **_: Any) -> None:
    """Show the key of a call, what it was made from, where the task's options come from, and who holds the lock.

    Each ARG is JSON, or else a text; name=value is a keyword argument. With two calls: why their keys differ, or what
    differs and does not count. The second one may leave out the task, if it is the same.
    """
    with command.runtime_of(ctx, memory=True) as runtime:
        explanations = [_explained(ctx.obj.app, runtime, words) for words in _of_one_task(ctx.obj.app, _calls(call))]
    for explanation in explanations:
        locks, unknown = _held(runtime, explanation)
        if as_json:
            held_by = None if unknown else [_holder(lock) for lock in locks]
            click.echo(json.dumps({**asdict(explanation), "held_by": held_by}, default=str))
        else:
            _show(explanation)
            holders = "; ".join(f"{lock.holder_in_words()}, {lock.end_in_words()}" for lock in locks)
            command.say(f"held by    {unknown or holders or 'nobody'}")
            click.echo()
    if len(explanations) == 2:
        _compare(*explanations, as_json=as_json)


def _calls(words: Sequence[str]) -> list[Sequence[str]]:
    calls: list[list[str]] = [[]]
    for word in words:
        if word == _AND:
            calls.append([])
        elif word.startswith("--"):
            raise click.UsageError(
                f"put options before the task; for a text that begins with --, write '{json.dumps(word)}'"
            )
        else:
            calls[-1].append(word)
    if len(calls) > 2 or not all(calls):
        raise click.UsageError(f"give one call, or two with {_AND} between them")
    return [*calls]


def _of_one_task(app: Any, calls: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """The calls, with the task of the first one where the second begins with an argument."""
    first, *others = calls
    app.loader.import_default_modules()
    return [first, *(call if target.is_like_a_task(app, call[0]) else [first[0], *call] for call in others)]


def _explained(app: Any, runtime: Runtime, words: Sequence[str]) -> Explanation:
    name, *rest = words
    task = target.exclusive_task(app, name)
    args, kwargs = arguments.parse(rest)
    return explained(task, runtime.settings, args, kwargs)


def _held(runtime: Runtime, explanation: Explanation) -> tuple[list[HeldLock], str]:
    """The lock in each slot that is held, or why that is unknown."""
    if runtime.settings.backend.in_memory:
        return [], command.IN_MEMORY
    limit = next(option.value for option in explanation.options if option.option == "lock_limit")
    try:
        return [HeldLock.of(explanation.key, held) for held in runtime.store.held(explanation.key, limit=limit)], ""
    except LockUnavailable as error:
        return [], f"unknown: {error}"


def _holder(lock: HeldLock) -> dict[str, Any]:
    known = asdict(lock.held.holder) if lock.held.holder else {}
    return {**known, "expires_in": lock.expires_in}


def _show(explanation: Explanation) -> None:
    command.say(f"task       {explanation.task}")
    command.say(f"key        {explanation.key}")
    command.say(f"lock_name  {explanation.lock_name}")
    command.say(f"lock_key   {explanation.lock_key}")
    for title, lines in (
        ("arguments", [_argument(explanation, name) for name in explanation.arguments]),
        ("of these", [f"{name} = {part.value}  as  {part.serialized}" for name, part in explanation.counts.items()]),
        ("options", [f"{each.option} = {each.value!r}  from {each.source}" for each in explanation.options]),
    ):
        for index, line in enumerate(lines or ["none"]):
            command.say(f"{'' if index else title:<11}{line}")


def _argument(explanation: Explanation, name: str) -> str:
    return f"{name} = {explanation.arguments[name]}{'  by default' if name in explanation.defaults else ''}"


def _compare(one: Explanation, other: Explanation, *, as_json: bool) -> None:
    same, reasons = one.key == other.key, differences(one, other)
    if as_json:
        command.say_json({"same": same, "differences": reasons})
        return
    click.echo("the same key: they exclude each other" if same else "different keys: they do not exclude each other")
    for reason in reasons:
        command.say(f"  {reason}")
