"""`on_conflict="rerun"` and `"replace"` in one process: how older executions end, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery, states
from celery.exceptions import Ignore, TaskRevokedError

from celery_singleton_lock import Aborted, InvalidOption, LockConflict, LockLost, LockSuperseded, clock, lock_superseded
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task import outcome, redelivery, refusal, requeue
from celery_singleton_lock.task.abort import Body
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.on_conflict import Expired, Skipped
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


def come_too_late(task: Any, name: str) -> Any:
    return deliver(
        task,
        id=f"{task.app.main}-{name}",
        carries={"sent": name * 32},
        expires="2020-02-02T02:02:02+00:00",
        delivery_info={"redelivered": True},
    )


def wait(task: Any, name: str, sent: list[dict[str, Any]]) -> dict[str, Any]:
    """Deliver a message that meets the lock; returns the header of its copy."""
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

    def test_copy_of_a_superseded_message_does_not_run(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        """The broker delivers it again long after the newest has ended."""
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

    def test_expired_message_supersedes_nobody(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        """It had expired when the broker redelivered it, and it had never asked for the lock."""
        task, runs = rerun
        other = hold(task)
        first = wait(task, "a", sent)
        with pytest.raises(requeue.GoesOn):
            come_too_late(task, "b")
        Runtime.of(task.app).store.free(other)
        assert come(task, "a", first) == "done"
        with pytest.raises(Expired):
            come_too_late(task, "b")
        assert runs == [f"{task.app.main}-a"]

    def test_copy_of_a_message_that_died_before_it_stored_its_end_is_superseded(
        self, rerun: Any, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task, _ = rerun
        hold(task)
        first, second = (wait(task, name, sent) for name in "ab")
        assert second
        with monkeypatch.context() as patched:
            patched.setattr(task.backend, "mark_as_failure", Mock(side_effect=SystemExit))
            with pytest.raises(SystemExit):
                come(task, "a", first)
        monkeypatch.setattr(redelivery, "SETTLING", 0.0)
        with pytest.raises(Skipped):
            come(task, "a", first)
        stored = task.backend.get_task_meta(f"{task.app.main}-a")
        assert stored["status"] == states.REVOKED
        assert isinstance(stored["result"], LockSuperseded)
        assert stored["result"].args == (task.lock_key_of(), f"{task.app.main}-b")

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

    def test_superseded_message_with_the_id_of_the_holder_stores_no_result(
        self, rerun: Any, sent: list[dict[str, Any]]
    ) -> None:
        task, _ = rerun
        hold(task)
        wait(task, "a", sent)
        wait(task, "b", sent)
        task.backend.store_result("other-task", "of the holder", states.SUCCESS)
        with pytest.raises(requeue.GoesOn):
            deliver(task, id="other-task", carries={"sent": "c" * 32})
        wait(task, "d", sent)
        with pytest.raises(Ignore):
            deliver(task, id="other-task", carries={"sent": "c" * 32})
        assert task.backend.get_task_meta("other-task")["status"] == states.SUCCESS

    def test_message_with_copied_headers_is_a_new_message(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        """A body passed the headers of its message on."""
        task, runs = rerun
        other = hold(task)
        first, second = (wait(task, name, sent) for name in "ab")
        assert second
        copied = {"id": f"{task.app.main}-a", "sent": "a" * 32, "put_back": first}
        with pytest.raises(requeue.GoesOn):
            deliver(task, id=f"{task.app.main}-c", **{HEADER: copied})
        assert sent[-1]["arrived"] > second["arrived"]
        Runtime.of(task.app).store.free(other)
        assert come(task, "c", sent[-1]) == "done"
        assert runs == [f"{task.app.main}-c"]

    def test_forged_number_is_ignored(self, rerun: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = rerun
        for number in (True, "1", -1, 0, 1.5, 2**60, [], None):
            come(task, "c", {"retries": 0, "arrived": number})
            runs.clear()
            Runtime.of(task.app).store.close()


class TestStopped:
    """An older execution that runs, with `on_conflict="replace"`."""

    @pytest.fixture
    def meets(self, app: Celery, sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Makes a task whose first run meets a newer message, and then calls `then` until a renewal stops it."""
        monkeypatch.setattr(MemoryStore, "tell", lambda *_: None)

        def make_it(then: Callable[[], Any], **options: Any) -> Any:
            def body() -> Any:
                if len(runs) == 1:
                    wait(task, "b", sent)
                    return then()
                return "done"

            task, runs = make(app, body, on_conflict="replace", lock_key=[], lock_ttl=1.0, **options)
            return task, runs

        return make_it

    def test_stopped_execution_is_revoked_and_the_newest_runs(self, meets: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = meets(sleep)
        told: list[Any] = []

        def receive(sender: Any, **details: Any) -> None:
            told.append((details["task_id"], details["key"], details["by"]))

        lock_superseded.connect(receive, weak=False)
        try:
            with pytest.raises(Skipped):
                come(task, "a")
        finally:
            lock_superseded.disconnect(receive)
        older, newest = f"{task.app.main}-a", f"{task.app.main}-b"
        assert told == [(older, task.lock_key_of(), newest)]
        stored = task.backend.get_task_meta(older)
        assert stored["status"] == states.REVOKED
        assert isinstance(stored["result"], LockSuperseded)
        assert come(task, "b", sent[-1]) == "done"
        assert runs == [older, newest]
        assert not Runtime.of(task.app).stop_listener._owners, "nobody listens for a run that has ended"

    def test_stop_does_not_wait_for_a_renewal(self, app: Celery, sent: list[dict[str, Any]]) -> None:
        def body() -> None:
            newcomer = threading.Thread(target=wait, args=(task, "b", sent))
            newcomer.start()
            sleep()

        task, _ = make(app, body, on_conflict="replace", lock_key=[], lock_ttl=600.0)
        with pytest.raises(Skipped):
            come(task, "a")
        until(lambda: bool(sent), "the newcomer waits")

    def test_copy_of_a_stopped_execution_does_not_run(self, meets: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = meets(sleep)
        with pytest.raises(Skipped):
            come(task, "a")
        come(task, "b", sent[-1])
        with pytest.raises(Ignore):
            come(task, "a")
        assert len(runs) == 2

    def test_lock_is_held_until_the_stopped_execution_has_ended(self, meets: Any) -> None:
        seen: list[Any] = []

        def clean_up() -> None:
            try:
                sleep()
            finally:
                seen.extend(Runtime.of(task.app).store.held(task.lock_key_of()))

        task, _ = meets(clean_up)
        with pytest.raises(Skipped):
            come(task, "a")
        (held,) = seen
        assert (held.holder.task_id, held.holder.superseded_by) == (f"{task.app.main}-a", f"{task.app.main}-b")
        assert Runtime.of(task.app).store.held(task.lock_key_of()) == []

    def test_success_that_comes_before_the_stop_counts(self, meets: Any, sent: list[dict[str, Any]]) -> None:
        task, runs = meets(lambda: "in time")
        assert come(task, "a") == "in time"
        assert come(task, "b", sent[-1]) == "done"
        assert len(runs) == 2

    def test_failure_during_clean_up_does_not_change_the_end(self, meets: Any) -> None:
        def fail() -> None:
            try:
                sleep()
            except Aborted:
                raise ValueError from None

        task, _ = meets(fail)
        with pytest.raises(Skipped):
            come(task, "a")
        assert isinstance(task.backend.get_task_meta(f"{task.app.main}-a")["result"], LockSuperseded)

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

    def test_stopped_execution_may_end_without_a_result(self, meets: Any) -> None:
        def ignore() -> None:
            try:
                sleep()
            except Aborted:
                raise Ignore from None

        task, _ = meets(ignore)
        with pytest.raises(Ignore) as ended:
            come(task, "a")
        assert not isinstance(ended.value, Skipped)

    def test_autoretry_does_not_retry_a_stopped_execution(self, meets: Any) -> None:
        task, runs = meets(sleep, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0)
        with pytest.raises(Skipped):
            come(task, "a")
        assert len(runs) == 1

    def test_end_that_cannot_be_stored_at_first_does_not_change(
        self, meets: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A soft time limit strikes meanwhile, or the result backend is briefly unavailable."""
        task, runs = meets(sleep)
        mark = task.backend.mark_as_failure

        def fail_once(*_: Any, **__: Any) -> None:
            monkeypatch.setattr(task.backend, "mark_as_failure", mark)
            raise ConnectionError("the result backend")

        monkeypatch.setattr(task.backend, "mark_as_failure", fail_once)
        with pytest.raises(Skipped):
            come(task, "a")
        assert task.backend.get_task_meta(f"{task.app.main}-a")["status"] == states.REVOKED
        assert len(runs) == 1

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

    def test_execution_with_another_policy_is_not_stopped(self, app: Celery, sent: list[dict[str, Any]]) -> None:
        """The running call did not choose this policy."""

        def body() -> None:
            if len(runs) == 1:
                wait(task, "b", sent)
                (held,) = Runtime.of(app).store.held(task.lock_key_of())
                assert held.holder is not None
                assert held.holder.superseded_by is None

        task, runs = make(app, body, on_conflict="replace", lock_key=[])
        deliver(task, carries={"sent": "a" * 32, "call": {"on_conflict": "rerun"}})
        assert len(runs) == 1


class TestOutsideOfTheOrder:
    def test_eager_call_meets_a_conflict(self, rerun: Any) -> None:
        task, _ = rerun
        hold(task)
        with pytest.raises(LockConflict):
            task.apply(throw=True)

    @pytest.mark.parametrize("policy", ["rerun", "replace"])
    def test_callable_cannot_choose_the_policy(self, app: Celery, policy: str) -> None:
        task, runs = make(app, lambda: None, on_conflict=lambda task, conflict: policy, lock_key=[])
        hold(task)
        with pytest.raises(InvalidOption, match=f"returned '{policy}'; allowed: skip, raise, retry, reject"):
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
@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_incompatible_options_are_refused(app: Celery, options: dict[str, Any], words: str, policy: str) -> None:
    task, _ = make(app, lambda: None, on_conflict=policy, lock_key=[], **options)
    with pytest.raises(InvalidOption, match=words):
        deliver(task)
    plain, _ = make(app, lambda: None, lock_key=[], **options)
    with pytest.raises(InvalidOption, match=words):
        deliver(plain, carries={"call": {"on_conflict": policy}})


def test_replace_with_a_mere_warning_on_loss_is_refused(app: Celery) -> None:
    task, _ = make(app, lambda: None, on_conflict="replace", on_lock_lost="warn", lock_key=[])
    with pytest.raises(InvalidOption, match="is 'replace' with on_lock_lost 'warn'"):
        deliver(task)
