"""The key of a call: what makes two calls of a task the same, according to its `lock_key`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys.arguments import Bound, NotThere, argument_in, bind, name_of, possible
from celery_singleton_lock.keys.encoding import encode, encode_arguments, encode_named
from celery_singleton_lock.keys.key import key_of, key_of_text, label_of_arguments, label_of_text, label_of_value
from celery_singleton_lock.keys.template import Filled, fields_in, fields_of_valid, fill, repaired


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Something that goes into a key.

    Attributes:
        value: the value for display.
        serialized: the canonical form that is hashed; equal for equal parts only.
    """

    value: str
    serialized: str


class CallKey(NamedTuple):
    """The key of a call, a label for display, and the parts that its digest was made from, by name."""

    key: str
    label: str
    counting: Mapping[str, Any]

    def parts(self) -> dict[str, KeyPart]:
        """Everything in the digest besides the lock's name."""
        return {
            name: KeyPart(value.text, _serialized(value.escaped))
            if isinstance(value, Filled)
            else KeyPart(repr(value), _serialized(value))
            for name, value in self.counting.items()
        }


def key_of_call(
    prefix: str, lock_name: str, task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> CallKey:
    """The key of a call with these arguments, made according to `lock_key`.

    Raises:
        InvalidKey: an argument has no stable form, or no such part, or the callable or the template failed.
    """
    if (bound := bind(run, args, kwargs)) is None:
        # The call does not fit the signature: the body will raise its own TypeError.
        counting = {"args": args, "kwargs": kwargs}
    elif lock_key is None:
        counting = bound.delivered()
    elif callable(lock_key):
        value = _ask(task_name, lock_key, bound.delivered())
        content = encode_named(task_name, "what the callable lock_key returned", value)
        return CallKey(key_of(prefix, lock_name, content), label_of_value(value), {"what lock_key returned": value})
    elif isinstance(counting := _chosen(task_name, lock_key, bound), Filled):
        return _key_of_filled(prefix, lock_name, counting)
    content = encode_arguments(task_name, counting)
    return CallKey(key_of(prefix, lock_name, content), label_of_arguments(counting), counting)


def key_of_choice(prefix: str, lock_name: str, text: str) -> CallKey:
    """The key of a call whose caller chose the text for the key."""
    return _key_of_filled(prefix, lock_name, Filled(text, text))


def _key_of_filled(prefix: str, lock_name: str, filled: Filled) -> CallKey:
    key = key_of_text(prefix, lock_name, filled.escaped)
    return CallKey(key, label_of_text(filled.text), {"the filled template": filled})


def _chosen(task_name: str, lock_key: Any, bound: Bound) -> Any:
    """What a template or a list of paths chooses from the arguments.

    Raises:
        InvalidKey: the template failed, or an argument has no such part.
    """
    try:
        if isinstance(lock_key, str):
            return fill(lock_key, bound.choose(fields_in(lock_key)))
        return bound.choose(lock_key)
    except NotThere as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {lock_key!r} leads nowhere: {error}") from None
    except Exception as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {lock_key!r} failed: {error!r}") from error


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
        if not (paths := fields_of_valid(where, lock_key)):
            raise InvalidOption(
                f"{where}, a template that names no argument, so that all calls would share one lock; write "
                f"{repaired(lock_key, allowed)}[] if they are to"
            )
    elif isinstance(lock_key, (list, tuple)) and all(isinstance(path, str) for path in lock_key):
        paths = list(lock_key)
    else:
        raise InvalidOption(
            f"{where}; allowed: None (all arguments), a list of argument names, a template such as "
            "'tenant:{tenant_id}', or a callable of the dictionary of arguments"
        )
    for path in paths:
        if (name := argument_in(path)) is None:
            raise InvalidOption(f"{where}; {path!r} is neither an argument nor a path into one, such as 'order.id'")
        if allowed is not None and name not in allowed:
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
