"""Why a call has its key, where its options come from, and why two calls have different keys."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock._celery import with_dumped_models
from celery_singleton_lock.diagnosis.tasks import lock_key_in_words
from celery_singleton_lock.keys.arguments import bind
from celery_singleton_lock.keys.key import KeyPart
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import OPTIONS
from celery_singleton_lock.options.task import options_for
from celery_singleton_lock.task.singleton_task import SingletonTask

#: Where the value of an option comes from that nobody has set.
DEFAULT = "the default"


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


def explain(task: Any, settings: Settings, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Explanation:
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
