"""The key of a call: what makes two calls of a task the same, according to its `lock_key`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys import label, template
from celery_singleton_lock.keys.arguments import (
    NotThere,
    all_delivered,
    argument_in,
    bind,
    choose,
    is_path,
    name_of,
    possible,
)
from celery_singleton_lock.keys.encoding import encode_arguments, encode_named
from celery_singleton_lock.keys.key import key_of, key_of_text


class CallKey(NamedTuple):
    """The key of a call, and a few words for people about what its digest was made from."""

    key: str
    label: str


def key_of_call(
    prefix: str, lock_name: str, task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> CallKey:
    """The key of a call with these arguments, made according to `lock_key`.

    Raises:
        InvalidKey: an argument has no stable form, or the callable or the template failed.
    """
    counting = counting_in(task_name, lock_key, run, args, kwargs)
    if isinstance(counting, template.Filled):
        return CallKey(key_of_text(prefix, lock_name, counting.escaped), label.of_text(counting.text))
    if isinstance(counting, Returned):
        content = encode_named(task_name, "what the callable lock_key returned", counting.value)
        return CallKey(key_of(prefix, lock_name, content), label.of_value(counting.value))
    return CallKey(key_of(prefix, lock_name, encode_arguments(task_name, counting)), label.of_arguments(counting))


class Returned(NamedTuple):
    """What a callable has returned."""

    value: Any


def counting_in(
    task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> template.Filled | Returned | dict[str, Any]:
    """What counts in a call, according to `lock_key`: a text, a value, or parts of the arguments by their paths.

    Raises:
        InvalidKey: the callable or the template failed, or an argument has no such part.
    """
    if (arguments := bind(run, args, kwargs)) is None:
        # The call does not fit the signature: the body will raise its own TypeError.
        return {"args": args, "kwargs": kwargs}
    if callable(lock_key):
        return Returned(_ask(task_name, lock_key, all_delivered(run, arguments)))
    if lock_key is None:
        return all_delivered(run, arguments)
    is_template = isinstance(lock_key, str)
    try:
        chosen = choose(run, template.fields_in(lock_key) if is_template else lock_key, arguments)
    except NotThere as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {lock_key!r} leads nowhere: {error}") from None
    except Exception as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {lock_key!r} failed: {error!r}") from error
    return template.fill(task_name, lock_key, chosen) if is_template else chosen


def key_of_choice(prefix: str, lock_name: str, text: str) -> CallKey:
    """The key of a call whose caller chose the text for the key."""
    return CallKey(key_of_text(prefix, lock_name, text), label.of_text(text))


def check_lock_key(task_name: str, lock_key: Any, run: Callable[..., Any]) -> None:
    """Refuse a `lock_key` that cannot work, when the task is bound.

    Raises:
        InvalidOption: wrong type, or an argument that `run` does not have.
    """
    if lock_key is None or callable(lock_key):
        return
    where, allowed = f"option lock_key of task {task_name} is {lock_key!r}", possible(run)
    if isinstance(lock_key, str):
        paths = template.check(where, lock_key)
        if not paths:
            raise InvalidOption(
                f"{where}, a template that names no argument, so that all calls would share one lock; write "
                f"{template.repaired(lock_key, allowed)}[] if they are to"
            )
    elif isinstance(lock_key, (list, tuple)) and all(isinstance(path, str) for path in lock_key):
        paths = list(lock_key)
    else:
        raise InvalidOption(
            f"{where}; allowed: None (all arguments), a list of argument names, a template such as "
            "'tenant:{tenant_id}', or a callable of the dictionary of arguments"
        )
    for path in paths:
        if not is_path(path):
            raise InvalidOption(f"{where}; {path!r} is neither an argument nor a path into one, such as 'order.id'")
    if allowed is None:
        return
    for name in map(argument_in, paths):
        if name not in allowed:
            has = ", ".join(allowed) or "none"
            raise InvalidOption(f"{where}, but {name_of(run)} has no argument {name!r}; it has: {has}")


def _ask(task_name: str, lock_key: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return lock_key(arguments)
    except Exception as error:
        raise InvalidKey(
            f"no lock key for task {task_name}: the callable lock_key raised {error!r}; it gets the arguments in the "
            f"form in which a message carries them: {_in_words(arguments)}"
        ) from error


def _in_words(arguments: Mapping[str, Any]) -> str:
    """The types of the arguments; the names of the parts of those that have some."""
    return ", ".join(
        f"{name} with {', '.join(map(str, value)) or 'no parts'}"
        if isinstance(value, Mapping)
        else f"{name}, a {type(value).__name__}"
        for name, value in arguments.items()
    )
