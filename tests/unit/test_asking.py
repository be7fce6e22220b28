"""A lock that is asked for while its message is made: nothing is sent before it is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from threading import Timer
from typing import Any

import pytest
from celery import Celery, Task
from celery.signals import before_task_publish
from kombu import Producer

from celery_singleton_lock import DuplicateResult, LockUnavailable, SingletonTask
from celery_singleton_lock.keys.key import key_of_queue
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, LockRequest, PendingAnswer, Record
from celery_singleton_lock.stores.memory import MemoryStore


class Steps(list[str]):
    """The steps that were taken, in order."""


@pytest.fixture
def steps(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """The steps of an app whose store can be asked ahead."""
    steps, make, call = Steps(), app.amqp.create_task_message, type(app.backend).on_task_call

    def ask(store: MemoryStore, request: LockRequest) -> PendingAnswer:
        def answer() -> Lease | Held | Record:
            steps.append("answered")
            return store.acquire(request)

        steps.append("asked")
        return PendingAnswer(answer, lambda: steps.append("dropped"))

    def made(*args: Any, **kwargs: Any) -> Any:
        steps.append("made")
        return make(*args, **kwargs)

    def told(*args: Any) -> Any:
        steps.append("backend told")
        return call(*args)

    def about_to_publish(sender: str, **_: Any) -> None:
        steps.append("published")

    monkeypatch.setattr(MemoryStore, "ask", ask, raising=False)
    monkeypatch.setitem(vars(app.amqp), "create_task_message", made)
    monkeypatch.setattr(type(app.backend), "on_task_call", told)
    before_task_publish.connect(about_to_publish)
    yield steps
    before_task_publish.disconnect(about_to_publish)


@pytest.fixture
def job(app: Celery) -> Any:
    @app.task(base=SingletonTask, name="asking.job", shared=False, lock_scope="until_executed")
    def job(number: int) -> None: ...

    return job


def held(job: Any, *args: Any) -> Any:
    return Runtime.of(job.app).store.inspect(key_of_queue(job.lock_key_of(*args))).held


def by_itself(job: Any) -> Any:
    return job.delay(1)


def with_a_producer(job: Any) -> Any:
    with job.app.producer_or_acquire() as producer:
        return job.apply_async((1,), producer=producer)


@pytest.mark.parametrize("send", [by_itself, with_a_producer])
def test_message_is_made_before_the_answer_and_leaves_after_it(
    steps: Steps, job: Any, send: Callable[[Any], Any]
) -> None:
    send(job)
    assert steps == ["asked", "made", "answered", "backend told", "published"]
    steps.clear()
    assert isinstance(send(job), DuplicateResult)
    assert steps == ["asked", "made", "answered"]


@pytest.mark.parametrize("number", range(3))
def test_producers_are_returned(steps: Steps, job: Any, number: int) -> None:
    pool = job.app.producer_pool
    for _ in range(3):
        job.delay(number)
    assert len(pool._dirty) == 0


def test_connection_that_has_failed_is_replaced(job: Any, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Celery asks for the producer itself."""
    left: list[Any] = []
    leave = Producer.__exit__

    def left_with(producer: Producer, *error: Any) -> None:
        left.append(error[0])
        leave(producer, *error)

    monkeypatch.setattr(Producer, "__exit__", left_with)

    def publish(*_: Any, **__: Any) -> None:
        raise OSError("gone")

    job.delay(1)
    monkeypatch.setattr(Producer, "publish", publish)
    with pytest.raises(OSError, match="gone"):
        job.delay(2)
    assert left == [None, OSError]
    assert held(job, 2) == ()


def test_send_waits_for_a_producer_while_all_are_in_use(job: Any, steps: Steps) -> None:
    """As Celery does."""
    pool = job.app.producer_pool
    with ExitStack() as stack:
        in_use = [stack.enter_context(pool.acquire(block=True)) for _ in range(pool.limit)]
        Timer(0.3, in_use[0].release).start()
        job.delay(1)
        assert steps[-1] == "published"
    assert len(pool._dirty) == 0


def test_failure_to_make_the_message_leaves_no_lock(steps: Steps, job: Any) -> None:
    with pytest.raises(TypeError):
        job.apply_async((1,), countdown="soon")
    assert steps[0] == "asked"
    assert steps[-1] == "dropped"
    assert held(job, 1) == ()


def test_error_of_another_lock_server_is_not_taken_for_its_own(steps: Steps, job: Any) -> None:
    """A router also sends something, whose lock server does not answer."""

    def router(*_: Any, **__: Any) -> None:
        raise LockUnavailable("another server")

    job.app.conf.task_routes = (router,)
    with pytest.raises(LockUnavailable, match="another server"):
        job.delay(1)
    assert "published" not in steps
    assert held(job, 1) == ()


class TestQuestionThatFails:
    """It is interrupted while it is sent, so the server may have got it."""

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), LockUnavailable("memory://"), RuntimeError("as told")])
    def test_leaves_no_lock(
        self, steps: Steps, job: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        def ask(store: MemoryStore, request: LockRequest) -> PendingAnswer:
            store.acquire(request)
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(MemoryStore, "ask", ask)
            if isinstance(error, LockUnavailable):
                assert not isinstance(job.delay(1), DuplicateResult)
            else:
                with pytest.raises(type(error)):
                    job.delay(1)
        assert held(job, 1) == ()
        assert steps == (["made", "backend told", "published"] if isinstance(error, LockUnavailable) else [])


class TestOtherWaysOfPublishing:
    """The lock is taken before: nobody knows when another way sends."""

    def test_send_task_of_the_app(self, steps: Steps, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def send_task(*args: Any, **options: Any) -> Any:
            steps.append("sent")
            return job.AsyncResult(options["task_id"])

        monkeypatch.setattr(job.app, "send_task", send_task)
        job.delay(1)
        job.delay(1)
        assert steps == ["asked", "answered", "sent", "asked", "answered"]

    def test_producer_of_the_app(self, steps: Steps, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The app may have its own pool of producers."""

        class Own(type(job.app)):  # type: ignore[misc]
            def producer_or_acquire(self, producer: Any = None) -> Any:
                steps.append("producer asked for")
                return super().producer_or_acquire(producer)

        monkeypatch.setattr(job.app, "__class__", Own)
        job.delay(1)
        assert steps[:2] == ["asked", "answered"]
        assert steps.count("producer asked for") == 1

    def test_own_connection(self, steps: Steps, job: Any) -> None:
        with job.app.connection_for_write() as connection:
            job.apply_async((1,), connection=connection)
        assert steps == ["asked", "answered", "made", "backend told", "published"]

    @pytest.mark.parametrize("owner", [Task, Celery])
    def test_method_of_the_class(self, steps: Steps, job: Any, monkeypatch: pytest.MonkeyPatch, owner: type) -> None:
        """Tests and tracing libraries replace it under the same name."""
        method = Task.apply_async if owner is Task else Celery.send_task

        @wraps(method)
        def instead(self: Any, *args: Any, **options: Any) -> Any:
            steps.append("sent")
            return job.AsyncResult(options["task_id"])

        monkeypatch.setattr(owner, method.__name__, instead)
        job.delay(1)
        assert isinstance(job.delay(1), DuplicateResult)
        assert steps == ["asked", "answered", "sent", "asked", "answered"]
