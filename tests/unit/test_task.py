"""SingletonTask with memory locks, in this process: without a server or a worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery, Task, shared_task
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, Retry
from pydantic import BaseModel

import celery_singleton_lock.diagnosis.peers  # noqa: F401 - registers its command
from celery_singleton_lock import (
    InvalidKey,
    InvalidOption,
    LockConflict,
    LockUnavailable,
    SingletonTask,
    clock,
    lock_acquired,
    lock_conflict,
    lock_released,
    process_identity,
)
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.task.run import seconds_until
from tests.inside import hold

_numbers = itertools.count()


class Order(BaseModel):
    number: int


def body(function: Callable[..., Any]) -> Callable[..., Any]:
    """A lambda with a name, so that Celery can make a task of it."""
    function.__name__ = function.__qualname__ = "body"
    return function


class App(Celery):
    """An app with its own tasks: Celery registers shared tasks with every app of the process."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **{"shared": False, **options})


@pytest.fixture
def app() -> Celery:
    made = App(f"unit{next(_numbers)}", set_as_current=False, broker="memory://", backend="cache+memory://")
    made.conf.singleton_lock_prefix = f"unit{next(_numbers)}"
    return made


def is_free(app: Celery, task: SingletonTask, *args: Any) -> bool:
    store = Runtime.of(app).store
    found = store.acquire(LockRequest(task.lock_key_of(*args), new_owner(), ttl=60, holder=Holder()))
    if isinstance(found, Lease):
        store.free(found)
        return True
    return False


class TestRun:
    def test_task_holds_its_lock_only_while_it_runs(self, app: Celery) -> None:
        @app.task(base=SingletonTask, bind=True)
        def job(self: Any, x: int) -> tuple[bool, bool, int]:
            return self.lock.held, is_free(app, self, x), self.lock.fence

        held, free, fence = job.apply((1,)).get()
        assert (held, free) == (True, False)
        assert fence > 0
        assert is_free(app, job, 1)

    def test_lock_is_freed_when_the_body_raises(self, app: Celery) -> None:
        @app.task(base=SingletonTask)
        def job() -> None:
            raise KeyError("x")

        with pytest.raises(KeyError):
            job.apply().get()
        assert is_free(app, job)

    @pytest.mark.parametrize("error", [Ignore(), Reject(), Retry()])
    def test_lock_is_freed_when_the_body_ends_in_another_way(self, app: Celery, error: Exception) -> None:
        @app.task(base=SingletonTask)
        def job() -> None:
            raise error

        job.apply(throw=False)
        assert is_free(app, job)

    def test_lock_is_not_held_outside_of_a_run(self, app: Celery) -> None:
        @app.task(base=SingletonTask)
        def job() -> None: ...

        assert not job.lock.held
        assert job.lock.fence == 0

    def test_direct_call_is_a_plain_function(self, app: Celery) -> None:
        @app.task(base=SingletonTask, bind=True)
        def job(self: Any, x: int) -> tuple[int, bool]:
            return x, self.lock.held

        hold(job, 1)
        assert job(1) == (1, False)

    def test_direct_call_of_itself_does_not_meet_its_own_lock(self, app: Celery) -> None:
        @app.task(base=SingletonTask, bind=True)
        def job(self: Any, n: int) -> int:
            return n if n == 0 else n + self(n - 1)

        assert job.apply((3,)).get() == 6

    def test_other_arguments_mean_another_lock(self, app: Celery) -> None:
        @app.task(base=SingletonTask)
        def job(x: int) -> int:
            return x

        hold(job, 1)
        assert job.apply((2,)).get() == 2

    def test_one_lock_name_makes_tasks_exclude_each_other(self, app: Celery) -> None:
        options: dict[str, Any] = {"base": SingletonTask, "lock_name": "ledger", "on_conflict": "raise"}
        bill = app.task(name="bill", lock_key="tenant:{tenant}", **options)(body(lambda tenant: None))
        refund = app.task(name="refund", lock_key="tenant:{of}", **options)(body(lambda of, amount: None))
        hold(bill, 7)
        with pytest.raises(LockConflict):
            refund.apply((7, 10)).get()
        refund.apply((8, 10)).get()

    def test_argument_without_a_stable_form_is_a_clear_error(self, app: Celery) -> None:
        ran = []
        job = app.task(base=SingletonTask, name="job")(body(lambda order: ran.append(order)))
        with pytest.raises(InvalidKey, match=r"order.*lock_key"):
            job.apply((object(),)).get()
        assert ran == []

    def test_call_that_does_not_fit_raises_the_usual_error(self, app: Celery) -> None:
        job = app.task(base=SingletonTask)(body(lambda x: x))
        with pytest.raises(TypeError, match="argument"):
            job.apply((1, 2)).get()

    def test_disabled_locks_are_not_taken(self, app: Celery) -> None:
        app.conf.singleton_lock_enabled = False

        @app.task(base=SingletonTask, bind=True)
        def job(self: Any) -> bool:
            return bool(self.lock.held)

        assert job.apply().get() is False

    def test_call_may_switch_its_lock_off(self, app: Celery) -> None:
        @app.task(base=SingletonTask, bind=True)
        def job(self: Any) -> bool:
            return bool(self.lock.held)

        hold(job)
        assert job.apply(singleton_lock=False).get() is False


class TestLeftBehind:
    """A lock that seems to belong to a process that is gone."""

    @pytest.fixture
    def gone(self) -> str:
        place, pid, start = process_identity.own().split("/")
        return f"{place}/{pid}/{int(start) - 1}"

    def test_lock_of_a_gone_process_is_freed(self, app: Celery, gone: str) -> None:
        task = app.task(base=SingletonTask)(body(lambda: 1))
        Runtime.of(app).store.acquire(
            LockRequest(task.lock_key_of(), new_owner(), ttl=60, holder=Holder("x", process=gone))
        )
        assert task.apply().get() == 1

    def test_lock_that_cannot_be_freed_counts_as_held(
        self, app: Celery, gone: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For example a forged value, whose owner no release matches."""
        task = app.task(base=SingletonTask)(body(lambda: 1))
        store = Runtime.of(app).store
        store.acquire(LockRequest(task.lock_key_of(), new_owner(), ttl=60, holder=Holder("x", process=gone)))
        monkeypatch.setattr(store, "free", lambda *_, **__: False)
        assert task.apply().state == "IGNORED"


class TestSecondsUntil:
    @pytest.mark.parametrize(
        ("when", "seconds"),
        [
            (None, 0),
            (0, 0),
            (-5, 0),
            (7.5, 7.5),
            (datetime.fromtimestamp(1060, timezone.utc), 60),
            (datetime.fromtimestamp(940, timezone.utc), 0),
            (datetime(1970, 1, 1, 0, 17, 40), 60),
        ],
    )
    def test_seconds_until_a_retry(self, monkeypatch: pytest.MonkeyPatch, when: object, seconds: float) -> None:
        monkeypatch.setattr(clock, "wall", lambda: 1000.0)
        assert seconds_until(Retry(when=when)) == seconds


class TestConflict:
    @pytest.fixture
    def job(self, app: Celery) -> Any:
        job = app.task(base=SingletonTask, name="job")(body(lambda: "ran"))
        hold(job)
        return job

    def test_conflict_is_skipped(self, job: Any) -> None:
        result = job.apply()
        assert result.state == "IGNORED"
        assert result.result is not None
        assert "other-task" in str(result.result)

    def test_conflict_raises(self, job: Any) -> None:
        with pytest.raises(LockConflict) as caught:
            job.apply(singleton_lock={"on_conflict": "raise"}).get()
        assert caught.value.task_id == "other-task"
        assert 0 < caught.value.remaining <= 60
        assert caught.value.key == job.lock_key_of()

    def test_conflict_rejects_the_message(self, job: Any) -> None:
        assert job.apply(singleton_lock={"on_conflict": "reject"}).state == "REJECTED"

    def test_eager_call_cannot_be_put_back_on_conflict(self, job: Any) -> None:
        with pytest.raises(LockConflict):
            job.apply(singleton_lock={"on_conflict": "retry"}).get()

    def test_callable_decides(self, app: Celery) -> None:
        asked = []

        def decide(task: Any, conflict: LockConflict) -> str:
            asked.append((task.name, conflict.task_id))
            return "raise"

        job = app.task(base=SingletonTask, name="job", on_conflict=decide)(body(lambda: None))
        hold(job)
        with pytest.raises(LockConflict):
            job.apply().get()
        assert asked == [("job", "other-task")]

    def test_callable_that_returns_nonsense_is_an_error(self, app: Celery) -> None:
        job = app.task(base=SingletonTask, name="job", on_conflict=lambda task, conflict: "maybe")(body(lambda: None))
        hold(job)
        with pytest.raises(InvalidOption, match="'maybe'"):
            job.apply().get()

    def test_method_decides(self, app: Celery) -> None:
        class Deciding(SingletonTask):
            def on_conflict(self, conflict: LockConflict) -> str:  # type: ignore[override]
                return "raise"

        job = app.task(base=Deciding, name="job")(body(lambda: None))
        hold(job)
        with pytest.raises(LockConflict):
            job.apply().get()

    def test_refused_execution_frees_nothing(self, app: Celery, job: Any) -> None:
        job.apply()
        assert not is_free(app, job)


class TestUnavailable:
    @pytest.fixture
    def app(self) -> Celery:
        """An app with a lock server that does not exist."""
        made = App("down", set_as_current=False, broker="memory://", backend="cache+memory://")
        made.conf.singleton_lock_backend = "redis://:s3cret@127.0.0.1:1/0"
        return made

    def test_unavailable_lock_raises(self, app: Celery) -> None:
        job = app.task(base=SingletonTask, on_unavailable="raise")(body(lambda: None))
        with pytest.raises(LockUnavailable) as caught:
            job.apply().get()
        assert "127.0.0.1" in str(caught.value)
        assert "s3cret" not in str(caught.value)

    def test_task_runs_without_a_lock(self, app: Celery) -> None:
        job = app.task(base=SingletonTask, on_unavailable="run")(body(lambda: "ran"))
        assert job.apply().get() == "ran"

    def test_eager_call_cannot_be_put_back(self, app: Celery) -> None:
        job = app.task(base=SingletonTask)(body(lambda: None))
        with pytest.raises(LockUnavailable):
            job.apply().get()


class TestSignals:
    def test_run_sends_signals(self, app: Celery) -> None:
        got = []
        job = app.task(base=SingletonTask, name="job")(body(lambda: None))

        def acquired(sender: Any, task_id: str, key: str, lease: Lease, waited: float, **_: Any) -> None:
            got.append(("acquired", sender.name, task_id, key, lease.held))

        def released(sender: Any, task_id: str, key: str, lease: Lease, held: float, **_: Any) -> None:
            got.append(("released", sender.name, task_id, key, held >= 0))

        lock_acquired.connect(acquired)
        lock_released.connect(released)
        try:
            job.apply(task_id="t1")
        finally:
            lock_acquired.disconnect(acquired)
            lock_released.disconnect(released)
        key = job.lock_key_of()
        assert got == [("acquired", "job", "t1", key, True), ("released", "job", "t1", key, True)]

    def test_conflict_sends_a_signal(self, app: Celery) -> None:
        got = []
        job = app.task(base=SingletonTask, name="job")(body(lambda: None))
        hold(job)

        def receiver(sender: Any, task_id: str, conflict: LockConflict, policy: str, **_: Any) -> None:
            got.append((sender.name, task_id, conflict.task_id, policy))

        lock_conflict.connect(receiver)
        try:
            job.apply(task_id="t2")
        finally:
            lock_conflict.disconnect(receiver)
        assert got == [("job", "t2", "other-task", "skip")]

    def test_receiver_that_raises_changes_nothing(self, app: Celery) -> None:
        def bad(**_: Any) -> None:
            raise RuntimeError("receiver")

        lock_acquired.connect(bad)
        try:
            assert app.task(base=SingletonTask)(body(lambda: "ran")).apply().get() == "ran"
        finally:
            lock_acquired.disconnect(bad)


class TestForms:
    """The ways in which people write tasks."""

    def run(self, app: Celery, task: Any, *args: Any, **kwargs: Any) -> Any:
        result = task.apply(args, kwargs).get()
        assert is_free_after(app, task, *args, **kwargs)
        return result

    def test_class_based_task(self, app: Celery) -> None:
        class Sync(SingletonTask):
            name = "sync"
            lock_key = ["tenant"]

            def run(self, tenant: int, full: bool = False) -> tuple[int, bool]:
                return tenant, self.lock.held

        task = app.register_task(Sync())
        assert self.run(app, task, 1, full=True) == (1, True)
        assert task.lock_key_of(1) == task.lock_key_of(1, full=True)

    def test_lock_key_as_a_lambda(self, app: Celery) -> None:
        task = app.task(base=SingletonTask, lock_key=lambda arguments: arguments["a"])(body(lambda a, b=2: a))
        assert self.run(app, task, 1) == 1
        assert task.lock_key_of(1, 5) == task.lock_key_of(1)

    def test_lock_key_names_must_exist(self, app: Celery) -> None:
        with pytest.raises(InvalidOption, match="lock_key"):
            app.task(base=SingletonTask, lock_key=["tenant"])(body(lambda tenant_id: None)).name  # noqa: B018

    def test_star_arguments(self, app: Celery) -> None:
        task = app.task(base=SingletonTask)(body(lambda *args, **kwargs: (args, kwargs)))
        assert self.run(app, task, 1, 2, x=3) == ((1, 2), {"x": 3})

    def test_untyped_task(self, app: Celery) -> None:
        task = app.task(base=SingletonTask, typing=False)(body(lambda a: a))
        assert self.run(app, task, 1) == 1

    def test_autoretry_works(self, app: Celery) -> None:
        tries = []

        @app.task(base=SingletonTask, autoretry_for=(KeyError,), max_retries=2, default_retry_delay=0)
        def flaky() -> int:
            tries.append(1)
            if len(tries) < 3:
                raise KeyError("x")
            return len(tries)

        assert self.run(app, flaky) == 3

    def test_shared_task(self, app: Celery) -> None:
        @shared_task(base=SingletonTask, name=f"shared{next(_numbers)}")
        def job() -> str:
            return "ran"

        app.set_current()
        assert job.apply().get() == "ran"

    def test_app_wide_base(self) -> None:
        made = App("all", set_as_current=False, broker="memory://", task_cls=SingletonTask)
        made.finalize()
        job = made.task(bind=True)(body(lambda self: self.lock.held))
        assert isinstance(job, SingletonTask)
        assert job.apply().get() is True

    def test_celerys_own_tasks_take_no_lock(self) -> None:
        made = App("all", set_as_current=False, broker="memory://", task_cls=SingletonTask)
        made.finalize()
        made.conf.singleton_lock_ttl = "this would be refused"
        assert made.tasks["celery.accumulate"].apply((1, 2), {"index": 0}).get() == 1

    def test_overridden_before_start(self, app: Celery) -> None:
        seen = []

        class Base(SingletonTask):
            def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
                seen.append(task_id)

        task = app.task(base=Base)(body(lambda: None))
        task.apply(task_id="x")
        assert seen == ["x"]


def is_free_after(app: Celery, task: Any, *args: Any, **kwargs: Any) -> bool:
    store = Runtime.of(app).store
    found = store.acquire(LockRequest(task.lock_key_of(*args, **kwargs), new_owner(), ttl=60, holder=Holder()))
    assert isinstance(found, Lease)
    return store.free(found)


class TestRequests:
    """Requests as Celery's own unit tests make them."""

    def trace(self, app: Celery, task: Any, request: dict[str, Any]) -> Any:
        tracer = build_tracer(task.name, task, app=app, eager=True, propagate=True)
        return tracer(request.get("id"), (), {}, request)[0]

    @pytest.mark.parametrize(
        "request_dict",
        [
            {"id": None, "is_eager": True, "delivery_info": {}},
            {"id": "x", "is_eager": True, "delivery_info": {}, "retries": None, "headers": None},
            {"id": "x", "is_eager": True, "delivery_info": {}, "hostname": None},
        ],
    )
    def test_sparse_requests_are_accepted(self, app: Celery, request_dict: dict[str, Any]) -> None:
        task = app.task(base=SingletonTask, bind=True)(body(lambda self: self.lock.held))
        assert self.trace(app, task, request_dict) is True

    def test_eager_mode_pushes_the_request_once(self, app: Celery) -> None:
        task = app.task(base=SingletonTask, bind=True)(body(lambda self: len(self.request_stack)))
        assert task.apply().get() == 1

    @pytest.mark.parametrize("forged", ["x", 3, {"key": 1}, {"nonsense": 1}, ["key"]])
    def test_forged_header_is_a_clear_error(self, app: Celery, forged: object) -> None:
        ran = []
        task = app.task(base=SingletonTask)(body(lambda: ran.append(1)))
        with pytest.raises(InvalidOption, match="singleton_lock"):
            task.apply(headers={"singleton_lock": forged}).get()
        assert ran == []

    def test_forged_lease_is_ignored(self, app: Celery) -> None:
        task = app.task(base=SingletonTask, bind=True)(body(lambda self: self.lock.held))
        request = {"id": "x", "is_eager": True, "delivery_info": {}, "singleton_lease": {"key": "k", "held": True}}
        assert self.trace(app, task, request) is True

    def test_bad_call_option_is_refused_before_sending(self, app: Celery) -> None:
        task = app.task(base=SingletonTask)(body(lambda: None))
        with pytest.raises(InvalidOption, match="on_conflict"):
            task.apply_async(singleton_lock={"on_conflict": "explode"})

    def test_call_options_travel_in_canvas(self, app: Celery) -> None:
        app.conf.task_always_eager = True
        task = app.task(base=SingletonTask, bind=True)(body(lambda self: self.lock.key))
        key = task.s().set(singleton_lock={"key": "tenant:7"}).apply_async().get()
        assert key == task.lock_key_of() or "tenant" not in key
        assert key != task.lock_key_of()


@pytest.mark.parametrize("headers", [123, "ab", ["a"], None, {}, [("a", 1)]])
@pytest.mark.parametrize("way", ["apply", "apply_async"])
def test_odd_headers_behave_as_with_celerys_own_task(app: Celery, headers: Any, way: str) -> None:
    def outcome(task: Any) -> Any:
        try:
            return getattr(task, way)(headers=headers).state
        except (TypeError, ValueError, AttributeError) as error:
            return repr(error)

    ours = app.task(body(lambda: 1), base=SingletonTask, name=f"ours{next(_numbers)}")
    stock = app.task(body(lambda: 1), base=Task, name=f"stock{next(_numbers)}")
    assert outcome(ours) == outcome(stock)


@pytest.mark.parametrize("way", ["apply", "apply_async"])
def test_call_options_are_not_lost_in_odd_headers(app: Celery, way: str) -> None:
    task = app.task(body(lambda: 1), base=SingletonTask)
    with pytest.raises(InvalidOption, match="headers of a call"):
        getattr(task, way)(headers=123, singleton_lock={"wait": 1})


def test_every_command_has_its_method(app: Celery) -> None:
    """Two of Celery's own tests ask for that."""
    assert callable(app.control.inspect().locks)
    assert callable(app.control.inspect().singleton_lock)
    assert callable(app.control.release_lock)


def test_tasks_have_the_settings_of_their_own_app() -> None:
    """Celery writes an app's settings to the class that it binds: the base would pass them on to all later tasks."""
    app = Celery("late", broker="memory://", set_as_current=False)
    app.conf.task_acks_late = True
    tasks = [app.task(shared=False, base=SingletonTask, name=name)(body(lambda: None)) for name in ("one", "two")]
    assert [task.acks_late for task in tasks] == [True, True]
    assert not SingletonTask.__bound__
