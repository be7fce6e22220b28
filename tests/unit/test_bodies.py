"""Asynchronous functions and generators as exclusive tasks are refused, since they return before they have run."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from pydantic import BaseModel

from celery_singleton_lock import InvalidOption, SingletonTask

_numbers = itertools.count()


def bound(app: Celery, function: Callable[..., Any], **options: Any) -> Any:
    task = app.task(function, base=SingletonTask, shared=False, name=f"job{next(_numbers)}", **options)
    app.finalize()
    return app.tasks[task.name]


async def work(x: int) -> int:
    return x + 1


async def generated(x: int) -> AsyncIterator[int]:
    yield x


class Callable_:
    __name__, __module__ = "callable", "tests"

    async def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize("function", [work, generated], ids=["coroutine", "generator"])
def test_async_function_is_refused_when_bound(app: Celery, function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidOption, match=r"is an `async def`.*asyncio\.run"):
        bound(app, function)


def yields(x: int) -> Iterator[int]:
    yield x


def test_generator_is_refused_when_bound(app: Celery) -> None:
    with pytest.raises(InvalidOption, match=r"is a generator, which returns before it has run.*returns a list"):
        bound(app, yields)


def test_function_that_returns_a_generator_is_refused_when_it_runs(app: Celery) -> None:
    def handing_on(x: int) -> Any:
        return yields(x)

    with pytest.raises(InvalidOption, match="returned 'generator', which is yet to run"):
        bound(app, handing_on).apply((1,)).get()


def test_function_may_return_what_is_no_generator(app: Celery) -> None:
    def numbers(x: int) -> range:
        return range(x)

    assert bound(app, numbers).apply((2,)).get() == range(2)


def test_async_method_of_a_class_is_refused_as_well(app: Celery) -> None:
    class Job(SingletonTask):
        name = f"job{next(_numbers)}"

        async def run(self, x: int) -> int:
            return x

    with pytest.raises(InvalidOption, match="async def"):
        app.register_task(Job())


@pytest.mark.parametrize("run", [functools.partial(work, 1), Callable_()], ids=["partial", "object"])
def test_other_async_callables_are_refused_as_well(app: Celery, run: Any) -> None:
    class Job(SingletonTask):
        name = f"job{next(_numbers)}"

    Job.run = staticmethod(run)
    with pytest.raises(InvalidOption, match="async def"):
        app.register_task(Job())


def test_plain_function_that_returns_a_coroutine_is_refused_when_it_runs(app: Celery) -> None:
    """A function that only passes on the coroutine of another one is noticed when it runs."""

    def handing_on(x: int) -> Any:
        return work(x)

    task = bound(app, handing_on)
    with pytest.raises(InvalidOption, match="returned 'coroutine', which is yet to run"):
        task.apply((1,)).get()


def test_async_function_that_pydantic_wraps_is_refused_when_it_runs(app: Celery) -> None:
    class Order(BaseModel):
        number: int

    async def bill(order: Order) -> int:
        return order.number

    with pytest.raises(InvalidOption, match="asyncio"):
        bound(app, bill, pydantic=True).apply(({"number": 1},)).get()


def test_plain_function_may_run_an_async_one(app: Celery) -> None:
    @functools.wraps(work)
    def job(x: int) -> int:
        return asyncio.run(work(x))

    assert bound(app, job).apply((1,)).get() == 2


def test_plain_celery_tasks_may_be_async(app: Celery) -> None:
    app.task(work, shared=False, name=f"job{next(_numbers)}")
    app.finalize()
