"""Refuses functions that return before their work is done.

Celery calls an `async def`, or a function that yields, like any other, and gets a coroutine or a generator: nothing has
run yet, and the lock would be free before anything does, even if a third-party pool runs the coroutine afterwards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any

from celery_singleton_lock.errors import InvalidOption

_INSTEAD = (
    "make it a plain function that runs the coroutine to its end, such as `def job(x): return asyncio.run(work(x))`, "
    "or returns a list of what a generator yields"
)


def check(task_name: str, run: Callable[..., Any]) -> None:
    """Refuse a function that is asynchronous, or a generator, when the task is bound.

    Raises:
        InvalidOption: it is; a function that only returns a coroutine or a generator is not known before it runs.
    """
    if (kind := _kind(run)) is not None:
        raise InvalidOption(
            f"task {task_name} is {kind}, which returns before it has run: its lock would protect nothing; {_INSTEAD}"
        )


def value_of(task_name: str, value: Any) -> Any:
    """The value that the function returned.

    Raises:
        InvalidOption: the work has not run yet; it is dropped.
    """
    if not isinstance(value, (Awaitable, Generator, AsyncGenerator)):
        return value
    if inspect.iscoroutine(value):
        value.close()  # Otherwise Python warns that nobody has awaited it.
    raise InvalidOption(
        f"task {task_name} returned {type(value).__name__!r}, which is yet to run, when its lock was about to be "
        f"freed; {_INSTEAD}"
    )


def _kind(function: Any) -> str | None:
    """What kind of function returns before it has run; None for any other."""
    # Do not follow `functools.wraps`: a plain function around an asynchronous one is what we ask for.
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(type(function), "__call__", function)  # An object that can be called.  # noqa: B004
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "an `async def`"
    return "a generator" if inspect.isgeneratorfunction(function) else None
