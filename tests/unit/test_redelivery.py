"""A copy of a message that was carried out ends in the same way."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock import LockUnavailable, ResultLost
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.options.delivery import longest_delay
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.task import redelivery, requeue, value_codec
from celery_singleton_lock.task.on_conflict import Skipped
from celery_singleton_lock.task.outcome import Outcome
from celery_singleton_lock.task.running import progress_of
from celery_singleton_lock.testing import hold_lock
from tests.unit.deliveries import deliver, id_for, make

pytestmark = pytest.mark.usefixtures("settled_at_once")

_numbers = itertools.count()


class NotSerialisable:
    pass


class TestSecondCopy:
    @pytest.mark.parametrize("value", [None, 0, "text", [1, 2], {"a": [None]}, 1.5])
    def test_copy_returns_the_value_of_the_first(self, app: Celery, value: object) -> None:
        task, runs = make(app, lambda: value)
        assert deliver(task) == value
        assert deliver(task) == value
        assert len(runs) == 1

    def test_copy_raises_the_error_of_the_first(self, app: Celery) -> None:
        task, runs = make(app, lambda: {}["missing"])
        for _ in range(2):
            with pytest.raises(KeyError, match="missing"):
                deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("end", [Ignore(), Retry()])
    def test_copy_is_dropped_if_the_first_had_no_result(self, app: Celery, end: Exception) -> None:
        def body() -> None:
            raise end

        task, runs = make(app, body)
        with pytest.raises(type(end)):
            deliver(task)
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("requeue", [True, False])
    def test_copy_runs_after_a_reject(self, app: Celery, requeue: bool) -> None:
        """The message was given back so that its queue or a dead-letter exchange delivers it again."""

        def body() -> None:
            raise Reject("x", requeue=requeue)

        task, runs = make(app, body)
        for _ in range(2):
            with pytest.raises(Reject):
                deliver(task)
        assert len(runs) == 2

    def test_copy_runs_if_failed_messages_are_rejected(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1 / 0, acks_late=True, acks_on_failure_or_timeout=False)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                deliver(task)
        assert len(runs) == 2

    @pytest.mark.parametrize("end", [SystemExit(), KeyboardInterrupt(), GeneratorExit()])
    def test_copy_runs_if_the_first_was_stopped(self, app: Celery, end: BaseException) -> None:
        def body() -> None:
            raise end

        task, runs = make(app, body)
        for _ in range(2):
            with pytest.raises(type(end)):
                deliver(task)
        assert len(runs) == 2

    def test_copy_is_dropped_if_the_result_is_stored(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)
        app.backend.store_result(id_for(task), 1, "SUCCESS")
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    def test_copy_of_a_part_is_only_counted_by_its_chord(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        """Celery sends callbacks and the next step, stores the value, and then lets the chord count it."""
        monkeypatch.setattr(redelivery, "counts_part_once", lambda _: True)
        monkeypatch.setattr(redelivery, "SETTLING", -1.0)
        task, runs = make(app, lambda: 1)
        following: dict[str, Any] = {"chord": {"chord_size": 2}, "callbacks": [{"task": "a"}], "chain": [{"task": "b"}]}
        deliver(task, **following)
        app.backend.store_result(id_for(task), 1, "SUCCESS")
        seen: list[object] = []
        ended = redelivery._stored_end

        def end(*args: Any) -> Any:
            found = ended(*args)
            seen.extend((task.request.callbacks, task.request.chain))
            return found

        monkeypatch.setattr(redelivery, "_stored_end", end)
        assert deliver(task, **following) == 1
        assert seen == [None, None]
        assert len(runs) == 1

    def test_copy_is_dropped_if_results_are_ignored(self, app: Celery) -> None:
        task, runs = make(app, lambda: "x" * 10_000, ignore_result=True)
        deliver(task)
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    def test_copy_of_a_run_with_a_large_value_is_a_clear_error(self, app: Celery) -> None:
        task, runs = make(app, lambda: "x" * 10_000)
        deliver(task)
        with pytest.raises(ResultLost, match=r"job\d+\[id-.*4096 bytes.*not run again"):
            deliver(task)
        assert len(runs) == 1

    def test_copy_of_a_run_with_an_unstorable_value_fails(self, app: Celery) -> None:
        """Celery fails the first one for that reason; the copy fails, too."""
        task, runs = make(app, NotSerialisable)
        deliver(task)
        with pytest.raises(ResultLost):
            deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("other", [{"id": "y"}, {"retries": 1}, {"replaced_task_nesting": 1}])
    def test_other_message_runs(self, app: Celery, other: dict[str, Any]) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)
        deliver(task, **other)
        assert len(runs) == 2

    def test_copy_runs_if_nothing_is_remembered(self, app: Celery) -> None:
        app.conf.singleton_lock_done_ttl = 0
        task, runs = make(app, lambda: 1)
        for _ in range(2):
            deliver(task)
        assert len(runs) == 2

    def test_eager_copy_runs(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        for _ in range(2):
            assert task.apply(task_id="x").get() == 1
        assert len(runs) == 2

    @pytest.mark.parametrize("nonsense", ["1", [1], {}, None, 1.5])
    def test_nonsense_in_the_headers_counts_as_a_first_attempt(self, app: Celery, nonsense: object) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task, retries=nonsense, replaced_task_nesting=nonsense)
        deliver(task)
        assert len(runs) == 1


class TestAttemptBefore:
    def test_attempt_is_over_once_the_next_one_runs(self, app: Celery) -> None:
        """Its worker died after it had sent the next one, and before it recorded that."""
        task, runs = make(app, lambda: 1)
        deliver(task, retries=1)
        for _ in range(2):
            with pytest.raises(requeue.GoesOn, match="retried"):
                deliver(task)
        assert len(runs) == 1

    def test_attempt_is_over_even_if_the_next_one_dies(self, app: Celery) -> None:
        def body() -> None:
            with pytest.raises(requeue.GoesOn, match="retried"):
                deliver(task)

        task, runs = make(app, body, lock_limit=2)
        deliver(task, retries=1)
        assert len(runs) == 1

    def test_attempt_keeps_its_own_end(self, app: Celery) -> None:
        """It caught the `Retry` that was raised, and returned a value."""
        task, runs = make(app, lambda: "done")
        deliver(task)
        deliver(task, retries=1)
        assert deliver(task) == "done"
        assert len(runs) == 2

    def test_next_attempt_runs_even_if_it_cannot_record_the_end_of_the_last(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise LockUnavailable("server", "no answer")

        monkeypatch.setattr(Runtime.of(app).store, "refuse", refuse, raising=False)
        task, runs = make(app, lambda: "done")
        assert deliver(task, retries=1) == "done"
        assert len(runs) == 1


class TestExpired:
    """A redelivered message is looked at before it counts as expired, since it may be running."""

    LATE = {"delivery_info": {"redelivered": True}, "expires": "2020-01-01T00:00:00"}

    def test_expired_message_does_not_run(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        with pytest.raises(Ignore, match="expired"):
            deliver(task, **self.LATE)
        assert runs == []
        assert app.backend.get_state(id_for(task)) == "REVOKED"
        assert dict(Runtime.of(app).store.all_held(app.main)) == {}

    def test_expired_copy_that_was_put_back_does_not_run(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        carries = {"put_back": {"retries": 0, "unavailable": 1, "redelivered": True}}
        with pytest.raises(Ignore, match="expired"):
            deliver(task, carries=carries, expires=self.LATE["expires"])
        assert runs == []

    def test_finished_message_is_not_expired(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)
        assert deliver(task, **self.LATE) == 1
        assert len(runs) == 1

    @pytest.mark.parametrize("expires", [None, "2999-01-01T00:00:00", "2999-01-01T00:00:00+05:00"])
    def test_message_that_has_not_expired_runs(self, app: Celery, expires: str | None) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task, **{**self.LATE, "expires": expires})
        assert len(runs) == 1


class TestWhileTheResultIsBeingStored:
    def test_copy_is_put_back(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redelivery, "SETTLING", 10.0)
        task, runs = make(app, lambda: 1)
        deliver(task)
        with pytest.raises(Ignore, match=r"put back, due in (9\.|10\.0)"):
            deliver(task, headers={})
        assert len(runs) == 1

    def test_copy_waits_for_less_than_the_visibility_timeout(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise it would be redelivered while it waits, and multiply."""
        monkeypatch.setattr(redelivery, "SETTLING", 10.0)
        app.conf.broker_transport_options = {"visibility_timeout": 3}
        task, _ = make(app, lambda: 1)
        deliver(task)
        with pytest.raises(Ignore, match=r"put back, due in 1\.5 s"):
            deliver(task, headers={})

    def test_longest_delay_follows_the_brokers_default(self) -> None:
        assert longest_delay(Celery(broker="redis://localhost", set_as_current=False).conf) == 1800
        assert longest_delay(Celery(broker="amqp://localhost", set_as_current=False).conf) == 256

    def test_unavailable_backend_is_asked_later(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)

        def broken(*_: object) -> None:
            raise OSError("gone")

        monkeypatch.setattr(app.backend, "get_state", broken)
        with pytest.raises(Ignore, match="put back"):
            deliver(task, headers={})
        assert len(runs) == 1


class TestWithoutBackend:
    @pytest.fixture
    def app(self) -> Celery:
        app = Celery(f"redelivery{next(_numbers)}", set_as_current=False, broker="memory://")
        app.conf.singleton_lock_prefix = app.main
        return app

    def test_copy_sends_callbacks_that_were_not_sent(self, app: Celery) -> None:
        task, runs = make(app, lambda: 7)
        follows = [task.s()]
        assert deliver(task, callbacks=follows) == 7
        assert deliver(task, callbacks=follows) == 7
        assert len(runs) == 1

    @pytest.mark.parametrize("fails", [False, True])
    def test_copy_sends_nothing_if_everything_was_sent(self, app: Celery, fails: bool) -> None:
        sent = []
        task, runs = make(app, lambda: 1 / 0 if fails else 7)

        @app.task(shared=False)
        def follow(*_: object) -> None:
            sent.append(1)

        app.conf.task_always_eager = True
        tracer = build_tracer(task.name, task, app=app)
        follows = {"errbacks" if fails else "callbacks": [follow.s()]}
        for _ in range(2):
            tracer("x", (), {}, {"id": "x", "is_eager": False, "delivery_info": {}, **follows})
        assert sent == [1]
        assert len(runs) == 1


class TestForeignRecords:
    """Values that we did not write: whatever they are, the message does not run twice."""

    @pytest.mark.parametrize(
        "record",
        [b"", b"x", b"[]", b"null\n", b'["SUCCESS"]', b'["SUCCESS", "x", true]\n1', b'["SUCCESS", 1, true, 0]\n\xff{'],
    )
    def test_foreign_record_is_a_clear_error(self, app: Celery, record: bytes) -> None:
        task, _ = make(app, lambda: 1)
        task.push_request(id=id_for(task), headers={})
        try:
            assert isinstance(redelivery.answer(task, Record("message", record, 0.0)).error, ResultLost)
        finally:
            task.pop_request()

    @pytest.mark.parametrize("content", [b"null", b"1", b"[]", b'{"exc_type": 1}', b"{"])
    def test_foreign_record_of_a_failure_is_a_clear_error(self, app: Celery, content: bytes) -> None:
        task, _ = make(app, lambda: 1)
        task.push_request(id=id_for(task), headers={})
        try:
            assert isinstance(
                redelivery.answer(task, Record("message", b'["FAILURE", 1, true, false]\n' + content, 0.0)).error,
                ResultLost,
            )
        finally:
            task.pop_request()

    def test_pickle_is_not_read_if_only_json_is_accepted(self, app: Celery) -> None:
        task, _ = make(app, lambda: 1)
        task.push_request(id=id_for(task), headers={})
        try:
            assert isinstance(
                redelivery.answer(task, Record("message", b'["SUCCESS", 1, true, false]\n\x80\x04K\x01.', 0.0)).error,
                ResultLost,
            )
        finally:
            task.pop_request()


def test_second_copy_takes_no_lock(app: Celery) -> None:
    task, _ = make(app, lambda: 1)
    deliver(task)
    deliver(task)
    assert dict(Runtime.of(app).store.all_held(app.main)) == {}


def test_result_of_an_earlier_task_with_the_same_id_does_not_count(app: Celery) -> None:
    """A frozen signature was sent again, and the second worker died before it stored anything."""
    task, _ = make(app, lambda: 1)
    task.backend.store_result(id_for(task), "last night's", "SUCCESS")
    ended = Outcome("SUCCESS", value_codec.dumps("this night's", 100))
    record = ended.record_of(Holder("message"), 3600.0)._replace(seconds=3599.0)
    task.push_request(id=id_for(task), headers={})
    try:
        with pytest.raises(Ignore):
            redelivery.answer(task, record)
        meta = {**task.backend.get_task_meta(id_for(task), cache=False), "date_done": "2020-01-01T00:00:00+00:00"}
        task.backend.get_task_meta = lambda *_: meta
        assert redelivery.answer(task, record).value == "this night's"
    finally:
        task.pop_request()


@pytest.mark.parametrize("date", ["2020-01-01T00:00:00", datetime(2020, 1, 1), "nonsense", None])
def test_result_with_an_unknown_time_counts(app: Celery, date: object) -> None:
    """A date without a zone is UTC or local, depending on the backend: a fresh result must not look hours old."""
    task, runs = make(app, lambda: 1)
    deliver(task)
    app.backend.store_result(id_for(task), 1, "SUCCESS")
    meta = {**task.backend.get_task_meta(id_for(task), cache=False), "date_done": date}
    task.backend.get_task_meta = lambda *_: meta
    with pytest.raises(Ignore):
        deliver(task)
    assert len(runs) == 1


def test_repeated_revocation_is_settled(app: Celery) -> None:
    task, runs = make(app, lambda: 1, ignore_result=True)
    with hold_lock(task), pytest.raises(Skipped):
        deliver(task, chain=[task.si()])
    task.push_request(id=id_for(task), called_directly=False, delivery_info={}, chain=[task.si()])
    try:
        with pytest.raises(Skipped):
            task()
        assert progress_of(task.request).settle is not None
    finally:
        task.pop_request()
    assert runs == []
