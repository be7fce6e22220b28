"""As `test_newest`, where only a look at the inside shows it: whoever rewrites that brings these along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import Ignore, TaskRevokedError

from celery_singleton_lock import LockLost, LockSuperseded, clock, lock_superseded
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task import outcome, refusal, requeue
from celery_singleton_lock.task.abort import Body
from celery_singleton_lock.task.on_conflict import Skipped
from celery_singleton_lock.task.running import progress_of
from tests.patience import LIMIT
from tests.servers import until
from tests.unit.deliveries import deliver, hold, make

pytestmark = pytest.mark.usefixtures("settled_at_once")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The headers of the messages that are put back."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(requeue, "_send", lambda task, reason, delay, header: found.append(header))
    return found


def sleep() -> None:
    """Sleep until stopped."""
    clock.sleep(LIMIT)


def come(task: Any, name: str, put_back: dict[str, Any] | None = None) -> Any:
    carries = {"sent": name * 32} | ({"put_back": put_back} if put_back else {})
    return deliver(task, id=f"{task.app.main}-{name}", carries=carries)


def wait(task: Any, name: str, sent: list[dict[str, Any]]) -> dict[str, Any]:
    """Deliver a message that meets the lock; returns the header of its copy."""
    with pytest.raises(requeue.GoesOn):
        come(task, name)
    return sent[-1]


@pytest.fixture
def rerun(app: Celery) -> Any:
    return make(app, lambda: "done", on_conflict="rerun", lock_key=[])


class TestSuperseded:
    def test_superseded_message_has_its_state_error_and_signal(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
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

    def test_superseded_message_of_which_a_copy_has_ended_ends_as_that_copy(
        self, rerun: Any, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy had the lock before the newest message came, and ended after this one had asked for it."""
        task, runs = rerun
        hold(task)
        first, second = (wait(task, name, sent) for name in "ab")
        assert second
        record_end = refusal._record_end

        def record_later(acquisition: Any, ended: Any) -> Any:
            it = acquisition.execution
            of_copy = it.record(outcome.succeeded(task, it.request, "of the copy"))
            Runtime.of(task.app).store.remember(it.key, of_copy)
            return record_end(acquisition, ended)

        monkeypatch.setattr(refusal, "_record_end", record_later)
        assert come(task, "a", first) == "of the copy"
        assert runs == []

    def test_forged_number_is_ignored(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = rerun
        for number in (True, "1", -1, 0, 1.5, 2**60, [], None):
            come(task, "c", {"retries": 0, "arrived": number})
            runs.clear()
            Runtime.of(task.app).store.close()


class TestStopped:
    """An older execution that runs, with `on_conflict="replace"`."""

    @pytest.fixture
    def meets(self, app: Celery, sent: list[dict[str, Any]]) -> Callable[..., Any]:
        """Makes a task whose first run meets a newer message, and then calls `then` until a renewal stops it."""

        def make_it(then: Callable[[], Any], **options: Any) -> Any:
            def body() -> Any:
                if len(runs) == 1:
                    wait(task, "b", sent)
                    return then()
                return "done"

            task, runs = make(app, body, on_conflict="replace", lock_key=[], lock_ttl=1.0, **options)
            return task, runs

        return make_it

    def test_success_that_comes_before_the_stop_counts(self, meets: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = meets(lambda: "in time")
        assert come(task, "a") == "in time"
        assert come(task, "b", sent[-1]) == "done"
        assert len(runs) == 2

    def test_failure_of_its_own_that_comes_before_the_stop_counts(
        self, meets: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            lease = progress_of(task.request).lease
            until(lambda: lease.superseded_by, "the holder knows of the newer message")
            raise ValueError("its own")

        monkeypatch.setattr(Body, "strike", lambda _: None)
        task, _ = meets(fail)
        with pytest.raises(ValueError, match="its own"):
            come(task, "a")

    def test_replacement_is_not_interrupted(self, meets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The replacement takes over id and result: after an interruption nobody would know whether it was sent."""
        sent: list[str] = []

        def replace() -> None:
            other, _ = make(task.app, lambda: None)
            body = progress_of(task.request).body
            assert body is not None

            def send(*_: Any, **options: Any) -> None:
                until(lambda: body.struck, "it must stop")
                for _ in range(1000):
                    clock.sleep(0)
                sent.append(options["task_id"])

            monkeypatch.setattr(other, "apply_async", send)
            task.replace(other.si())

        task, _ = meets(replace)
        with pytest.raises(Ignore, match="Replaced by new task"):
            come(task, "a")
        assert sent == [f"{task.app.main}-a"]
        assert task.backend.get_task_meta(sent[0])["status"] == states.PENDING

    def test_stopped_execution_that_also_loses_its_lock_fails(self, meets: Any) -> None:
        def lose() -> None:
            Runtime.of(task.app).store.free(task.lock)
            sleep()

        task, _ = meets(lose)
        with pytest.raises(LockLost):
            come(task, "a")
