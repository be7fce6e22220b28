"""The key of a call: what makes two calls of a task the same, as its `lock_key` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys import template
from celery_singleton_lock.keys.arguments import bind, choose, possible
from celery_singleton_lock.keys.encoding import encode_arguments, encode_named
from celery_singleton_lock.keys.key import key_of, key_of_text


def key_of_call(
    prefix: str, lock_name: str, task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> str:
    """The key of a call with these arguments, made as `lock_key` says.

    Raises:
        InvalidKey: an argument has no stable form, or the callable or the template failed.
    """
    arguments = bind(run, args, kwargs)
    if arguments is None:
        # It does not fit the signature: the body will raise its own TypeError.
        return key_of(prefix, lock_name, encode_arguments(task_name, {"args": args, "kwargs": kwargs}))
    if lock_key is None:
        return key_of(prefix, lock_name, encode_arguments(task_name, arguments))
    if callable(lock_key):
        value = _ask(task_name, lock_key, arguments)
        return key_of(prefix, lock_name, encode_named(task_name, "what the callable lock_key returned", value))
    if isinstance(lock_key, str):
        return key_of_text(prefix, lock_name, template.fill(task_name, lock_key, arguments))
    return key_of(prefix, lock_name, encode_arguments(task_name, choose(run, lock_key, arguments)))


def check_lock_key(task_name: str, lock_key: Any, run: Callable[..., Any]) -> None:
    """Refuse a `lock_key` that cannot work, when the task is bound.

    Raises:
        InvalidOption: wrong type, or an argument that `run` does not have.
    """
    if lock_key is None or callable(lock_key):
        return
    where = f"option lock_key of task {task_name} is {lock_key!r}"
    if isinstance(lock_key, str):
        names = template.names_in(where, lock_key)
    elif isinstance(lock_key, (list, tuple)) and all(isinstance(name, str) for name in lock_key):
        names = list(lock_key)
    else:
        raise InvalidOption(
            f"{where}; allowed: None (all arguments), a list of argument names, a template such as "
            "'tenant:{tenant_id}', or a callable of the dictionary of arguments"
        )
    if (allowed := possible(run)) is None:
        return
    for name in names:
        if name not in allowed:
            raise InvalidOption(f"{where}, but run has no argument {name!r}; it has: {', '.join(allowed)}")


def _ask(task_name: str, lock_key: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return lock_key(arguments)
    except Exception as error:
        raise InvalidKey(f"no lock key for task {task_name}: the callable lock_key raised {error!r}") from error
