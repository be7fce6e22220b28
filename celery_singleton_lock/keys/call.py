"""The key of a call: what makes two calls of a task the same, according to its `lock_key`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys import label, template
from celery_singleton_lock.keys.arguments import bind, choose, possible
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
    arguments = bind(run, args, kwargs)
    if callable(lock_key) and arguments is not None:
        value = _ask(task_name, lock_key, arguments)
        content = encode_named(task_name, "what the callable lock_key returned", value)
        return CallKey(key_of(prefix, lock_name, content), label.of_value(value))
    if isinstance(lock_key, str) and arguments is not None:
        text, escaped = template.fill(task_name, lock_key, arguments)
        return CallKey(key_of_text(prefix, lock_name, escaped), label.of_text(text))
    if arguments is None:
        # The call does not fit the signature: the body will raise its own TypeError.
        chosen = {"args": args, "kwargs": kwargs}
    else:
        chosen = arguments if lock_key is None else choose(run, lock_key, arguments)
    return CallKey(key_of(prefix, lock_name, encode_arguments(task_name, chosen)), label.of_arguments(chosen))


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
        names = template.names_in(where, lock_key)
        if not names:
            raise InvalidOption(
                f"{where}, a template that names no argument, so that all calls would share one lock; write "
                f"{template.repaired(lock_key, allowed)}[] if they are to"
            )
    elif isinstance(lock_key, (list, tuple)) and all(isinstance(name, str) for name in lock_key):
        names = list(lock_key)
    else:
        raise InvalidOption(
            f"{where}; allowed: None (all arguments), a list of argument names, a template such as "
            "'tenant:{tenant_id}', or a callable of the dictionary of arguments"
        )
    if allowed is None:
        return
    for name in names:
        if name not in allowed:
            function = getattr(run, "__name__", "run")
            raise InvalidOption(
                f"{where}, but {function} has no argument {name!r}; it has: {', '.join(allowed) or 'none'}"
            )


def _ask(task_name: str, lock_key: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return lock_key(arguments)
    except Exception as error:
        raise InvalidKey(f"no lock key for task {task_name}: the callable lock_key raised {error!r}") from error
