"""A copy of a message that was carried out ends in the same way, and its body does not run again."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chord
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock import ResultLost
from celery_singleton_lock.options.app import longest_delay
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent, raises
from tests.redis_server import RedisServer

#: Headers of a message that comes too late.
LATE = {"expires": "2020-01-01T00:00:00+00:00"}


def again(bench: Bench, message: Sent) -> Any:
    """Deliver a copy of a message whose worker died before it stored a result; returns its end."""
    bench.forget(message)
    bench.later(11.0)
    return bench.deliver(message, redelivered=True)


class TestSecondCopy:
    def test_copy_raises_the_error_of_the_first(self, bench: Bench) -> None:
        message = bench.send(bench.task(raises(KeyError("missing"))))
        for _ in range(2):
            assert repr(again(bench, message)) == "KeyError('missing')"
        assert bench.runs == [message.id]

    @pytest.mark.parametrize("acks_late", [False, True])
    @pytest.mark.parametrize("end", [Ignore(), Retry()])
    def test_copy_is_dropped_if_the_first_had_no_result(self, bench: Bench, end: Exception, acks_late: bool) -> None:
        message = bench.send(bench.task(raises(end), acks_late=acks_late))
        bench.deliver(message)
        assert again(bench, message) == "PENDING"
        assert bench.answers == ["ack", "ack"]
        assert bench.runs == [message.id]
        assert bench.queued() == []

    @pytest.mark.parametrize("is_requeued", [True, False])
    def test_copy_runs_after_a_reject(self, bench: Bench, is_requeued: bool) -> None:
        """The message was given back so that its queue or a dead-letter exchange delivers it again."""
        message = bench.send(bench.task(raises(Reject("x", requeue=is_requeued)), acks_late=True))
        for _ in range(2):
            again(bench, message)
        assert bench.answers == ["requeue" if is_requeued else "reject"] * 2
        assert bench.runs == [message.id] * 2

    def test_copy_runs_if_failed_messages_are_rejected(self, bench: Bench) -> None:
        task = bench.task(raises(ValueError()), acks_late=True, acks_on_failure_or_timeout=False)
        message = bench.send(task)
        for _ in range(2):
            again(bench, message)
        assert bench.runs == [message.id] * 2

    @pytest.mark.parametrize("end", [SystemExit(), KeyboardInterrupt(), GeneratorExit()])
    def test_copy_runs_if_the_first_was_stopped(self, bench: Bench, end: BaseException) -> None:
        task = bench.task(raises(end), acks_late=True, reject_on_worker_lost=True)
        message = bench.send(task)
        for _ in range(2):
            again(bench, message)
        assert bench.answers == ["requeue"] * 2
        assert bench.runs == [message.id] * 2

    def test_copy_is_dropped_if_the_result_is_stored(self, bench: Bench) -> None:
        follows = bench.task()
        message = bench.send(bench.task(lambda: 1), link=follows.s())
        bench.deliver(message)
        assert len(bench.queued()) == 1
        bench.later(11.0)
        assert bench.deliver(message, redelivered=True) == 1
        assert bench.queued() == [], "its callback was sent before"
        assert bench.runs == [message.id]

    def test_copy_is_dropped_if_results_are_ignored(self, bench: Bench) -> None:
        message = bench.send(bench.task(lambda: "x" * 10_000, ignore_result=True))
        bench.deliver(message)
        assert again(bench, message) == "PENDING"
        assert bench.runs == [message.id]

    def test_copy_of_a_run_with_a_large_value_is_a_clear_error(self, bench: Bench) -> None:
        message = bench.send(bench.task(lambda: "x" * 10_000))
        bench.deliver(message)
        end = again(bench, message)
        assert isinstance(end, ResultLost)
        assert "not run again" in str(end)
        assert bench.runs == [message.id]

    def test_copy_of_a_run_with_an_unstorable_value_fails(self, bench: Bench) -> None:
        """Celery fails the first one for that reason; the copy fails, too."""
        message = bench.send(bench.task(object))
        bench.deliver(message)
        assert isinstance(again(bench, message), ResultLost)
        assert bench.runs == [message.id]

    def test_copy_runs_if_nothing_is_remembered(self, bench: Bench) -> None:
        bench.app.conf.singleton_lock_done_ttl = 0
        message = bench.send(bench.task())
        for _ in range(2):
            assert again(bench, message) == "ran"
        assert bench.runs == [message.id] * 2

    def test_eager_copy_runs(self, bench: Bench) -> None:
        task = bench.task()
        for _ in range(2):
            assert task.apply(task_id="x").get() == "ran"
        assert bench.runs == ["x", "x"]


class TestAttemptBefore:
    """A worker died after it had sent the next attempt, and before it recorded that."""

    @pytest.fixture
    def attempts(self, bench: Bench) -> tuple[Sent, Sent]:
        def body() -> Any:
            if len(bench.runs) == 1:
                task.retry(throw=False, countdown=0)
                raise SystemExit
            return ends()

        def ends() -> Any:
            return bench.deliver(first, redelivered=True)

        task = bench.task(body, acks_late=True, reject_on_worker_lost=True, lock_limit=2)
        first = bench.send(task)
        bench.deliver(first)
        assert bench.answers == ["requeue"]
        return first, bench.put_back()

    def test_attempt_is_over_as_the_next_one_runs(self, bench: Bench, attempts: tuple[Sent, Sent]) -> None:
        first, second = attempts
        bench.deliver(second)
        assert bench.answers == ["requeue", "ack", "ack"]
        bench.deliver(first, redelivered=True)
        assert bench.runs == [first.id] * 2
        assert bench.queued() == []


class TestPartOfAChord:
    @pytest.fixture
    def app(self, app: Celery, redis_server: RedisServer) -> Celery:
        app.conf.result_backend = redis_server.url_of(0)
        return app

    def test_copy_is_only_counted(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """Celery sends callbacks, stores the value, and then has the chord count it: the worker has died in between."""
        follows, last = bench.task(), bench.task()
        options = {"lock_key": None, "acks_late": True, "reject_on_worker_lost": True}
        task = bench.task(lambda number: number, **options)
        chord([task.si(number).set(link=follows.si()) for number in range(2)], last.si()).apply_async()
        first, second = bench.queued()
        with monkeypatch.context() as dies:
            dies.setattr(type(bench.app.backend), "on_chord_part_return", raises(SystemExit()))
            bench.deliver(first)
        bench.deliver(second)
        assert [message.headers["task"] for message in bench.queued()] == [follows.name] * 2
        bench.later(11.0)
        bench.deliver(first, redelivered=True)
        assert [message.headers["task"] for message in bench.queued()] == [last.name]
        assert bench.runs == [first.id, second.id]


class TestExpired:
    """A redelivered message is looked at before it counts as expired, since it may be running."""

    def test_expired_message_does_not_run(self, bench: Bench) -> None:
        task = bench.task()
        message = bench.send(task).but(**LATE)
        assert bench.deliver(message, redelivered=True) == "REVOKED"
        assert bench.runs == []
        with hold_lock(task):
            pass

    def test_finished_message_is_not_expired(self, bench: Bench) -> None:
        message = bench.send(bench.task())
        bench.deliver(message)
        assert again(bench, message.but(**LATE)) == "ran"
        assert bench.runs == [message.id]

    @pytest.mark.parametrize("is_redelivered", [True, False])
    def test_running_message_is_not_expired(self, bench: Bench, is_redelivered: bool) -> None:
        def body() -> str:
            bench.deliver(message.but(**LATE), redelivered=True)
            return "ran"

        message = bench.send(bench.task(body, acks_late=True))
        assert bench.deliver(message, redelivered=is_redelivered) == "ran"
        assert bench.deliver(bench.put_back()) == "ran"
        assert bench.runs == [message.id]

    @pytest.mark.parametrize("expires", [None, "2999-01-01T00:00:00", "2999-01-01T00:00:00+05:00"])
    def test_message_that_has_not_expired_runs(self, bench: Bench, expires: str | None) -> None:
        message = bench.send(bench.task()).but(expires=expires)
        assert bench.deliver(message, redelivered=True) == "ran"


class TestWhileTheResultIsBeingStored:
    def test_copy_waits_for_less_than_the_visibility_timeout(self, bench: Bench) -> None:
        """Otherwise it would be redelivered while it waits, and multiply."""
        bench.app.conf.broker_transport_options = {"visibility_timeout": 3}
        message = bench.send(bench.task())
        bench.deliver(message)
        bench.forget(message)
        bench.deliver(message, redelivered=True)
        assert bench.seconds_until(bench.put_back()) < 2.0

    def test_longest_delay_follows_the_brokers_default(self) -> None:
        assert longest_delay(Celery(broker="redis://localhost", set_as_current=False).conf) == 1800
        assert longest_delay(Celery(broker="amqp://localhost", set_as_current=False).conf) == 256

    def test_unavailable_backend_is_asked_later(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        message = bench.send(bench.task())
        bench.deliver(message)
        bench.forget(message)
        bench.later(11.0)
        with monkeypatch.context() as away:
            away.setattr(bench.app.backend, "get", raises(OSError("gone")))
            away.setattr(bench, "end", lambda _: None)
            bench.deliver(message, redelivered=True)
        assert bench.deliver(bench.put_back()) == "ran"
        assert bench.runs == [message.id]


class TestWithoutBackend:
    @pytest.fixture
    def app(self, app: Celery) -> Celery:
        app.conf.result_backend = None
        return app

    def test_copy_sends_callbacks_that_were_not_sent(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        task = bench.task(lambda: 7, acks_late=True, reject_on_worker_lost=True)
        message = bench.send(task, link=bench.task().s())
        with monkeypatch.context() as broken:
            broken.setattr(bench.app.amqp, "send_task_message", raises(SystemExit()))
            bench.deliver(message)
        bench.later(11.0)
        bench.deliver(message, redelivered=True)
        assert len(bench.queued()) == 1
        assert bench.runs == [message.id]

    @pytest.mark.parametrize("error", [None, ValueError()])
    def test_copy_sends_nothing_if_everything_was_sent(self, bench: Bench, error: Exception | None) -> None:
        follows = bench.task(lambda *_: None)
        body = (lambda: 7) if error is None else raises(error)
        message = bench.send(bench.task(body), **{"link" if error is None else "link_error": follows.s()})
        bench.deliver(message)
        assert len(bench.queued()) + bench.runs.count(message.id) == 2
        bench.later(11.0)
        bench.deliver(message, redelivered=True)
        assert bench.queued() == []
        assert bench.runs.count(message.id) == 1


def test_result_of_an_earlier_task_with_the_same_id_does_not_count(bench: Bench) -> None:
    """A frozen signature was sent again, and the second worker died before it stored anything."""
    task, follows = bench.task(), bench.task()
    last_night = bench.send(task, task_id=bench.app.main)
    bench.deliver(last_night)
    old = {**bench.app.backend.get_task_meta(last_night.id, cache=False), "date_done": "2020-01-01T00:00:00+00:00"}
    bench.forget(last_night)
    to_night = bench.send(task, task_id=last_night.id, link=follows.s())
    bench.deliver(to_night)
    assert len(bench.queued()) == 1
    bench.later(11.0)
    bench.stored(to_night, old)
    bench.deliver(to_night, redelivered=True)
    assert len(bench.queued()) == 1, "its callback may not have been sent"
    assert len(bench.runs) == 2


@pytest.mark.parametrize("date", ["2020-01-01T00:00:00", "nonsense", None])
def test_result_with_an_unknown_time_counts(bench: Bench, date: object) -> None:
    """A date without a zone is UTC or local, depending on the backend: a fresh result must not look hours old."""
    message = bench.send(bench.task())
    bench.deliver(message)
    bench.stored(message, {**bench.app.backend.get_task_meta(message.id, cache=False), "date_done": date, "result": 5})
    bench.later(11.0)
    assert bench.deliver(message, redelivered=True) == 5
    assert bench.runs == [message.id]


def test_refusal_is_repeated(bench: Bench) -> None:
    task = bench.task()
    message = bench.send(task)
    with hold_lock(task):
        assert bench.deliver(message) == "REVOKED"
    assert again(bench, message) == "REVOKED"
    assert bench.runs == []


def test_attempt_that_retried_and_returned_keeps_its_own_end(bench: Bench) -> None:
    def body() -> str:
        if len(bench.runs) == 1:
            with pytest.raises(Retry):
                task.retry(countdown=0)
        return f"run {len(bench.runs)}"

    task = bench.task(body)
    first = bench.send(task)
    assert bench.deliver(first) == "run 1"
    bench.forget(first)
    assert bench.deliver(bench.put_back()) == "run 2"
    assert again(bench, first) == "run 1"
    assert len(bench.runs) == 2
