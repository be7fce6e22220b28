"""Refuses functions that return before their work is done.

Celery calls an `async def` like any other function, and gets a coroutine: nothing has run yet, and the lock would be
free before anything does, even if a third-party pool runs the coroutine afterwards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from celery_singleton_lock.errors import InvalidOption

_INSTEAD = (
    "make it a plain function that runs the coroutine to its end, such as `def job(x): return asyncio.run(work(x))`"
)


def check(task_name: str, run: Callable[..., Any]) -> None:
    """Refuse a function that is asynchronous, when the task is bound.

    Raises:
        InvalidOption: it is asynchronous; a function that only returns a coroutine is not known before it runs.
    """
    if _is_async(run):
        raise InvalidOption(
            f"task {task_name} is an `async def`, which returns before it has run: its lock would protect nothing; "
            f"{_INSTEAD}"
        )


def value_of(task_name: str, value: Any) -> Any:
    """The value that the function returned.

    Raises:
        InvalidOption: the work has not run yet; it is dropped.
    """
    if not (inspect.isawaitable(value) or inspect.isasyncgen(value)):
        return value
    if inspect.iscoroutine(value):
        value.close()  # Otherwise Python warns that nobody has awaited it.
    raise InvalidOption(
        f"task {task_name} returned {type(value).__name__!r}, which is yet to run, when its lock was about to be "
        f"freed; {_INSTEAD}"
    )


def _is_async(function: Any) -> bool:
    # Do not follow `functools.wraps`: a plain function around an asynchronous one is what we ask for.
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(type(function), "__call__", function)  # An object that can be called.  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
