"""`on_conflict="rerun"`, in one process: what an execution that is not the newest ends with, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import Ignore, TaskRevokedError

from celery_singleton_lock import InvalidOption, LockConflict, LockSuperseded, lock_superseded
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task import requeue
from celery_singleton_lock.task.message_identity import SENT_HEADER
from celery_singleton_lock.task.on_conflict import Skipped
from celery_singleton_lock.task.original import PUT_BACK_HEADER
from tests.unit.deliveries import deliver, hold, make

pytestmark = pytest.mark.usefixtures("settled_at_once")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The headers of what is put back."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(requeue, "_send", lambda task, reason, delay, header: found.append(header))
    return found


def come(task: Any, name: str, put_back: dict[str, Any] | None = None) -> Any:
    headers = {SENT_HEADER: name * 32} | ({PUT_BACK_HEADER: put_back} if put_back else {})
    return deliver(task, id=f"{task.app.main}-{name}", headers=headers)


def wait(task: Any, name: str, sent: list[dict[str, Any]]) -> dict[str, Any]:
    """One that meets the lock; the header of its copy."""
    with pytest.raises(requeue.GoesOn):
        come(task, name)
    return sent[-1]


@pytest.fixture
def rerun(app: Celery) -> Any:
    return make(app, lambda: "done", on_conflict="rerun", lock_key=[])


class TestSuperseded:
    def test_only_the_newest_runs(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = rerun
        other = hold(task)
        first, second = (wait(task, name, sent) for name in "ab")
        assert 0 < first["arrived"] < second["arrived"]
        Runtime.of(task.app).store.free(other)
        with pytest.raises(Skipped):
            come(task, "a", first)
        assert come(task, "b", second) == "done"
        assert runs == [f"{task.app.main}-b"]

    def test_its_state_error_and_signal(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        task, _ = rerun
        told: list[Any] = []

        def receive(sender: Any, **details: Any) -> None:
            told.append((details["task_id"], details["key"], details["by"]))

        hold(task)
        first, second = (wait(task, name, sent) for name in "ab")
        assert second
        lock_superseded.connect(receive, weak=False)
        try:
            with pytest.raises(Skipped):
                come(task, "a", first)
        finally:
            lock_superseded.disconnect(receive)
        older, newest, key = f"{task.app.main}-a", f"{task.app.main}-b", task.lock_key_of()
        assert told == [(older, key, newest)]
        stored = task.backend.get_task_meta(older)
        assert stored["status"] == states.REVOKED
        assert isinstance(stored["result"], LockSuperseded)
        assert isinstance(stored["result"], TaskRevokedError)
        assert stored["result"].args == (key, newest)

    def test_copy_of_one_that_has_ended_so_does_not_run(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        """The broker delivers it once more, when the newest has long ended."""
        task, runs = rerun
        other = hold(task)
        first, second = (wait(task, name, sent) for name in "ab")
        with pytest.raises(Skipped):
            come(task, "a", first)
        Runtime.of(task.app).store.free(other)
        come(task, "b", second)
        with pytest.raises(Ignore):
            come(task, "a")
        assert runs == [f"{task.app.main}-b"]

    def test_id_of_the_one_that_runs_keeps_its_result(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        task, _ = rerun
        hold(task)
        wait(task, "a", sent)
        wait(task, "b", sent)
        task.backend.store_result("other-task", "of the holder", states.SUCCESS)
        with pytest.raises(requeue.GoesOn):
            deliver(task, id="other-task", headers={SENT_HEADER: "c" * 32})
        wait(task, "d", sent)
        with pytest.raises(Ignore):
            deliver(task, id="other-task", headers={SENT_HEADER: "c" * 32})
        assert task.backend.get_task_meta("other-task")["status"] == states.SUCCESS

    def test_headers_that_a_body_passes_on_to_another_message(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        """That one is as new as any."""
        task, runs = rerun
        other = hold(task)
        first, second = (wait(task, name, sent) for name in "ab")
        assert second
        with pytest.raises(requeue.GoesOn):
            come(task, "c", first)
        assert sent[-1]["arrived"] > second["arrived"]
        Runtime.of(task.app).store.free(other)
        assert come(task, "c", sent[-1]) == "done"
        assert runs == [f"{task.app.main}-c"]

    def test_what_others_wrote_as_its_number_counts_as_none(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = rerun
        for number in (True, "1", -1, 0, 1.5, 2**60, [], None):
            come(task, "c", {"retries": 0, "arrived": number})
            runs.clear()
            Runtime.of(task.app).store.close()


class TestOutsideOfTheOrder:
    def test_eager_call_meets_a_conflict(self, rerun: Any) -> None:
        task, _ = rerun
        hold(task)
        with pytest.raises(LockConflict):
            task.apply(throw=True)

    def test_callable_does_not_choose_it(self, app: Celery) -> None:
        task, runs = make(app, lambda: None, on_conflict=lambda task, conflict: "rerun", lock_key=[])
        hold(task)
        with pytest.raises(InvalidOption, match="returned 'rerun'; allowed: skip, raise, retry, reject"):
            deliver(task)
        assert runs == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock_limit": 2}, "lock_limit 2; allowed: lock_limit 1"),
        ({"lock_scope": "until_executing"}, "do not exclude each other"),
        ({"lock_scope": "until_expired", "lock_queue_ttl": 60}, "do not exclude each other"),
        ({"lock_conflict_retries": 3}, "lock_conflict_retries 3"),
    ],
)
def test_what_does_not_go_with_it(app: Celery, options: dict[str, Any], words: str) -> None:
    task, _ = make(app, lambda: None, on_conflict="rerun", lock_key=[], **options)
    with pytest.raises(InvalidOption, match=words):
        deliver(task)
    plain, _ = make(app, lambda: None, lock_key=[], **options)
    with pytest.raises(InvalidOption, match=words):
        deliver(plain, headers={"singleton_lock": {"on_conflict": "rerun"}})
