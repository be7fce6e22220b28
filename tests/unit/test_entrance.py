"""A body begins through `SingletonTask.__call__`, or not at all: what is refused, what is stopped, what may be."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
from celery import Celery, Task

from celery_singleton_lock import InvalidOption, LockConflict, SingletonTask
from tests.inside import hold

_numbers = itertools.count()


class Framework(Task):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext():
            return self.run(*args, **kwargs)


class Mixin:
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class FrameworkFirst(Framework, SingletonTask):
    pass


class MixinFirst(Mixin, SingletonTask):
    pass


class Above(Mixin, SingletonTask):
    pass


class Below(Above):
    """The order that is wrong is that of the class above."""


class Own(SingletonTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class Nested(SingletonTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def inside() -> Any:
            return self.run(*args, **kwargs)

        return inside()


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class Decorated(SingletonTask):
    __call__ = logged(Own.__call__)


class DecoratedWell(SingletonTask):
    __call__ = logged(SingletonTask.__call__)


class InC(SingletonTask):
    """Nobody can read what that calls."""

    __call__ = partial(print)


class Indirect(SingletonTask):
    """Not seen before it runs."""

    def in_context(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_context(*args, **kwargs)


class Skipping(SingletonTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Task.__call__(self, *args, **kwargs)


class TriedAgain(SingletonTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except LockConflict:
            return self.run(*args, **kwargs)


class Twice(SingletonTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def job(x: int, y: int = 2) -> int:
    return x + y


def make(app: Celery, base: type = SingletonTask, function: Callable[..., Any] = job, **options: Any) -> Any:
    return app.task(base=base, shared=False, name=f"job{next(_numbers)}", **options)(function)


class TestRefusedWhenBound:
    @pytest.mark.parametrize(
        ("base", "found", "instead"),
        [
            (FrameworkFirst, "Framework", r"; write class FrameworkFirst\(SingletonTask, Framework\)"),
            (MixinFirst, "Mixin", r"derive Mixin from celery.Task and write class MixinFirst\(SingletonTask, Mixin\)"),
            (Below, "Mixin", r"write class Above\(SingletonTask, Mixin\)"),
            (Own, "Own", r"have it call super\(\).__call__\(\*args, \*\*kwargs\) instead$"),
            (Nested, "Nested", r"super\(\)"),
            (Decorated, "Own", r"super\(\)"),
        ],
    )
    def test_call_that_calls_run_itself(self, app: Celery, base: type, found: str, instead: str) -> None:
        task = make(app, base)
        for _ in range(2):  # Not only the first time that it is used.
            with pytest.raises(InvalidOption, match=rf"test_entrance\.{found}\.__call__ calls `run` itself.*{instead}"):
                task.delay(1)

    def test_call_that_task_annotations_set(self, app: Celery) -> None:
        app.conf.task_annotations = {"*": {"__call__": Own.__call__}}
        with pytest.raises(InvalidOption, match=r"Own\.__call__ calls `run` itself.*task_annotations.*'@__call__'"):
            make(app).delay(1)

    def test_registered_class(self, app: Celery) -> None:
        class Job(Own):
            name = "own"

            def run(self) -> None: ...

        with pytest.raises(InvalidOption, match="would run without its lock"):
            app.register_task(Job())
        assert "own" not in app.tasks

    def test_class_whose_on_bound_calls_nothing_on(self, app: Celery) -> None:
        class Base(Own):
            @classmethod
            def on_bound(cls, app: Any) -> None:
                pass

        with pytest.raises(InvalidOption, match="would run without its lock"):
            make(app, Base).delay(1)

    @pytest.mark.parametrize("strategy", ["shop:strategy", lambda *args: None], ids=["name", "function"])
    def test_strategy(self, app: Celery, strategy: Any) -> None:
        with pytest.raises(InvalidOption, match=r"has the Strategy .*; use Celery's own, and leave celery-batches"):
            make(app, Strategy=strategy).delay(1)


class TestStopped:
    @pytest.mark.parametrize("base", [Indirect, Skipping])
    @pytest.mark.parametrize("bind", [False, True])
    def test_body_outside_of_its_lock(self, app: Celery, base: type, bind: bool) -> None:
        ran: list[int] = []
        task = make(app, base, noting(ran, bind=bind), bind=bind)
        name = f"{base.__name__}.__call__ must call that"
        with pytest.raises(InvalidOption, match=rf"does not run without its lock.*{name}, by super\(\)"):
            task.apply((1,)).get()
        assert ran == []

    def test_body_that_others_call(self, app: Celery) -> None:
        task = make(app)
        task.delay  # noqa: B018 - binds it
        type(task._get_current_object()).before_start = lambda self, *_: self.run(1)
        with pytest.raises(InvalidOption, match=r"what called `run` must call that, .* as the task itself"):
            task.apply((1,)).get()

    def test_item_of_a_map(self, app: Celery) -> None:
        ran: list[int] = []
        task = make(app, Indirect, noting(ran))
        with pytest.raises(InvalidOption, match=r"Indirect\.__call__ must call that"):
            task.map([1, 2]).apply().get()
        assert ran == []

    def test_body_whose_lock_was_refused(self, app: Celery) -> None:
        task = make(app, TriedAgain, on_conflict="raise")
        hold(task, 1)
        with pytest.raises(InvalidOption, match="TriedAgain"):
            task.apply((1,)).get()

    def test_second_body_of_one_message(self, app: Celery) -> None:
        ran: list[int] = []
        with pytest.raises(InvalidOption, match=r"once for each message; .*Twice"):
            make(app, Twice, noting(ran)).apply((1,)).get()
        assert ran == [1]


def noting(ran: list[int], *, bind: bool = False) -> Callable[..., Any]:
    """A body that says that it has run."""

    def bound(self: Any, x: int) -> None:
        ran.append(x)

    def plain(x: int) -> None:
        ran.append(x)

    return bound if bind else plain


class TestAllowed:
    def test_call_that_wraps_ours(self, app: Celery) -> None:
        assert make(app, DecoratedWell, named(lambda self: self.lock.held), bind=True).apply().get() is True

    def test_call_without_code(self, app: Celery) -> None:
        make(app, InC).delay  # noqa: B018 - binds it

    def test_function_that_task_annotations_put_around_ours(self, app: Celery) -> None:
        app.conf.task_annotations = {"*": {"@__call__": lambda call: lambda *args: (call(*args), "around")}}
        task = make(app, function=named(lambda self: self.lock.held), bind=True)
        assert task.apply().get() == (True, "around")

    def test_direct_calls(self, app: Celery) -> None:
        inner = make(app)

        @app.task(shared=False, base=SingletonTask)
        def outer() -> list[int]:
            return [inner(1), inner.run(1), inner.apply((1,)).get()]

        assert [inner(1), inner.run(1, y=3), type(inner._get_current_object()).run(1)] == [3, 4, 3]
        assert outer.apply().get() == [3, 3, 3]

    @pytest.mark.parametrize("options", [{}, {"singleton_lock": False}], ids=["locked", "without a lock"])
    def test_body_that_calls_itself(self, app: Celery, options: dict[str, Any]) -> None:
        seen = []

        @app.task(shared=False, base=SingletonTask, bind=True, lock_key=[])
        def down(self: Any, n: int) -> int:
            seen.append(self.lock.held)
            return n if n == 0 else self(n - 1) + self.run(n - 1)

        assert down.apply((3,), **options).get() == 0
        assert seen == [not options] * 15

    def test_base_behind_ours_that_calls_celerys_own(self, app: Celery) -> None:
        class Context(Task):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs)

        class Base(SingletonTask, Context):
            pass

        assert make(app, Base, named(lambda self: self.lock.held), bind=True).apply().get() is True

    def test_request_that_a_test_pushes(self, app: Celery) -> None:
        task = make(app)
        task.push_request(id="x", retries=1)
        try:
            assert task.run(1) == 3
        finally:
            task.pop_request()

    def test_function_that_a_test_puts_in_its_place(self, app: Celery) -> None:
        task = make(app)
        with mock.patch.object(task._get_current_object(), "run", return_value="fake"):
            assert task.apply((1,)).get() == "fake"
        with mock.patch.object(type(task._get_current_object()), "run", return_value="fake"):
            assert task.apply((1,)).get() == "fake"
        assert task.apply((1,)).get() == 3

    def test_autoretry(self, app: Celery) -> None:
        tries = []

        def flaky(x: int) -> int:
            tries.append(x)
            return 1 // (len(tries) - 1)

        assert make(app, function=flaky, autoretry_for=(ZeroDivisionError,)).apply((1,)).get() == 1

    def test_classes_one_of_which_is_derived_from_the_other(self, app: Celery) -> None:
        class First(SingletonTask):
            name = "first"

            def run(self, x: int) -> list[str]:
                return [self.name, *("held" for _ in range(x) if self.lock.held)]

        class Second(First):
            name = "second"

            def run(self, x: int) -> list[str]:
                return [*super().run(x), "second"]

        class Third(First):
            name = "third"

        first, second, third = (app.register_task(cls()) for cls in (First, Second, Third))
        first.bind(app)
        assert first.apply((1,)).get() == ["first", "held"]
        assert second.apply((1,)).get() == ["second", "held", "second"]
        assert third.apply((1,)).get() == ["third", "held"]


@pytest.mark.parametrize("bind", [False, True])
def test_function_looks_as_before(app: Celery, bind: bool) -> None:
    def bill(tenant: int, month: int = 1) -> None:
        """Bills."""

    def bill_bound(self: Any, tenant: int, month: int = 1) -> None:
        """Bills."""

    task = make(app, function=bill_bound if bind else bill, bind=bind)
    assert str(inspect.signature(task.run)) == "(tenant: 'int', month: 'int' = 1) -> 'None'"
    assert (task.run.__doc__, task.__doc__) == ("Bills.", "Bills.")


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = "body"
    return function
