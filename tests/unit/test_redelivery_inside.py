"""As `test_redelivery`, where only a look at the inside shows it: whoever rewrites that brings these along."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore

from celery_singleton_lock import LockUnavailable, ResultLost
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.task import redelivery, requeue
from celery_singleton_lock.task.on_conflict import Skipped
from celery_singleton_lock.task.running import progress_of
from celery_singleton_lock.testing import hold_lock
from tests.unit.deliveries import deliver, id_for, make

pytestmark = pytest.mark.usefixtures("settled_at_once")


class TestSecondCopy:
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

    @pytest.mark.parametrize("other", [{"id": "y"}, {"retries": 1}, {"replaced_task_nesting": 1}])
    def test_other_message_runs(self, app: Celery, other: dict[str, Any]) -> None:
        task, runs = make(app, lambda: 1)
        deliver(task)
        deliver(task, **other)
        assert len(runs) == 2


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

    def test_expired_copy_that_was_put_back_does_not_run(self, app: Celery) -> None:
        task, runs = make(app, lambda: 1)
        carries = {"put_back": {"retries": 0, "unavailable": 1, "redelivered": True}}
        with pytest.raises(Ignore, match="expired"):
            deliver(task, carries=carries, expires=self.LATE["expires"])
        assert runs == []


class TestWhileTheResultIsBeingStored:
    def test_copy_is_put_back(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redelivery, "SETTLING", 10.0)
        task, runs = make(app, lambda: 1)
        deliver(task)
        with pytest.raises(Ignore, match=r"put back, due in (9\.|10\.0)"):
            deliver(task, headers={})
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


def test_repeated_revocation_is_settled(app: Celery) -> None:
    task, runs = make(app, lambda: 1, ignore_result=True)
    with hold_lock(task), pytest.raises(Skipped):
        deliver(task, chain=[task.si().set(task_id="next")])
    task.push_request(id=id_for(task), called_directly=False, delivery_info={}, chain=[task.si().set(task_id="next")])
    try:
        with pytest.raises(Skipped):
            task()
        assert progress_of(task.request).settle is not None
    finally:
        task.pop_request()
    assert runs == []
