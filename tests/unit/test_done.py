"""What a copy of a message that was carried out ends with."""

from __future__ import annotations

import itertools
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock import (
    LockConflict,
    LockLost,
    ResultLost,
    SingletonTask,
)
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.delivery import longest_delay
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.task import redelivery, refusal, requeue, value_codec
from celery_singleton_lock.task.execution import holder_of
from celery_singleton_lock.task.on_conflict import Skipped
from celery_singleton_lock.task.original import PUT_BACK_HEADER
from celery_singleton_lock.task.outcome import Outcome
from celery_singleton_lock.task.running import progress_of

_numbers = itertools.count()


class NotSerialisable:
    pass


@pytest.fixture
def app() -> Celery:
    app = Celery(f"done{next(_numbers)}", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.singleton_lock_prefix = app.main
    return app


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the first execution had had its time to store what it returned."""
    monkeypatch.setattr(redelivery, "SETTLING", 0.0)


def make(app: Celery, body: Any, **options: Any) -> Any:
    """A task and the list of its runs."""
    runs: list[str] = []

    def job(self: Any) -> Any:
        runs.append(self.request.id)
        return body()

    task = app.task(bind=True, base=SingletonTask, shared=False, name=f"job{next(_numbers)}", **options)(job)
    return task, runs


def id_for(task: Any) -> str:
    """The result backend in memory is one for all apps."""
    return f"id-{task.app.main}"


def deliver(task: Any, **request: Any) -> Any:
    """Call the task as a worker does with a message; what it returns or raises."""
    task.push_request(
        **{
            "id": id_for(task),
            "called_directly": False,
            "is_eager": False,
            "delivery_info": {},
            "retries": 0,
            **request,
        }
    )
    try:
        return task()
    finally:
        task.pop_request()


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
        app = Celery(f"done{next(_numbers)}", set_as_current=False, broker="memory://")
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


class TestEndWithoutABody:
    """It is the message's end: a copy that is delivered while the first one waits does not run afterwards."""

    def test_conflict_policy_that_fails(self, app: Celery) -> None:
        def decide(task: Any, conflict: object) -> str:
            raise RuntimeError("a fault of the policy")

        task, runs = make(app, lambda: 1, on_conflict=decide, acks_late=True)
        store, key = Runtime.of(app).store, task.lock_key_of()
        other = store.acquire(LockRequest(key, "o" * 32, ttl=60.0, holder=Holder("other")))
        assert isinstance(other, Lease)
        with pytest.raises(RuntimeError, match="policy"):
            deliver(task)
        store.free(other)
        with pytest.raises(RuntimeError, match="policy"):
            deliver(task)
        assert runs == []

    def test_conflict_policy_that_raises_the_conflict(self, app: Celery) -> None:
        def decide(task: Any, conflict: LockConflict) -> str:
            raise conflict

        task, runs = make(app, lambda: 1, on_conflict=decide, acks_late=True)
        other = Runtime.of(app).store.acquire(
            LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other"))
        )
        assert isinstance(other, Lease)
        with pytest.raises(LockConflict):
            deliver(task)
        Runtime.of(app).store.free(other)
        with pytest.raises(LockConflict):
            deliver(task)
        assert runs == []

    def test_body_that_makes_another_error_of_its_loss(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        """A copy of it runs by now: its end is the message's."""

        def lose() -> None:
            store = Runtime.of(app).store
            store.free(task.lock)
            task.lock.lose("deleted")
            holder = holder_of(task, task.request)
            assert isinstance(store.acquire(LockRequest(task.lock.key, "c" * 32, ttl=60.0, holder=holder)), Lease)
            try:
                task.lock.check()
            except LockLost:
                raise ValueError from None

        task, runs = make(app, lose, acks_late=True)
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    def test_lock_that_was_lost(self, app: Celery) -> None:
        def lose() -> None:
            Runtime.of(app).store.free(task.lock)
            task.lock.lose("deleted")
            task.lock.check()

        task, runs = make(app, lose, acks_late=True)
        for _ in range(2):
            with pytest.raises(LockLost):
                deliver(task)
        assert len(runs) == 1

    def test_lock_that_was_lost_and_is_still_there(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        """It could not be renewed, nor freed: what is there is its own, and no copy that carries it out."""

        def lose() -> None:
            task.lock.lose("could not be renewed")
            task.lock.check()

        task, runs = make(app, lose, acks_late=True)
        monkeypatch.setattr(Runtime.of(app).store, "free", lambda *_, **__: False)
        with pytest.raises(LockLost):
            deliver(task)
        assert len(runs) == 1

    def test_message_that_is_rejected_may_come_again(self, app: Celery) -> None:
        """As by a dead-letter exchange; like a failure of the body."""
        task, runs = make(app, lambda: 1, on_conflict="raise", acks_late=True, acks_on_failure_or_timeout=False)
        other = Runtime.of(app).store.acquire(
            LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other"))
        )
        assert isinstance(other, Lease)
        with pytest.raises(LockConflict):
            deliver(task)
        Runtime.of(app).store.free(other)
        assert deliver(task) == 1
        assert len(runs) == 1


class Interrupted(Exception):
    """As a soft time limit, at any line."""


def holds(app: Celery) -> list[str]:
    return [held.owner for _, held in Runtime.of(app).store.all_held(app.main)]


def interrupts(*_: object, **__: object) -> Any:
    raise Interrupted


class TestInterrupted:
    """Before its body, or beside it: one end for the message, and no lock stays behind."""

    def is_interrupted(self, task: Any) -> None:
        with pytest.raises(Interrupted):
            deliver(task)

    def has_ended(self, task: Any, runs: list[str]) -> None:
        """Nothing holds the lock, and a copy ends in the same way without a body."""
        assert holds(task.app) == []
        self.is_interrupted(task)
        assert runs == []

    def test_retry_whose_lock_was_kept(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        def again() -> None:
            raise task.retry(countdown=30)

        task, runs = make(app, again, lock_retain_on_retry=True)
        with pytest.raises(Retry):
            deliver(task)
        assert len(holds(app)) == 1
        with monkeypatch.context() as patched:
            patched.setattr(Runtime.of(app).store, "acquire", interrupts)
            with pytest.raises(Interrupted):
                deliver(task, retries=1)
        assert holds(app) == []
        with pytest.raises(Interrupted):
            deliver(task, retries=1)
        assert len(runs) == 1

    def test_what_a_delivery_before_gave_up_is_no_copy(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        task, runs = make(app, lambda: 1)
        given_up = "a" * 32
        headers = {PUT_BACK_HEADER: {"retries": 0, "given_up": [given_up]}}
        task.push_request(id=id_for(task), headers=headers)
        holder = holder_of(task, task.request)
        task.pop_request()
        Runtime.of(app).store.acquire(LockRequest(task.lock_key_of(), given_up, ttl=60.0, holder=holder))
        monkeypatch.setattr(Runtime.of(app).store, "acquire", interrupts)
        with pytest.raises(Interrupted):
            deliver(task, headers=headers)
        assert holds(app) == []
        assert runs == []

    @pytest.mark.parametrize("place", ["drop_if_expired", "acquire"])
    def test_with_the_lock(self, app: Celery, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        """Between the answer and the first line that cleans up."""
        task, runs = make(app, lambda: 1, acks_late=True)
        acquire = Runtime.of(app).store.acquire

        def granted(*arguments: Any, **options: Any) -> Any:
            found = acquire(*arguments, **options)
            if place == "acquire":
                raise Interrupted
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Runtime.of(app).store, "acquire", granted)
            if place == "drop_if_expired":
                patched.setattr(refusal, place, interrupts)
            self.is_interrupted(task)
        self.has_ended(task, runs)

    def test_as_the_body_is_about_to_begin(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        task, runs = make(app, lambda: 1, acks_late=True)
        with monkeypatch.context() as patched:
            patched.setattr("celery_singleton_lock.task.run.Body", interrupts)
            self.is_interrupted(task)
        self.has_ended(task, runs)

    @pytest.mark.parametrize("policy", ["retry", "skip"])
    def test_while_it_is_refused(self, app: Celery, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
        task, runs = make(app, lambda: 1, acks_late=True, on_conflict=policy)
        other = Runtime.of(app).store.acquire(
            LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other"))
        )
        assert isinstance(other, Lease)
        with monkeypatch.context() as patched:
            patched.setattr("celery_singleton_lock.task.on_conflict.end", interrupts)
            with suppress(Interrupted, Ignore):
                deliver(task)
        Runtime.of(app).store.free(other)
        with pytest.raises((Interrupted, Ignore)):
            deliver(task)
        assert runs == []

    def test_copy_leaves_the_end_to_the_one_that_runs(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        task, _ = make(app, lambda: 1, acks_late=True)
        task.push_request(id=id_for(task), headers={})
        holder = holder_of(task, task.request)
        task.pop_request()
        running = Runtime.of(app).store.acquire(LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=holder))
        assert isinstance(running, Lease)
        put_back, times = requeue.put_back, itertools.count()

        def interrupted_once(*arguments: Any, **options: Any) -> Any:
            return interrupts() if next(times) == 0 else put_back(*arguments, **options)

        monkeypatch.setattr(requeue, "put_back", interrupted_once)
        with pytest.raises(Ignore):
            deliver(task)
        assert next(times) == 2
        assert Runtime.of(app).store.renew([running], timeout=1.0) == [True]


def test_lock_that_the_body_lost_is_not_the_tasks(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure is recorded with the release, so that a copy that waits finds it."""

    def lose_another() -> None:
        raise LockLost("inner", "deleted")

    task, runs = make(app, lose_another, acks_late=True)
    marks: list[object] = []
    release = Runtime.of(app).store.free

    def noted(lease: Lease, **options: Any) -> bool:
        marks.append(options["record"])
        return release(lease, **options)

    monkeypatch.setattr(Runtime.of(app).store, "free", noted)
    for _ in range(2):
        with pytest.raises(LockLost):
            deliver(task)
    assert len(runs) == 1
    assert marks[0] is not None


def test_revocation_that_is_told_again_is_settled(app: Celery) -> None:
    task, runs = make(app, lambda: 1, ignore_result=True)
    store = Runtime.of(app).store
    other = store.acquire(LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other")))
    assert isinstance(other, Lease)
    with pytest.raises(Skipped):
        deliver(task, chain=[task.si()])
    store.free(other)
    task.push_request(id=id_for(task), called_directly=False, delivery_info={}, chain=[task.si()])
    try:
        with pytest.raises(Skipped):
            task()
        assert progress_of(task.request).unsettled is not None
    finally:
        task.pop_request()
    assert runs == []


def test_policy_that_fails_beside_a_task_of_the_same_id(app: Celery) -> None:
    """The result under that id is the other's to write."""

    def decide(task: Any, conflict: object) -> str:
        raise RuntimeError("a fault of the policy")

    task, runs = make(app, lambda: 1, on_conflict=decide)
    store = Runtime.of(app).store
    other = store.acquire(
        LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder(id_for(task), sending="another"))
    )
    assert isinstance(other, Lease)
    with pytest.raises(Ignore):
        deliver(task)
    assert task.backend.get_state(id_for(task)) == "PENDING"
    assert runs == []
