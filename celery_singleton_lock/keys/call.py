"""The key of a call: what makes two calls of a task the same, according to its `lock_key`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from celery_singleton_lock.keys.encoding import encode, encode_arguments, encode_named
from celery_singleton_lock.keys.key import key_of, key_of_text


class Returned(NamedTuple):
    """What a callable has returned."""

    value: Any


#: What counts in a call: a template with its values, a value, or parts of the arguments by their paths.
Counting = template.Filled | Returned | dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Something that goes into a key.

    Attributes:
        value: the value for people.
        serialized: the canonical form that is hashed; equal for equal parts only.
    """

    value: str
    serialized: str


class CallKey(NamedTuple):
    """The key of a call, a few words for people about what its digest was made from, and what that was."""

    key: str
    label: str
    counting: Counting

    def parts(self) -> dict[str, KeyPart]:
        """Everything in the digest besides the lock's name, by name."""
        counting = self.counting
        if isinstance(counting, template.Filled):
            return {"the filled template": KeyPart(counting.text, _serialized(counting.escaped))}
        if isinstance(counting, Returned):
            counting = {"what lock_key returned": counting.value}
        return {name: KeyPart(repr(value), _serialized(value)) for name, value in counting.items()}


def key_of_call(
    prefix: str, lock_name: str, task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> CallKey:
    """The key of a call with these arguments, made according to `lock_key`.

    Raises:
        InvalidKey: an argument has no stable form, or the callable or the template failed.
    """
    counting = _counting_in(task_name, lock_key, run, args, kwargs)
    if isinstance(counting, template.Filled):
        return CallKey(key_of_text(prefix, lock_name, counting.escaped), label.of_text(counting.text), counting)
    if isinstance(counting, Returned):
        content = encode_named(task_name, "what the callable lock_key returned", counting.value)
        return CallKey(key_of(prefix, lock_name, content), label.of_value(counting.value), counting)
    content = encode_arguments(task_name, counting)
    return CallKey(key_of(prefix, lock_name, content), label.of_arguments(counting), counting)


def _counting_in(task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Counting:
    """What counts in a call, according to `lock_key`.

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
    return CallKey(key_of_text(prefix, lock_name, text), label.of_text(text), template.Filled(text, text))


def _serialized(value: object) -> str:
    return encode(value).decode(errors="backslashreplace")


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
