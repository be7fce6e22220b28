"""Why a call has its key, where its options come from, who holds the lock, and why two calls have different keys."""

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

#: The separator between two calls.
_AND = "vs"

#: Where the value of an option comes from that nobody has set.
DEFAULT = "the default"


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


def differences(one: Explanation, other: Explanation) -> list[str]:
    """Why the keys of two calls differ; if they do not, which arguments differ without counting."""
    if one.key == other.key:
        pairs = [(name, value, other.arguments.get(name, "nothing")) for name, value in one.arguments.items()]
        return [f"{name} differs and does not count: {its}, {others}" for name, its, others in pairs if its != others]
    found = []
    if one.lock_name != other.lock_name:
        found.append(f"lock_name: {one.lock_name}, {other.lock_name}")
    for name in dict.fromkeys((*one.counts, *other.counts)):
        first, second = one.counts.get(name), other.counts.get(name)
        if first is None or second is None:
            found.append(f"{name} counts in only one of them")
        elif first.serialized != second.serialized:
            found.append(f"{name}: {first.value} ({first.serialized}), {second.value} ({second.serialized})")
    return found or [f"made in different ways: {one.lock_key}, {other.lock_key}"]


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
