"""A copy of a message that was carried out ends as that did."""

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
from celery_singleton_lock.task.original import PUT_BACK_HEADER
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
    def test_returns_what_the_first_returned(self, app: Celery, value: object) -> None:
        task, runs = make(app, lambda: value)
        assert deliver(task) == value
        assert deliver(task) == value
        assert len(runs) == 1

    def test_raises_what_the_first_raised(self, app: Celery) -> None:
        task, runs = make(app, lambda: {}["missing"])
        for _ in range(2):
            with pytest.raises(KeyError, match="missing"):
                deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("end", [Ignore(), Retry()])
    def test_is_dropped_when_the_first_left_nothing_to_tell(self, app: Celery, end: Exception) -> None:
        def body() -> None:
            raise end

        task, runs = make(app, body)
        with pytest.raises(type(end)):
            deliver(task)
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("requeue", [True, False])
    def test_runs_again_after_a_reject(self, app: Celery, requeue: bool) -> None:
        """It is given back to be delivered again, by its queue or by a dead-letter exchange."""

        def body() -> None:
            raise Reject("x", requeue=requeue)

        task, runs = make(app, body)
        for _ in range(2):
            with pytest.raises(Reject):
                deliver(task)
        assert len(runs) == 2

    def test_runs_again_where_failed_messages_are_rejected(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1 / 0, acks_late=True, acks_on_failure_or_timeout=False)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                deliver(task)
        assert len(runs) == 2

    @pytest.mark.parametrize("end", [SystemExit(), KeyboardInterrupt(), GeneratorExit()])
    def test_runs_again_when_the_first_was_stopped(self, app: Celery, end: BaseException) -> None:
        def body() -> None:
            raise end

        task, runs = make(app, body)
        for _ in range(2):
            with pytest.raises(type(end)):
                deliver(task)
        assert len(runs) == 2

    def test_is_dropped_when_the_result_is_stored(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)
        app.backend.store_result(id_for(task), 1, "SUCCESS")
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    def test_end_of_a_part_is_reported_to_the_chord_alone(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        """Celery sends callbacks and the next step, stores the value, and then has the chord count it."""
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

    def test_is_dropped_when_nobody_wants_the_result(self, app: Celery) -> None:
        task, runs = make(app, lambda: "x" * 10_000, ignore_result=True)
        deliver(task)
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    def test_of_a_large_value_is_a_clear_error(self, app: Celery) -> None:
        task, runs = make(app, lambda: "x" * 10_000)
        deliver(task)
        with pytest.raises(ResultLost, match=r"job\d+\[id-.*4096 bytes.*not run again"):
            deliver(task)
        assert len(runs) == 1

    def test_of_what_cannot_be_stored(self, app: Celery) -> None:
        """Celery fails the first one for it; this one says so too."""
        task, runs = make(app, NotSerialisable)
        deliver(task)
        with pytest.raises(ResultLost):
            deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("other", [{"id": "y"}, {"retries": 1}, {"replaced_task_nesting": 1}])
    def test_of_another_message_runs(self, app: Celery, other: dict[str, Any]) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)
        deliver(task, **other)
        assert len(runs) == 2

    def test_runs_when_nothing_is_to_be_remembered(self, app: Celery) -> None:
        app.conf.singleton_lock_done_ttl = 0
        task, runs = make(app, lambda: 1)
        for _ in range(2):
            deliver(task)
        assert len(runs) == 2

    def test_runs_when_it_is_eager(self, app: Celery) -> None:
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
    def test_is_over_once_the_next_one_runs(self, app: Celery) -> None:
        """Its worker died between sending that and recording it."""
        task, runs = make(app, lambda: 1)
        deliver(task, retries=1)
        for _ in range(2):
            with pytest.raises(requeue.GoesOn, match="retried"):
                deliver(task)
        assert len(runs) == 1

    def test_is_over_also_if_the_next_one_dies(self, app: Celery) -> None:
        def body() -> None:
            with pytest.raises(requeue.GoesOn, match="retried"):
                deliver(task)

        task, runs = make(app, body, lock_limit=2)
        deliver(task, retries=1)
        assert len(runs) == 1

    def test_keeps_its_own_end(self, app: Celery) -> None:
        """It has caught the `Retry` that was raised, and returned a value."""
        task, runs = make(app, lambda: "done")
        deliver(task)
        deliver(task, retries=1)
        assert deliver(task) == "done"
        assert len(runs) == 2

    def test_nothing_is_recorded_while_the_server_is_silent(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise LockUnavailable("server", "no answer")

        monkeypatch.setattr(Runtime.of(app).store, "refuse", refuse, raising=False)
        task, runs = make(app, lambda: "done")
        assert deliver(task, retries=1) == "done"
        assert len(runs) == 1


class TestExpired:
    """A message that is delivered again is looked at before it counts as expired: it may be running."""

    LATE = {"delivery_info": {"redelivered": True}, "expires": "2020-01-01T00:00:00"}

    def test_is_not_run(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        with pytest.raises(Ignore, match="expired"):
            deliver(task, **self.LATE)
        assert runs == []
        assert app.backend.get_state(id_for(task)) == "REVOKED"
        assert dict(Runtime.of(app).store.all_held(app.main)) == {}

    def test_copy_of_it_that_was_put_back_is_not_run(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        headers = {PUT_BACK_HEADER: {"retries": 0, "unavailable": 1, "redelivered": True}}
        with pytest.raises(Ignore, match="expired"):
            deliver(task, headers=headers, expires=self.LATE["expires"])
        assert runs == []

    def test_is_not_expired_when_it_was_done(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)
        assert deliver(task, **self.LATE) == 1
        assert len(runs) == 1

    @pytest.mark.parametrize("expires", [None, "2999-01-01T00:00:00", "2999-01-01T00:00:00+05:00"])
    def test_runs_while_there_is_time(self, app: Celery, expires: str | None) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task, **{**self.LATE, "expires": expires})
        assert len(runs) == 1


class TestWhileItIsStillBeingStored:
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
        """Else it would be delivered again while it waits, and multiply."""
        monkeypatch.setattr(redelivery, "SETTLING", 10.0)
        app.conf.broker_transport_options = {"visibility_timeout": 3}
        task, _ = make(app, lambda: 1)
        deliver(task)
        with pytest.raises(Ignore, match=r"put back, due in 1\.5 s"):
            deliver(task, headers={})

    def test_also_where_that_is_the_brokers_default(self) -> None:
        assert longest_delay(Celery(broker="redis://localhost", set_as_current=False).conf) == 1800
        assert longest_delay(Celery(broker="amqp://localhost", set_as_current=False).conf) == 256

    def test_backend_that_cannot_be_asked_is_asked_later(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def test_copy_sends_what_follows_if_that_was_not_sent(self, app: Celery) -> None:
        task, runs = make(app, lambda: 7)
        follows = [task.s()]
        assert deliver(task, callbacks=follows) == 7
        assert deliver(task, callbacks=follows) == 7
        assert len(runs) == 1

    @pytest.mark.parametrize("fails", [False, True])
    def test_copy_sends_nothing_after_all_was_sent(self, app: Celery, fails: bool) -> None:
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
    """Values that we did not write; whatever they are, the message is not run twice."""

    @pytest.mark.parametrize(
        "record",
        [b"", b"x", b"[]", b"null\n", b'["SUCCESS"]', b'["SUCCESS", "x", true]\n1', b'["SUCCESS", 1, true, 0]\n\xff{'],
    )
    def test_are_a_clear_error(self, app: Celery, record: bytes) -> None:
        task, _ = make(app, lambda: 1)
        task.push_request(id=id_for(task), headers={})
        try:
            assert isinstance(redelivery.answer(task, Record("message", record, 0.0)).error, ResultLost)
        finally:
            task.pop_request()

    @pytest.mark.parametrize("content", [b"null", b"1", b"[]", b'{"exc_type": 1}', b"{"])
    def test_of_a_failure(self, app: Celery, content: bytes) -> None:
        task, _ = make(app, lambda: 1)
        task.push_request(id=id_for(task), headers={})
        try:
            assert isinstance(
                redelivery.answer(task, Record("message", b'["FAILURE", 1, true, false]\n' + content, 0.0)).error,
                ResultLost,
            )
        finally:
            task.pop_request()

    def test_pickle_is_not_read_where_only_json_is_accepted(self, app: Celery) -> None:
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


def test_result_of_an_earlier_task_with_the_same_id_is_not_its_own(app: Celery) -> None:
    """A signature was frozen and sent again; the second worker died before it stored anything."""
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
def test_result_whose_time_is_not_known_is_its_own(app: Celery, date: object) -> None:
    """A date without a zone is UTC or local, as the backend likes: a fresh one must not look hours old."""
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
