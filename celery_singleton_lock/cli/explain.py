"""Why a call has its key, where its options come from, and who holds the lock."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import takewhile
from typing import Any

import click

from celery_singleton_lock.cli import command, target
from celery_singleton_lock.diagnosis.held import HeldLock, holds_of
from celery_singleton_lock.diagnosis.tasks import lock_key_in_words
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.options.rules import OPTIONS
from celery_singleton_lock.options.task import options_for
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task.singleton_task import SingletonTask


@command.locks_command(short_help="Show a call's key, and who holds its lock.")
@click.argument("call", nargs=-1, required=True, metavar="TASK [ARG]...")
@command.as_json
def explain(ctx: click.Context, call: tuple[str, ...], as_json: bool, **_: Any) -> None:
    """Show who holds the lock of a call, its key, what that was made from, and which options were set, and where.

    Each ARG is JSON, or else a text; name=value is a keyword argument.
    """
    with command.runtime_of(ctx, memory=True) as runtime:
        task, args, kwargs = target.call_of(ctx.obj.app, call)
        made, options = task.call_key(runtime.settings, None, args, kwargs), _options_set(task, runtime)
    parts = {name: asdict(part) for name, part in made.parts().items()}
    lock_name, lock_key = task.lock_name or task.name, lock_key_in_words(task)
    locks, unknown = _held(runtime, made.key)
    if as_json:
        about = {"task": task.name, "key": made.key, "lock_name": lock_name, "lock_key": lock_key, "counts": parts}
        held_by = None if unknown else [lock.fields() for lock in locks]
        click.echo(json.dumps({**about, "options": options, "held_by": held_by}, default=str))
        return
    holders = "; ".join(f"{lock.holder_in_words()}, {lock.end_in_words()}" for lock in locks)
    for title, lines in (
        ("task", [task.name]),
        ("held by", [unknown or holders or "nobody"]),
        ("key", [made.key]),
        ("lock_name", [lock_name] if lock_name != task.name else []),
        ("lock_key", [lock_key]),
        ("of these", [f"{name} = {it['value']}  as  {it['serialized']}" for name, it in parts.items()] or ["none"]),
        ("options", [f"{name} = {it['value']!r}  from {it['source']}" for name, it in options.items()]),
    ):
        for index, line in enumerate(lines):
            command.say(f"{'' if index else title:<11}{line}")


def _held(runtime: Runtime, key: str) -> tuple[list[HeldLock], str]:
    """The holds of the lock, or why they are unknown."""
    if runtime.settings.backend.in_memory:
        return [], command.IN_MEMORY
    try:
        return holds_of(runtime.store, key), ""
    except LockUnavailable as error:
        return [], f"unknown: {error}"


def _options_set(task: Any, runtime: Runtime) -> dict[str, dict[str, Any]]:
    """The options that somebody has set: the value of each, and where it comes from."""
    values, found = options_for(task, runtime.settings), {}
    for name, option in OPTIONS.items():
        value = getattr(values, name)
        if source := _source(task, option.attribute, option.setting):
            found[option.attribute] = {"value": getattr(value, "__qualname__", value), "source": source}
    return found


def _source(task: Any, attribute: str, setting: str) -> str:
    """Where an option was set; an empty text if it has its default."""
    own = task.__class__  # Not type(task): this may be Celery's proxy for a task.
    classes = takewhile(lambda cls: cls is not SingletonTask, own.__mro__)
    setter = next((it for it in (task, *classes) if vars(it).get(attribute) is not None), None)
    if setter is not None:
        return "the task" if setter in (task, own) else f"its class {setter.__qualname__}"
    return f"the setting {setting}" if task.app.conf.get(setting) is not None else ""
