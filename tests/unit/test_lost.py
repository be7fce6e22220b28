"""What a worker's main process does for a message whose child is gone, or is stopped, or never begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import VERSION
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import task_revoked
from celery.worker import state
from kombu.exceptions import EncodeError

from celery_singleton_lock.runtime import write_all
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent, is_free, raises
from tests.inside import at_question, children, finish_aside, silence
from tests.patience import until

#: A pool that kills whatever it is told to.
POOL = SimpleNamespace(terminate_job=lambda *_: None)


def info(error: BaseException) -> ExceptionInfo:
    try:
        raise error
    except type(error):
        return ExceptionInfo()


def gone(request: Any, error: BaseException | None = None) -> None:
    """The pool reports that a child is gone."""
    with suppress(EncodeError):  # Celery before 5.7 tries to store a SystemExit as JSON.
        request.on_failure(info(error or WorkerLostError("killed")))


def come_again(bench: Bench, message: Sent) -> Any:
    """A copy of a message comes late."""
    finish_aside()
    bench.later(11.0)
    return bench.deliver(message, redelivered=True)


def is_queued(task: Any, message: Sent) -> bool:
    """Whether the message has the lock that it was sent with."""
    return bool(task.apply_async().id == message.id)


class TestLoss:
    @pytest.mark.parametrize("has_asked", [True, False])
    def test_is_the_end(self, bench: Bench, has_asked: bool) -> None:
        """Also if its child has not reported its key."""
        task = bench.task(bench.die) if has_asked else bench.task(before_start=lambda *_: bench.die())
        message = bench.send(task)
        gone(bench.lose(message))
        assert isinstance(come_again(bench, message), WorkerLostError)
        assert bench.runs == [message.id] * has_asked

    @pytest.mark.skipif(VERSION < (5, 7), reason="older versions consider each lost child a failure")
    def test_after_the_success_was_stored_changes_nothing(self, bench: Bench) -> None:
        """What has joined it ends as it did."""

        def body() -> str:
            return bench.deliver(other) and "ran"

        task = bench.task(body, on_conflict="join")
        message, other = bench.send(task), bench.send(task)
        gone(bench.lose(message))
        assert bench.end(message) == "ran"
        assert bench.deliver(bench.put_back()) == "ran"
        assert bench.runs == [message.id]

    @pytest.mark.parametrize("header", [False, {"nonsense": 1}], ids=str)
    def test_without_a_lock_is_no_error(self, bench: Bench, header: Any) -> None:
        message = bench.send(bench.task())
        gone(bench.lose(message.but(singleton_lock=header), runs=False))
        assert isinstance(bench.end(message), WorkerLostError)

    def test_of_a_task_whose_key_cannot_be_made_is_no_error(self, bench: Bench) -> None:
        message = bench.send(bench.task(lock_key=raises(RuntimeError("only in the child"))))
        gone(bench.lose(message, runs=False))
        finish_aside()
        assert isinstance(bench.end(message), WorkerLostError)

    def test_of_an_unreadable_message_is_its_end(self, bench: Bench) -> None:
        """Its third part is not a dictionary: the consumer raised TypeError."""
        message = bench.send(bench.task())
        request = bench.lose(replace(message, body=b"[[], {}, [1]]"), runs=False)
        with suppress(TypeError):  # As Celery raises itself.
            gone(request)
        come_again(bench, message)
        assert bench.runs == []

    def test_without_a_lock_server_is_followed_by_what_follows(self, bench: Bench) -> None:
        """There is nobody to whom an error would be raised."""
        follows = bench.task(lock_scope="until_executed", on_send_unavailable="raise")
        request = bench.lose(bench.send(bench.task(), link_error=follows.si()), runs=False)
        with silence(bench.app, heard=0):
            gone(request)
        assert bench.put_back().headers["task"] == follows.name

    @pytest.mark.skipif(VERSION < (5, 7), reason="older versions do not send it again")
    @pytest.mark.parametrize("has_header", [True, False])
    def test_that_celery_retries_belongs_to_its_message(self, bench: Bench, has_header: bool) -> None:
        """Its body would run again if the message itself came again, since its acknowledgement was lost."""

        def body() -> str:
            bench.die()
            return "ran"

        task = bench.task(body, acks_late=True, retry_on_worker_lost=True)
        message = bench.send(task)
        if not has_header:
            message = message.but(singleton_lock=None)
        gone(bench.lose(message))
        again = bench.put_back()
        assert bench.deliver(again) == "ran"
        come_again(bench, message)
        assert len(bench.runs) == 2

    def test_of_a_late_message_that_was_not_acknowledged_is_not_the_end(self, bench: Bench) -> None:
        def body() -> str:
            bench.die()
            return "ran"

        message = bench.send(bench.task(body, acks_late=True, acks_on_failure_or_timeout=False))
        bench.lose(message).on_timeout(soft=False, timeout=1)
        finish_aside()
        bench.forget(message)
        bench.later(100.0)
        assert bench.deliver(message, redelivered=True) == "ran"


def goes_on(bench: Bench, how: str, **options: Any) -> tuple[Any, Sent]:
    """A task that is retried or replaced once, and a message of it, which has a lock since it was sent."""

    def body() -> str:
        if len(bench.runs) > 1:
            return "ran"
        raise task.retry(countdown=0) if how == "retry" else task.replace(task.si())

    task = bench.task(body, lock_scope="until_executed", **options)
    return task, bench.send(task)


@pytest.mark.parametrize("how", ["retry", "replace"])
class TestWhatGoesOn:
    """A retry or a replacement has the message's id, and the lock that it was sent with."""

    @pytest.mark.parametrize("acks_late", [True, False])
    @pytest.mark.parametrize("error", [WorkerLostError("lost"), SystemExit(1)], ids=repr)
    def test_child_is_lost_before_celery_knows(
        self, bench: Bench, how: str, acks_late: bool, error: BaseException
    ) -> None:
        task, message = goes_on(bench, how, acks_late=acks_late, reject_on_worker_lost=True)
        gone(bench.lose(message), error)
        assert bench.end(message) in ("PENDING", "RETRY")
        assert bench.answers == ["ack"]
        again = bench.put_back()
        finish_aside()
        assert is_queued(task, message)
        assert bench.deliver(again) == "ran"
        assert bench.runs == [message.id] * 2

    @pytest.mark.parametrize("end", ["cancel", "terminate", "fail"])
    def test_lock_is_left_to_it(self, bench: Bench, how: str, end: str) -> None:
        """A failure may be that of a hook, which comes before the process ends the lock itself."""
        task, message = goes_on(bench, how, before_start=lambda *_: None)
        request = bench.lose(message)
        if end == "fail":
            request.on_failure(info(ValueError("raised when its retry was sent")), return_ok=True)
        else:
            getattr(request, end)(POOL)
            finish_aside()
            gone(request, Terminated(15))
        finish_aside()
        assert is_queued(task, message)


class TestLockOfAMessage:
    """A message that is cancelled or revoked frees the lock that it was sent with."""

    @pytest.mark.parametrize("acks_late", [True, False])
    def test_message_is_cancelled(self, bench: Bench, acks_late: bool) -> None:
        """By a cold shutdown, say. A message that comes again keeps it."""
        task = bench.task(bench.die, lock_scope="until_executed", acks_late=acks_late)
        message = bench.send(task)
        bench.lose(message).cancel(POOL)
        finish_aside()
        assert is_queued(task, message) is acks_late

    @pytest.mark.parametrize("acks_late", [True, False])
    def test_message_of_a_child_is_cancelled(self, bench: Bench, acks_late: bool) -> None:
        """It may have ended, and go on as a copy, until the child is gone."""
        task = bench.task(bench.die, lock_scope="until_executed", acks_late=acks_late)
        message = bench.send(task)
        with children(bench.app):
            request = bench.lose(message)
            request.cancel(POOL)
            finish_aside()
            assert is_queued(task, message)
            gone(request, Terminated(15))
            finish_aside()
        assert is_queued(task, message) is acks_late

    def test_result_backend_fails_as_a_greenlet_is_cancelled(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a cold shutdown it always does: the hub of greenlets runs the signal's handler, and cannot wait."""
        task = bench.task(bench.die, lock_scope="until_executed")
        message = bench.send(task)
        request = bench.lose(message)
        monkeypatch.setattr(bench.app.backend, "mark_as_retry", raises(AssertionError("cannot block")))
        with pytest.raises(AssertionError):
            request.cancel(POOL)
        finish_aside()
        assert not is_queued(task, message)

    def test_soft_time_limit_strikes_before_the_task_is_called(self, bench: Bench) -> None:
        task = bench.task(lock_scope="until_executed")
        message = bench.send(task)
        bench.lose(message, runs=False).on_failure(info(SoftTimeLimitExceeded()), return_ok=True)
        finish_aside()
        assert not is_queued(task, message)


class TestKeptLock:
    """A lock that an attempt kept for the next one is freed if that never takes it."""

    def kept(self, bench: Bench, **options: Any) -> tuple[Any, Sent]:
        """A task, and its retry, which has the lock."""

        def body() -> str:
            return task.retry(countdown=0) if len(bench.runs) == 1 else "ran"

        task = bench.task(body, lock_retain_on_retry=True, **options)
        bench.deliver(bench.send(task))
        assert not is_free(task)
        return task, bench.put_back()

    def test_revoked(self, bench: Bench) -> None:
        task, retry = self.kept(bench)
        bench.revoke(retry)
        bench.deliver(retry)
        until(lambda: is_free(task))

    @pytest.mark.parametrize("runs", [True, False])
    def test_lost(self, bench: Bench, runs: bool) -> None:
        def before_start(task: Any, *_: Any) -> None:
            if task.request.retries:
                bench.die()

        task, retry = self.kept(bench, before_start=before_start)
        gone(bench.lose(retry, runs=runs))
        until(lambda: is_free(task))

    def test_no_user_code_runs_in_the_consumers_loop(self, bench: Bench) -> None:
        def key(arguments: Any) -> str:
            seen.add(threading.current_thread())
            return "same"

        seen = set[threading.Thread]()
        task, retry = self.kept(bench, lock_key=key)
        seen.clear()
        request = bench.lose(retry, runs=False)
        request.on_timeout(soft=False, timeout=1)
        gone(request)
        bench.revoke(retry)
        bench.lose(retry, runs=False)
        finish_aside()
        assert seen
        assert threading.current_thread() not in seen
        assert is_free(task)

    def test_fails_before_it_asks(self, bench: Bench) -> None:
        def before_start(task: Any, *_: Any) -> None:
            if task.request.retries:
                raise ValueError("as told")

        task, retry = self.kept(bench, before_start=before_start)
        bench.deliver(retry)
        until(lambda: is_free(task))


class TestCancelled:
    @pytest.mark.parametrize("acks_late", [True, False])
    def test_message_is_not_acknowledged_as_a_success(self, bench: Bench, acks_late: bool) -> None:
        """Celery considers a greenlet that it has killed a success."""
        request = bench.lose(bench.send(bench.task(bench.die, acks_late=acks_late)))
        request.cancel(POOL)
        request.acknowledge()
        assert bench.answers == ["ack"] * (not acks_late)

    def test_message_that_no_pool_can_cancel_is_acknowledged_when_it_ends(self, bench: Bench) -> None:
        request = bench.lose(bench.send(bench.task(bench.die, acks_late=True)))
        with pytest.raises(NotImplementedError):
            request.cancel(SimpleNamespace(terminate_job=raises(NotImplementedError())))
        request.acknowledge()
        assert bench.answers == ["ack"]

    @pytest.mark.parametrize("has_ended", [False, True])
    def test_message_that_has_ended_is_not_stored_as_one_that_goes_on(self, bench: Bench, has_ended: bool) -> None:
        """Its child has ended it, and Celery has not read that yet; the copy that comes is dropped."""
        message = bench.send(bench.task((lambda: "ran") if has_ended else bench.die, acks_late=True))
        request = bench.lose(message)
        request.cancel(POOL)
        assert bench.end(message) == ("ran" if has_ended else "RETRY")
        gone(request, Terminated(15))
        assert bench.end(message) == ("ran" if has_ended else "RETRY")
        assert request not in state.active_requests

    def test_silent_lock_server_is_asked_once_for_all(self, bench: Bench) -> None:
        task = bench.task(lambda number: bench.die(), lock_key=None, acks_late=True)
        requests = [bench.lose(bench.send(task, number)) for number in range(2)]
        with silence(bench.app, heard=0) as asked:
            for request in requests:
                request.cancel(POOL)
        assert len(asked) == 1

    @pytest.mark.parametrize(
        "options",
        [
            {},
            pytest.param(
                {"emit_retry": False},
                marks=pytest.mark.skipif(VERSION < (5, 6), reason="older versions always store RETRY"),
            ),
        ],
        ids=["lost", "shut down"],
    )
    def test_message_is_cancelled_where_nobody_can_ask(self, bench: Bench, options: dict[str, bool]) -> None:
        """In a cold shutdown of a pool of greenlets: their hub runs the signal's handler, and cannot wait."""
        request = bench.lose(bench.send(bench.task(bench.die, acks_late=True)))
        with at_question(bench.app, 1, raises(AssertionError("cannot block"))) as asked:
            request.cancel(POOL, **options)
        assert request.was_cancelled
        assert bool(asked) is options.get("emit_retry", True), "nothing is stored, so it does not matter"


class TestTwoDeliveriesInOneWorker:
    """Celery knows only the newest delivery of an id, and none once that has ended."""

    @pytest.fixture
    def message(self, bench: Bench) -> Iterator[Sent]:
        message = bench.send(bench.task(bench.die, acks_late=True))
        yield message
        state.reset_state()
        state.revoked.discard(message.id)

    @pytest.mark.parametrize("end", ["ends", "is revoked", "reaches a hard time limit"])
    def test_run_is_found_by_its_id_after_its_copy(self, bench: Bench, message: Sent, end: str) -> None:
        run = bench.lose(message)
        if end == "is revoked":
            bench.revoke(message)
            bench.deliver(message)
        elif end == "ends":
            bench.deliver(message, redelivered=True)
        else:
            bench.lose(message, runs=False).on_timeout(soft=False, timeout=1.0)
        assert state.requests.get(run.id) is run

    @pytest.mark.parametrize("first", [0, 1])
    def test_each_delivery_is_terminated_once(self, bench: Bench, message: Sent, first: int) -> None:
        """Even if Celery finds both by their stamps, and terminates both."""
        requests = [bench.lose(message), bench.lose(message, runs=False)]
        terminated = list[int]()
        pool = SimpleNamespace(terminate_job=lambda pid, _: terminated.append(pid))
        requests[first].terminate(pool, "TERM")
        assert all(request.was_terminated for request in requests), "Celery may know only one of them"
        requests[1 - first].terminate(pool, "TERM")
        assert len(terminated) == 2


class TestAnnounced:
    """What the result says is announced, as Celery itself does for a revoked task."""

    @pytest.fixture
    def told(self) -> Iterator[list[Any]]:
        told = list[Any]()

        def note(sender: Any, **fields: Any) -> None:
            told.append({name: fields[name] for name in ("terminated", "signum", "expired")})

        task_revoked.connect(note)
        yield told
        task_revoked.disconnect(note)

    @pytest.mark.parametrize(("policy", "is_told"), [("skip", True), ("retry", False)])
    def test_copy_that_is_skipped(self, bench: Bench, told: list[Any], policy: str, is_told: bool) -> None:
        task = bench.task(on_conflict=policy)
        with hold_lock(task):
            bench.deliver(bench.send(task))
        assert told == [{"terminated": False, "signum": None, "expired": False}] * is_told
        assert bench.events.count("task-revoked") == is_told

    def test_copy_that_has_expired(self, bench: Bench, told: list[Any]) -> None:
        message = bench.send(bench.task(acks_late=True)).but(expires="2020-01-01T00:00:00+00:00")
        assert bench.deliver(message, redelivered=True) == "REVOKED"
        assert told == [{"terminated": False, "signum": None, "expired": True}]
        assert bench.events.count("task-revoked") == 1


def test_inspect_does_not_show_what_is_ours(bench: Bench) -> None:
    shown = bench.lose(bench.send(bench.task(bench.die))).info()
    assert not [name for name in shown["delivery_info"] if name.startswith("singleton")]
    assert shown["delivery_info"]["routing_key"] == bench.app.main


@pytest.mark.parametrize("tag", [[], {}, 7, ["x"]], ids=repr)
def test_consumer_tag_of_a_sender_is_ignored(bench: Bench, tag: Any) -> None:
    """On Redis the message contains its delivery info: a list in it stopped the consumer."""
    task = bench.task(on_conflict="retry")
    message = bench.send(task)
    message = replace(message, route={**message.route, "consumer_tag": tag})
    with hold_lock(task):
        bench.deliver(message)
    assert bench.deliver(bench.put_back()) == "ran"


@pytest.mark.parametrize("eta", [None, "2100-01-01T00:00:00+00:00"])
def test_body_that_celery_cannot_read_is_left_to_the_child(bench: Bench, eta: str | None) -> None:
    """It fails there; an error here would end the worker's consumer."""
    header = {"put_back": {"retries": 0, "redelivered": True}}
    message = bench.send(bench.task())
    header = {**message.headers["singleton_lock"], **header}
    bench.lose(replace(message, body=b'[[], {}, ["forged"]]').but(eta=eta, singleton_lock=header), runs=False)


@pytest.mark.skipif(VERSION < (5, 7), reason="older versions do not send it again")
class TestSentAgain:
    """Celery sends a message again whose child is lost: its body has not begun, or has."""

    def lost(self, bench: Bench, task: Any, message: Sent, *, runs: bool) -> Sent:
        """The message that Celery sends."""
        gone(bench.lose(message, runs=runs))
        again = bench.put_back()
        finish_aside()
        return again

    @pytest.mark.parametrize("runs", [True, False])
    @pytest.mark.parametrize("scope", ["until_executing", "until_executed", "until_and_while_executing"])
    def test_it_has_the_lock_that_it_was_sent_with(self, bench: Bench, scope: str, runs: bool) -> None:
        """For as long as it may wait now; it takes a lock anew that has ended as the body began."""

        def body() -> str:
            bench.die()
            return "ran"

        task = bench.task(body, acks_late=True, retry_on_worker_lost=True, lock_scope=scope)
        message = bench.send(task)
        again = self.lost(bench, task, message, runs=runs)
        write_all()
        bench.later(1800.0)
        assert is_queued(task, message)
        assert bench.deliver(again) == "ran"
        until(lambda: not is_queued(task, message), "another message can be sent")

    @pytest.mark.parametrize("scope", ["until_executing", "until_and_while_executing"])
    def test_another_message_may_have_its_lock(self, bench: Bench, scope: str) -> None:
        def body() -> str:
            if len(bench.runs) == 1:
                others.append(bench.send(task))
            bench.die()
            return "ran"

        others: list[Sent] = []
        task = bench.task(body, acks_late=True, retry_on_worker_lost=True, lock_scope=scope)
        again = self.lost(bench, task, bench.send(task), runs=True)
        assert is_queued(task, others[0])
        assert bench.deliver(again) == "ran"
        assert is_queued(task, others[0])
