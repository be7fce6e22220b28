"""A message whose body does not run here, or is cut short, has exactly one end, and leaves no lock behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, Task
from kombu import Queue

from celery_singleton_lock import LockConflict, LockLost, SingletonTask
from celery_singleton_lock.task import interrupt as interrupts
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent, raises
from tests.inside import at_question, do_at_call

#: More questions than a message asks the lock server.
QUESTIONS = 8


@pytest.fixture(autouse=True)
def signal_interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a child of a prefork pool, whose soft time limits are this signal."""

    def raise_it(*_: object) -> None:
        raise Interrupted

    monkeypatch.setattr(interrupts, "is_child_of_a_pool", lambda: True)
    before = signal.signal(signal.SIGUSR1, raise_it)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    """Strike as a soft time limit does."""
    signal.raise_signal(signal.SIGUSR1)


class Interrupted(Exception):
    """Like a soft time limit, at any line."""


def is_free(task: Any) -> bool:
    with hold_lock(task):
        return True


def in_words(end: Any) -> str:
    return end if isinstance(end, str) else repr(end)


class TestHasBegun:
    """A message that has begun waits, whatever the policy."""

    @pytest.mark.parametrize("policy", ["raise", "skip"])
    def test_redelivered_message_waits(self, bench: Bench, policy: str) -> None:
        task = bench.task(acks_late=True, on_conflict=policy, lock_conflict_retries=0)
        message = bench.send(task)
        with hold_lock(task):
            assert bench.deliver(message, redelivered=True) == "PENDING"
            copy = bench.put_back()
            assert bench.deliver(copy) == "PENDING", "so does a copy of the copy"
        assert bench.deliver(bench.put_back()) == "ran"

    @pytest.mark.parametrize("policy", ["raise", "skip"])
    def test_retry_waits(self, bench: Bench, policy: str) -> None:
        task = bench.task(lambda: task.retry(countdown=0) if len(bench.runs) == 1 else "ran", on_conflict=policy)
        bench.deliver(bench.send(task))
        second = bench.put_back()
        with hold_lock(task):
            bench.deliver(second)
        assert bench.deliver(bench.put_back()) == "ran"

    def test_message_that_has_not_begun_is_refused(self, bench: Bench) -> None:
        """It is acknowledged before it begins: if it is delivered again, it has not begun."""
        task = bench.task(acks_late=False, on_conflict="raise")
        with hold_lock(task):
            assert isinstance(bench.deliver(bench.send(task), redelivered=True), LockConflict)
        assert bench.runs == []

    def test_call_that_cannot_wait_fails(self, bench: Bench) -> None:
        task = bench.task(on_conflict="skip")
        with hold_lock(task), pytest.raises(LockConflict):
            task.apply(retries=1, throw=True)


class TestEndWithoutABody:
    """This is the message's end: a copy that is delivered while the first one waits does not run afterwards."""

    @pytest.mark.parametrize("raises_conflict", [False, True])
    @pytest.mark.parametrize("acks_late", [False, True])
    def test_failure_of_a_policy_is_the_end(self, bench: Bench, raises_conflict: bool, acks_late: bool) -> None:
        def decide(task: Any, conflict: LockConflict) -> str:
            raise conflict if raises_conflict else RuntimeError("a fault of the policy")

        task = bench.task(on_conflict=decide, acks_late=acks_late)
        message = bench.send(task)
        with hold_lock(task):
            end = bench.deliver(message)
        assert isinstance(end, LockConflict if raises_conflict else RuntimeError)
        bench.forget(message)
        bench.later(11.0)
        assert repr(bench.deliver(message, redelivered=True)) == repr(end)
        assert bench.runs == []

    @pytest.mark.parametrize("policy", ["skip", "raise"])
    @pytest.mark.parametrize("acks_late", [False, True])
    def test_refusal_is_remembered_as_long_as_a_run(self, bench: Bench, policy: str, acks_late: bool) -> None:
        """A broker may also deliver again what it should know to be acknowledged: if the acknowledgement was lost."""
        task = bench.task(on_conflict=policy, acks_late=acks_late)
        message = bench.send(task)
        with hold_lock(task):
            bench.deliver(message)
        bench.later(3000.0)
        bench.deliver(message, redelivered=True)
        assert bench.runs == []
        assert bench.queued() == []

    def test_rejected_message_may_come_again(self, bench: Bench) -> None:
        """For example by a dead-letter exchange, as after a failure of the body."""
        task = bench.task(on_conflict="raise", acks_late=True, acks_on_failure_or_timeout=False)
        message = bench.send(task)
        with hold_lock(task):
            bench.deliver(message)
        bench.forget(message)
        assert bench.deliver(message) == "ran"

    def test_copy_stores_an_end_that_could_not_be_stored_before(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task = bench.task(on_conflict="skip", acks_late=True)
        message = bench.send(task)
        with hold_lock(task), monkeypatch.context() as away:
            for asked in ("mark_as_failure", "get_state"):
                away.setattr(bench.app.backend, asked, raises(ConnectionError("away")))
            away.setattr(bench, "end", lambda _: None)
            bench.deliver(message)
        bench.later(11.0)
        assert bench.deliver(bench.put_back()) == "REVOKED"
        assert bench.runs == []


class TestLoss:
    """A body that loses its lock fails, and that is the message's end, unless a copy runs by then."""

    def lose(self, bench: Bench, task: Any) -> None:
        """The lease ends while the process stands still."""
        bench.later(100.0)
        task.lock.check()

    @pytest.mark.parametrize("acks_late", [False, True])
    def test_loss_is_the_end(self, bench: Bench, acks_late: bool) -> None:
        task = bench.task(lambda: self.lose(bench, task), acks_late=acks_late)
        message = bench.send(task)
        assert isinstance(bench.deliver(message), LockLost)
        bench.forget(message)
        bench.later(11.0)
        assert isinstance(bench.deliver(message, redelivered=True), LockLost)
        assert bench.runs == [message.id]
        assert is_free(task)

    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    def test_interruption_is_the_end_at_most(self, bench: Bench, number: int) -> None:
        """A lock is lost just when its server is slow to answer, and a soft time limit strikes."""

        def body() -> None:
            stack.enter_context(at_question(bench.app, number, interrupt))
            self.lose(bench, task)

        task = bench.task(body, acks_late=True)
        message = bench.send(task)
        with ExitStack() as stack:
            end = bench.deliver(message)
        assert isinstance(end, (LockLost, Interrupted))
        bench.forget(message)
        bench.later(11.0)
        assert repr(bench.deliver(message, redelivered=True)) == repr(end)
        assert bench.runs == [message.id]

    @pytest.mark.parametrize("error", [None, ValueError("another")])
    def test_copy_that_runs_by_then_has_the_end(self, bench: Bench, error: Exception | None) -> None:
        def body() -> str:
            if len(bench.runs) == 2:
                return "of the copy"
            try:
                bench.later(100.0)
                assert bench.deliver(message, redelivered=True) == "of the copy"
                task.lock.check()
            except LockLost:
                if error is None:
                    raise
                raise error from None
            return "unaware"

        task = bench.task(body, acks_late=True, lock_ttl=30.0, on_lock_lost="warn")
        message = bench.send(task)
        assert bench.deliver(message) == "of the copy"
        bench.later(11.0)
        assert bench.deliver(message, redelivered=True) == "of the copy"
        assert len(bench.runs) == 2
        assert is_free(task)

    def test_loss_of_another_lock_in_the_body_is_a_failure(self, bench: Bench) -> None:
        """The failure is recorded with the release, so that a waiting copy finds it."""
        message = bench.send(bench.task(raises(LockLost("inner", "deleted")), acks_late=True))
        bench.deliver(message)
        bench.forget(message)
        bench.later(11.0)
        assert isinstance(bench.deliver(message, redelivered=True), LockLost)
        assert bench.runs == [message.id]


class TestInterrupted:
    """Outside of the body: the message has one end, and no lock is left behind."""

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    @pytest.mark.parametrize("error", [None, ValueError("own")], ids=["returns", "fails"])
    def test_interruption_at_any_question(self, bench: Bench, number: int, when: Any, error: Exception | None) -> None:
        """If the body has run, it comes too late."""
        task = bench.task((lambda: "ran") if error is None else raises(error), acks_late=True)
        message = bench.send(task)
        with at_question(bench.app, number, interrupt, when):
            end = bench.deliver(message)
        assert is_free(task)
        if bench.runs:
            assert repr(end) == repr("ran" if error is None else error)
        elif end != "PENDING":
            assert isinstance(end, Interrupted)
        runs = len(bench.runs)
        bench.forget(message)
        bench.later(11.0)
        assert repr(bench.deliver(message, redelivered=True)) == repr(end)
        assert len(bench.runs) == runs

    @pytest.mark.parametrize("scope", ["while_executing", "until_executed"])
    @pytest.mark.parametrize("own", ["ran", "ValueError('own')"], ids=["returns", "fails"])
    def test_interruption_after_the_body(self, bench: Bench, own: str, scope: str) -> None:
        """It may still be the body's; if it is not, it comes too late."""
        number, where = 1, list[list[str]]()

        def body() -> str:
            where[:] = [do_at_call(number, interrupt)]
            if own != "ran":
                raise ValueError("own")
            return own

        def has_ended(*_: Any) -> None:
            sys.settrace(None)

        ends = set()
        while number == 1 or where[0]:
            task = bench.task(body, acks_late=True, lock_scope=scope, on_success=has_ended, on_failure=has_ended)
            message = bench.send(task)
            end = in_words(bench.deliver(message))
            assert is_free(task), where
            assert bench.send(task), where
            ends.add(end)
            assert in_words(bench.deliver(message, redelivered=True)) == end, where
            assert bench.runs.count(message.id) == 1, where
            number += 1 if number < 30 else 13
        assert own in ends
        assert len(ends) <= 2

    def test_next_task_is_interrupted_as_ever(self, bench: Bench) -> None:
        """That what follows a body is not, ends with its message."""
        assert bench.deliver(bench.send(bench.task())) == "ran"
        for base in (Task, SingletonTask):
            assert isinstance(bench.deliver(bench.send(bench.task(interrupt, base=base))), Interrupted)

    @pytest.mark.parametrize("is_map", [False, True], ids=["apply", "map"])
    def test_interruption_after_an_inner_body_is_not_lost(self, bench: Bench, is_map: bool) -> None:
        """The time limit is of the message, whose body goes on."""
        number, asked = 1, [""]

        def body() -> None:
            nonlocal asked
            with at_question(bench.app, number, interrupt) as asked:
                ended = (inner.map([1]) if is_map else inner).apply().result
            if isinstance(ended, Exception):
                raise ended

        inner = bench.task(lambda *_: "ran")
        while len(asked) >= number - 1:
            task = bench.task(body)
            end = bench.deliver(bench.send(task))
            assert isinstance(end, Interrupted) == (len(asked) >= number), asked
            assert is_free(inner), asked
            assert is_free(task), asked
            number += 1
        assert number > 3, "an inner task asks when its body has ended, too"

    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    @pytest.mark.parametrize("policy", ["retry", "skip", "raise", "join", "rerun"])
    def test_interruption_of_a_refusal(self, bench: Bench, policy: str, number: int) -> None:
        task = bench.task(acks_late=True, on_conflict=policy)
        message = bench.send(task)
        with hold_lock(task), at_question(bench.app, number, interrupt):
            end = bench.deliver(message)
        waiting = bench.queued()
        assert len(waiting) == (end == "PENDING"), "it has an end, or comes again"
        for copy in waiting:
            assert bench.deliver(copy) == "ran"
        bench.later(11.0)
        bench.deliver(message, redelivered=True)
        assert len(bench.runs) == len(waiting)

    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    def test_interrupted_copy_leaves_the_end_to_the_running_one(self, bench: Bench, number: int) -> None:
        def body() -> str:
            with at_question(bench.app, number, interrupt):
                bench.deliver(message, redelivered=True)
            return "ran"

        task = bench.task(body, acks_late=True)
        message = bench.send(task)
        assert bench.deliver(message) == "ran"
        bench.later(40.0)
        for copy in bench.queued():
            assert bench.deliver(copy) == "ran"
        assert bench.runs == [message.id]

    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    def test_interrupted_retry_frees_the_kept_lock(self, bench: Bench, number: int) -> None:
        task = bench.task(
            lambda: task.retry(countdown=30) if len(bench.runs) == 1 else "ran", lock_retain_on_retry=True
        )
        bench.deliver(bench.send(task))
        second = bench.put_back()
        with pytest.raises(LockConflict):
            is_free(task)
        with at_question(bench.app, number, interrupt):
            bench.deliver(second)
        assert is_free(task)

    @pytest.mark.parametrize("scope", ["until_executing", "until_executed"])
    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    def test_interrupted_message_frees_the_lock_that_it_was_sent_with(
        self, bench: Bench, scope: str, number: int
    ) -> None:
        task = bench.task(acks_late=True, lock_scope=scope)
        message = bench.send(task)
        with at_question(bench.app, number, interrupt):
            end = bench.deliver(message)
        assert bench.send(task).id != message.id
        assert end == "ran" or not bench.runs


@pytest.mark.parametrize(
    "when",
    [
        {"countdown": 500.0},
        {"eta": datetime.now(timezone.utc) + timedelta(seconds=500)},
        {"eta": datetime.now(timezone.utc).replace(tzinfo=None) + timedelta(seconds=500)},
    ],
    ids=["countdown", "with a zone", "without"],
)
def test_lock_is_kept_until_the_retry_may_have_begun(bench: Bench, when: dict[str, Any]) -> None:
    """It may wait in its queue behind others when it is due; and not for ever."""
    task = bench.task(lambda: task.retry(**when), lock_retain_on_retry=True, lock_ttl=10.0)
    bench.deliver(bench.send(task))
    bench.later(700.0)
    with pytest.raises(LockConflict):
        is_free(task)
    bench.later(7000.0)
    assert is_free(task)


def test_lock_is_not_kept_for_a_retry_with_other_arguments(bench: Bench) -> None:
    task = bench.task(lambda _: task.retry(args=(2,), countdown=500), lock_key=None, lock_retain_on_retry=True)
    bench.deliver(bench.send(task, 1))
    for number in (1, 2):
        with hold_lock(task, number):
            pass


class TestReturnedTooOften:
    """A message is rejected instead of run if copies of it have hidden from the broker how many workers it has cost."""

    @pytest.fixture
    def app(self, app: Celery) -> Celery:
        app.conf.task_queues = [Queue(app.main, queue_arguments={"x-delivery-limit": 3})]
        return app

    def came(self, bench: Bench, task: Any, *, before: int, now: int) -> Sent:
        """A message that was returned so often by now, and as the copy before."""
        message = bench.send(task).but(**{"x-delivery-count": before})
        with hold_lock(task):
            bench.deliver(message, redelivered=True)
        return bench.put_back().but(**{"x-delivery-count": now})

    def test_ends_without_a_run_and_frees_the_lock(self, bench: Bench) -> None:
        task = bench.task(acks_late=True)
        bench.deliver(self.came(bench, task, before=3, now=1))
        assert bench.answers == ["ack", "reject"]
        assert bench.runs == []
        assert is_free(task)

    def test_runs_up_to_the_limit(self, bench: Bench) -> None:
        assert bench.deliver(self.came(bench, bench.task(acks_late=True), before=2, now=1)) == "ran"

    def test_runs_if_it_is_acknowledged_before_it_begins(self, bench: Bench) -> None:
        """It has cost no worker, and a message that was acknowledged cannot be dead-lettered."""
        task = bench.task(on_conflict="retry")
        assert bench.deliver(self.came(bench, task, before=3, now=1)) == "ran"

    def test_counts_anew_after_a_dead_letter_exchange(self, bench: Bench) -> None:
        """Somebody sends the message again on purpose: it would be rejected for ever."""
        came = self.came(bench, bench.task(acks_late=True), before=9, now=0)
        assert bench.deliver(came.but(**{"x-death": [{"queue": "celery", "count": 1}]})) == "ran"

    @pytest.mark.parametrize("forged", [None, True, "x", [], [1], [-1, 0], [1, 0, 0], {"0": 1}, -1, 10**400])
    @pytest.mark.parametrize("where", ["x-delivery-count", "x-death"])
    def test_forged_returns_count_as_none(self, bench: Bench, forged: object, where: str) -> None:
        task = bench.task(acks_late=True)
        message = bench.send(task).but(**{where: forged})
        with hold_lock(task):
            bench.deliver(message, redelivered=True)
        assert bench.deliver(bench.put_back()) == "ran"
