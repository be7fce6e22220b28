"""`map`, `starmap` and `chunks` of an exclusive task: each call is exclusive."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from celery import Celery, Task

from celery_singleton_lock import LockConflict, LockUnavailable, SingletonTask, clock
from celery_singleton_lock.testing import hold_lock
from tests.bench import is_free
from tests.inside import silence
from tests.patience import in_this_thread

_numbers = itertools.count()


@pytest.fixture(params=[SingletonTask, None], ids=["everywhere", "for one task"])
def app(request: pytest.FixtureRequest) -> Celery:
    """With "everywhere", Celery's own tasks have our class as well."""
    options = {"task_cls": request.param} if request.param else {}
    made = Celery(f"i{next(_numbers)}", set_as_current=False, broker="memory://", backend="cache+memory://", **options)
    made.conf.singleton_lock_prefix = made.main
    return made


def make(app: Celery, seen: list[Any] | None = None, function: Callable[..., Any] | None = None, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, shared=False, **options)
    def job(self: Any, x: int, y: int = 0) -> Any:
        if seen is not None:
            seen.append((x, y, self.lock.held, self.lock.key == self.lock_key_of(x, y)))
        return x + y if function is None else function(x)

    return job


def test_each_item_is_called_under_its_own_lock(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    assert task.map([1, 2, 1]).apply().get() == [1, 2, 1]
    assert task.starmap([(1, 2), (3, 4)]).apply().get() == [3, 7]
    assert [it[:2] for it in seen] == [(1, 0), (2, 0), (1, 0), (1, 2), (3, 4)]
    assert all(it[2:] == (True, True) for it in seen)
    assert all(is_free(task, *it[:2]) for it in seen)


def test_chunks_are_exclusive(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    results = task.chunks([(5, 6), (7, 8), (9, 0)], 2).group().apply()
    assert [result.get() for result in results] == [[11, 15], [9]]
    assert all(it[2:] == (True, True) for it in seen)


def test_item_whose_lock_is_held_fails_the_map(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    with hold_lock(task, 2):
        result = task.map([1, 2, 3]).apply()
    assert result.state == "FAILURE"
    assert isinstance(result.result, LockConflict)
    assert str(result.result.task_id).startswith("hold-lock-")
    assert [it[0] for it in seen] == [1], "later items are not called either"


@pytest.mark.parametrize("policy", ["skip", "raise", "reject", lambda task, conflict: "skip"])
def test_refused_item_has_no_result(app: Celery, policy: Any) -> None:
    task = make(app, on_conflict=policy)
    with hold_lock(task, 1), pytest.raises(LockConflict):
        task.map([1]).apply().get()


@pytest.mark.parametrize("option", [{"lock_wait": 60}, {"on_conflict": "retry"}], ids=str)
def test_item_waits_for_its_lock(app: Celery, option: dict[str, Any]) -> None:
    """As long as `lock_wait` allows; without an end where a message would be put back."""
    task = make(app, **option)
    with ExitStack() as held:
        held.enter_context(hold_lock(task, 1))
        threading.Timer(0.1, held.close).start()
        assert task.map([1]).apply().get() == [1]


def test_item_within_an_exclusive_task_does_not_wait_forever(app: Celery) -> None:
    inner = make(app, on_conflict="retry", name=f"inner{next(_numbers)}")
    outer = make(app, function=lambda x: inner.map([x]).apply().get(), name=f"outer{next(_numbers)}")
    with hold_lock(inner, 1), pytest.raises(LockConflict):
        outer.apply((1,)).get()


def test_call_within_an_item_is_a_plain_call(app: Celery) -> None:
    seen: list[Any] = []
    inner = make(app, seen, name=f"inner{next(_numbers)}")
    outer = make(app, function=inner, name=f"outer{next(_numbers)}")
    assert outer.map([1]).apply().get() == [1]
    assert seen == [(1, 0, False, False)]


def test_direct_call_after_a_map_is_a_plain_call(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    task.map([1]).apply()
    task(2)
    assert seen[-1] == (2, 0, False, False)


def test_item_of_a_handler_of_a_message_without_a_lock_has_its_own(app: Celery) -> None:
    seen: list[Any] = []

    class Mapping(SingletonTask):
        abstract = True

        def on_success(self, *args: Any) -> None:
            self.app.tasks["celery.map"](self.s(), [7])

    @app.task(base=Mapping, bind=True, shared=False)
    def job(self: Any, x: int) -> None:
        seen.append((x, self.lock.held))

    job.apply((1,), singleton_lock=False)
    assert seen == [(1, False), (7, True)]


def test_item_of_a_handler_before_the_body_is_not_its_message(app: Celery) -> None:
    seen: list[Any] = []

    class Mapping(SingletonTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            if self.request.args == (1,):
                self.app.tasks["celery.map"](self.s(), [7])

    @app.task(base=Mapping, bind=True, shared=False)
    def job(self: Any, x: int) -> None:
        seen.append((x, self.lock.held))

    job.apply((1,), throw=True)
    assert seen == [(7, True), (1, True)]


def test_failed_item_frees_its_lock(app: Celery) -> None:
    def fail(x: int) -> None:
        raise ValueError(x)

    task = make(app, function=fail)
    with pytest.raises(ValueError, match="1"):
        task.map([1, 2]).apply().get()
    assert is_free(task, 1)


@contextmanager
def outage(app: Celery, *, of: int, each: Callable[[float], None] = lambda seconds: None) -> Iterator[list[int]]:
    """The lock server answers again when a call has slept so many times; yields the sizes of unanswered questions."""
    slept = itertools.count(1)
    with ExitStack() as silent, pytest.MonkeyPatch.context() as patch:
        sizes = silent.enter_context(silence(app, heard=0))

        def sleep(seconds: float) -> None:
            each(seconds)
            if next(slept) == of:
                silent.close()

        patch.setattr(clock, "sleep", in_this_thread(sleep, clock.sleep))
        yield sizes
        assert next(slept) > of


def test_item_waits_for_the_lock_server(app: Celery) -> None:
    with outage(app, of=2):
        assert make(app).map([1]).apply().get() == [1]


def test_silent_lock_server_is_handled_as_the_task_says(app: Celery) -> None:
    with silence(app, heard=0):
        with pytest.raises(LockUnavailable):
            make(app, on_unavailable="raise").map([1]).apply().get()
        assert make(app, on_unavailable="run", name=f"runs{next(_numbers)}").map([1]).apply().get() == [1]


def test_error_of_the_function_is_not_taken_for_a_silent_lock_server(app: Celery) -> None:
    calls = []

    def fail(x: int) -> None:
        calls.append(x)
        raise LockUnavailable("its own", "no answer")

    with pytest.raises(LockUnavailable, match="its own"):
        make(app, function=fail).map([1]).apply().get()
    assert calls == [1]


def test_retry_in_an_item_works_as_in_celery(app: Celery) -> None:
    @app.task(bind=True, base=Task, shared=False, name=f"plain{next(_numbers)}")
    def plain(self: Any, x: int) -> None:
        raise self.retry(countdown=0)

    task = make(app, function=lambda x: task.retry(countdown=0))
    assert task.map([1]).apply().state == plain.map([1]).apply().state
    assert is_free(task, 1)
