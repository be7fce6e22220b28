"""Which lock a command is about: its key, or a call that takes it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from celery_singleton_lock.diagnosis.tasks import exclusive_tasks
from celery_singleton_lock.keys.key import VERSION, is_key
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.words import did_you_mean
from celery_singleton_lock.task.singleton_task import SingletonTask

#: The suffix of a lock's key in Redis; people copy it from there.
_RUN = re.compile(r":run(:[0-9]+)?$")


def key_of(app: Any, settings: Settings, words: Sequence[str]) -> str:
    """The key for the words of a command line: these are the key itself, or a task's name and its arguments.

    Raises:
        UsageError: the words are neither.
        SingletonLockError: no key can be made from the arguments.
    """
    first, *rest = words
    if "{" in first or first.startswith(f"{settings.prefix}:"):
        key = _RUN.sub("", first)
        if not is_key(settings.prefix, key):
            raise click.UsageError(
                f"{first!r} is not the key of a lock of this app; its keys are "
                f"{settings.prefix}:{VERSION}:{{<name>:<32 hex digits>}}, as `celery locks list` shows them "
                "(quote them for the shell)"
            )
        if rest:
            raise click.UsageError(f"a key takes no arguments, but there are: {' '.join(rest)}")
        return key
    task, args, kwargs = call_of(app, words)
    return task.lock_key_of(*args, **kwargs)


def call_of(app: Any, words: Sequence[str]) -> tuple[SingletonTask, list[Any], dict[str, Any]]:
    """The task and its arguments in the words of a command line.

    Raises:
        UsageError: there is no such task, or it cannot be called like that.
    """
    name, *rest = words
    task = exclusive_task(app, name)
    args, kwargs = parsed(rest)
    try:
        inspect.signature(task.run).bind(*args, **kwargs)
    except TypeError as error:
        raise click.UsageError(f"task {name} cannot be called with these arguments: {error}") from None
    return task, args, kwargs


def exclusive_task(app: Any, name: str) -> SingletonTask:
    """The task of this name.

    Raises:
        UsageError: there is no such task, or it takes no lock.
    """
    app.loader.import_default_modules()
    exclusive: dict[str, SingletonTask] = {task.name: task for task in exclusive_tasks(app)}
    if name in exclusive:
        return exclusive[name]
    if name in app.tasks:
        raise click.UsageError(f"task {name} is not exclusive: its base is not SingletonTask")
    hint = did_you_mean(name, sorted(exclusive)) if exclusive else "; the app has no exclusive task"
    raise click.UsageError(f"{name!r} is neither a task of this app nor a key{hint}")


def parsed(words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """The positional and the keyword arguments in these words, as an operator writes them in a shell.

    Args:
        words: each is JSON or, if it is not valid JSON, a text; `name=value` is a keyword argument, whose value is read
            in the same way. Write a text that would be misread as JSON: `'"7"'`, `'"a=b"'`.

    Raises:
        UsageError: a keyword argument was given twice.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        name, is_keyword, value = word.partition("=")
        if not is_keyword or not name.isidentifier():
            args.append(_value(word))
        elif name in kwargs:
            raise click.UsageError(f"the argument {name!r} is given twice")
        else:
            kwargs[name] = _value(value)
    return args, kwargs


def _value(word: str) -> Any:
    try:
        return json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return word


def _refuse(constant: str) -> NoReturn:
    """NaN and Infinity are not JSON, but Python's parser accepts them."""
    raise ValueError(constant)
