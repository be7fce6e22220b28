"""Why a call has its key, where its options come from, and who holds the lock."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from celery_singleton_lock._celery import with_dumped_models
from celery_singleton_lock.cli import command, target
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.diagnosis.tasks import lock_key_in_words
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.keys.arguments import bind
from celery_singleton_lock.keys.key import KeyPart
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import OPTIONS
from celery_singleton_lock.options.task import options_for
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task.singleton_task import SingletonTask

#: Where the value of an option comes from that nobody has set.
DEFAULT = "the default"


@command.locks_command(short_help="Show a call's key, and who holds its lock.")
@click.argument("call", nargs=-1, required=True, metavar="TASK [ARG]...")
@command.as_json
def explain(ctx: click.Context, call: tuple[str, ...], as_json: bool, **_: Any) -> None:
    """Show who holds the lock of a call, its key, what that was made from, and which options were set, and where.

    Each ARG is JSON, or else a text; name=value is a keyword argument.
    """
    with command.runtime_of(ctx, memory=True) as runtime:
        task, args, kwargs = target.call_of(ctx.obj.app, call)
        explanation = explained(task, runtime.settings, args, kwargs)
    locks, unknown = _held(runtime, explanation)
    if as_json:
        held_by = None if unknown else [_holder(lock) for lock in locks]
        click.echo(json.dumps({**asdict(explanation), "held_by": held_by}, default=str))
    else:
        holders = "; ".join(f"{lock.holder_in_words()}, {lock.end_in_words()}" for lock in locks)
        _show(explanation, unknown or holders or "nobody")


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


@dataclass(frozen=True, slots=True)
class Setting:
    """An option's value, and where it comes from."""

    option: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of one call.

    Attributes:
        lock_name: the first part of the key.
        lock_key: the choice of the other parts, in words.
        arguments: all arguments by name, in words; empty if they do not fit the task's signature.
        defaults: the names of the arguments that the caller left out.
        counts: the parts of the key besides the name.
    """

    task: str
    key: str
    lock_name: str
    lock_key: str
    arguments: Mapping[str, str]
    defaults: Sequence[str]
    counts: Mapping[str, KeyPart]
    options: Sequence[Setting]


def explained(task: Any, settings: Settings, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Explanation:
    """Explain a call of an exclusive task.

    Raises:
        InvalidKey: an argument has no stable form.
    """
    made = task.call_key(settings, None, args, kwargs)
    args, kwargs = with_dumped_models(task, args, kwargs)
    bound = bind(task.run, args, kwargs)
    fits = bound is not None
    arguments = bound.delivered() if bound is not None else {}
    return Explanation(
        task=task.name,
        key=made.key,
        lock_name=task.lock_name or task.name,
        lock_key=lock_key_in_words(task) if fits else "all arguments, because they do not fit the signature",
        arguments={name: repr(value) for name, value in arguments.items()},
        defaults=_left_out(task.run, args, kwargs) if fits else [],
        counts=made.parts(),
        options=[*_options(task, settings)],
    )


def _left_out(run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    signature = inspect.signature(run)
    given = signature.bind(*args, **kwargs).arguments
    return [name for name in signature.parameters if name not in given]


def _options(task: Any, settings: Settings) -> Iterator[Setting]:
    values = options_for(task, settings)
    for name, option in OPTIONS.items():
        value = getattr(values, name)
        in_words = getattr(value, "__qualname__", value)
        yield Setting(option.attribute, in_words, _source(task, option.attribute, option.setting))


def _source(task: Any, attribute: str, setting: str) -> str:
    if vars(task).get(attribute) is not None:
        return "the task"
    own = task.__class__  # Not type(task): this may be Celery's proxy for a task.
    for cls in own.__mro__:
        if vars(cls).get(attribute) is not None:
            return "the task" if cls is own else f"its class {cls.__qualname__}"
        if cls is SingletonTask:
            break
    return f"the setting {setting}" if task.app.conf.get(setting) is not None else DEFAULT
