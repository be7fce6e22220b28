"""A copy that has joined a task ends in the same way, runs in its place, or waits: exactly one of them runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_singleton_lock import LockConflict, LockUnavailable
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent, raises
from tests.inside import at_question, line, woken
from tests.redis_server import RedisServer

#: A value that no record keeps.
LARGE = "x" * 10_000

#: How a task dies whose message then comes again.
DIES = {"acks_late": True, "reject_on_worker_lost": True}


class Pair:
    """A task, and copies that meet its first run, which then ends as told; later ones return "ran"."""

    def __init__(self, bench: Bench, end: Callable[[], Any], copies: int = 1, **options: Any) -> None:
        self.bench, self.then = bench, list[Callable[[], Any]]()

        def body() -> Any:
            if len(bench.runs) > 1:
                return self.then.pop(0)() if self.then else "ran"
            self.copies = [self.look(copy) for copy in self.copies]
            return end()

        self.task = bench.task(body, **{"on_conflict": "join", **options})
        self.first = bench.send(self.task)
        self.copies = [bench.send(self.task) for _ in range(copies)]

    def look(self, copy: Sent) -> Sent:
        """Deliver a copy that does not end yet; returns what is put back."""
        assert self.bench.deliver(copy) == "PENDING"
        return self.bench.put_back()

    def run_first(self) -> Any:
        return self.bench.deliver(self.first)

    def copy(self, number: int = 0) -> Any:
        return self.bench.deliver(self.copies[number])

    def retry(self) -> None:
        """Look from the body, as it retries."""
        self.task.retry(countdown=0)

    def retried(self) -> Sent:
        """Run the first attempt; returns the message of the next one."""
        assert self.run_first() == "RETRY"
        return self.bench.put_back()

    @property
    def count(self) -> int:
        return len(self.bench.runs)


class TestEnded:
    @pytest.mark.parametrize("value", [None, 0, "text", {"a": [1]}, LARGE])
    def test_copy_ends_with_the_value(self, bench: Bench, value: object) -> None:
        pair = Pair(bench, lambda: value)
        pair.run_first()
        assert pair.copy() == value
        assert bench.runs == [pair.first.id]
        assert bench.queued() == []

    def test_what_follows_is_sent_once(self, bench: Bench) -> None:
        pair = Pair(bench, lambda: 1, copies=0)
        pair.copies = [bench.send(pair.task, link=bench.task().s())]
        pair.run_first()
        for sent in (1, 0):
            assert pair.copy() == 1
            assert len(bench.queued()) == sent
            bench.later(11.0)
        assert pair.count == 1

    @pytest.mark.parametrize("value", [1, LARGE])
    def test_copy_that_could_not_store_its_end_stores_it(self, bench: Bench, value: object) -> None:
        """Its worker died first: the joined task still has the value."""
        pair = Pair(bench, lambda: value)
        pair.run_first()
        for _ in range(2):
            assert pair.copy() == value
            bench.forget(pair.copies[0])
            bench.later(11.0)
        assert pair.count == 1

    def test_copy_waits_for_a_value_that_is_stored_later(self, bench: Bench) -> None:
        pair = Pair(bench, lambda: LARGE)
        pair.run_first()
        bench.forget(pair.first)
        copy = pair.look(pair.copies[0])
        bench.app.backend.store_result(pair.first.id, LARGE, "SUCCESS")
        assert bench.deliver(copy) == LARGE
        assert pair.count == 1

    def test_copy_runs_if_the_value_is_never_stored(self, bench: Bench) -> None:
        pair = Pair(bench, lambda: LARGE)
        pair.run_first()
        bench.forget(pair.first)
        bench.later(11.0)
        assert pair.copy() == "ran"

    def test_copy_waits_while_the_result_backend_does_not_answer(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pair = Pair(bench, lambda: LARGE)
        pair.run_first()
        with monkeypatch.context() as away:
            away.setattr(bench.app.backend, "get", raises(OSError("away")))
            away.setattr(bench, "end", lambda _: None)
            pair.copy()
        assert bench.deliver(bench.put_back()) == LARGE
        assert pair.count == 1

    def test_another_task_with_the_same_lock_has_another_result(self, bench: Bench) -> None:
        pair = Pair(bench, lambda: 1, copies=0, lock_name="shared")
        other = bench.task(lambda: "other", on_conflict="join", lock_name="shared")
        pair.copies = [bench.send(other)]
        pair.run_first()
        assert pair.copy() == "other"


def test_limit_of_retries_does_not_limit_the_looks(bench: Bench) -> None:
    """`lock_conflict_retries` may be set for the whole app."""
    task = bench.task(on_conflict="join", lock_conflict_retries=1)
    copy = bench.send(task)
    with hold_lock(task):
        for _ in range(3):
            assert bench.deliver(copy) == "PENDING"
            copy = bench.put_back()
    assert bench.deliver(copy) == "ran"


class TestDied:
    @pytest.mark.parametrize("options", [{}, DIES], ids=["early", "late"])
    @pytest.mark.parametrize("end", [SystemExit(), Reject("as told"), Ignore()])
    def test_one_copy_runs_and_the_others_end_in_the_same_way(
        self, bench: Bench, end: BaseException, options: dict[str, Any]
    ) -> None:
        pair = Pair(bench, raises(end), copies=3, **options)
        pair.run_first()
        assert [pair.copy(number) for number in range(3)] == ["ran"] * 3
        assert pair.count == 2


class TestGoesOn:
    def test_copy_waits_for_a_retry(self, bench: Bench) -> None:
        pair = Pair(bench, lambda: pair.retry())
        second = pair.retried()
        copy = pair.look(pair.copies[0])
        assert bench.deliver(second) == "ran"
        assert bench.deliver(copy) == "ran"
        assert pair.count == 2

    @pytest.mark.parametrize("is_seen", [True, False])
    def test_copy_runs_in_the_place_of_a_retry_that_died(self, bench: Bench, is_seen: bool) -> None:
        def dies() -> None:
            if is_seen:
                pair.copies = [pair.look(pair.copies[0])]
            raise SystemExit

        pair = Pair(bench, lambda: pair.retry(), **DIES)
        pair.then = [dies]
        bench.deliver(pair.retried())
        assert pair.copy() == "ran"
        assert pair.count == 3

    def test_copy_that_joins_as_its_call_says_runs_in_the_place_of_a_retry_that_died(self, bench: Bench) -> None:
        """The messages of the task that it joins do not know that anybody joins them."""
        bench.app.conf.singleton_lock_accept = ["on_conflict"]
        pair = Pair(bench, lambda: pair.retry(), copies=0, on_conflict="skip", **DIES)
        pair.copies = [bench.send(pair.task, singleton_lock={"on_conflict": "join"})]
        pair.then = [raises(SystemExit())]
        bench.deliver(pair.retried())
        assert pair.copy() == "ran"

    @pytest.mark.parametrize(("state", "end"), [("REVOKED", "ran"), ("SUCCESS", "of the retry")])
    def test_retry_without_a_record_is_found_in_the_result_backend(self, bench: Bench, state: str, end: str) -> None:
        """It is revoked before it starts, or has other arguments, and with them another lock."""
        pair = Pair(bench, lambda: pair.retry())
        pair.retried()
        copy = pair.look(pair.copies[0])
        result = "of the retry" if state == "SUCCESS" else ValueError("revoked")
        bench.app.backend.store_result(pair.first.id, result, state)
        assert bench.deliver(copy) == end
        assert pair.count == (2 if state == "REVOKED" else 1)


class TestSilence:
    """The lock server does not answer a copy's look: the copy asks for the lock, and looks again when it has that."""

    @pytest.mark.parametrize("number", range(1, 4))
    def test_copy_does_not_run_before_it_knows(self, bench: Bench, number: int) -> None:
        silent = raises(LockUnavailable("the server", "silent"))
        pair = Pair(bench, lambda: 1)
        pair.run_first()
        with at_question(bench.app, 1, silent), at_question(bench.app, number, silent):
            pair.copy()
        for copy in bench.queued():
            bench.deliver(copy)
        assert bench.end(pair.copies[0]) == 1
        assert pair.count == 1


def test_only_a_retry_leaves_more_than_the_record_of_its_end(bench: Bench, redis_server: RedisServer) -> None:
    bench.app.conf.singleton_lock_backend = redis_server.url_of(0)
    pair = Pair(bench, lambda: pair.retry(), copies=0)
    with redis_server.client() as client:
        for number in (1, 3):  # That it has begun, and how it has ended.
            message = pair.first if number == 1 else bench.put_back()
            bench.deliver(message)
            assert len(list(client.scan_iter("*:done:*"))) == number


class TestWakeUps:
    """The end of a task may wake only one of its copies in line: whoever has no use for that wakes the next one."""

    def test_task_that_has_lost_its_lock(self, bench: Bench) -> None:
        """Its copies are in line behind the next message, which has the lock."""

        def lose() -> int:
            bench.later(100.0)
            stack.enter_context(hold_lock(pair.task))
            return 1

        pair = Pair(bench, lose, on_lock_lost="warn")
        with line(bench.app) as waited_for, woken(bench.app) as woke, ExitStack() as stack:
            pair.run_first()
            assert woke == [pair.task.lock_key_of()]
            assert pair.copy() == 1
            assert waited_for == [pair.task.lock_key_of()]


class TestNotJoined:
    def test_task_that_may_wait_for_this_one_is_not_joined(self, bench: Bench) -> None:
        pair = Pair(bench, lambda: type(bench.deliver(bench.send(pair.task))).__name__, copies=0)
        assert pair.run_first() == LockConflict.__name__
        assert bench.queued() == []

    @pytest.mark.parametrize("ancestor", ["root_id", "parent_id"])
    def test_task_that_the_message_names_as_its_ancestor_is_not_joined(self, bench: Bench, ancestor: str) -> None:
        task = bench.task(lambda: type(bench.deliver(part)).__name__, on_conflict="join")
        first = bench.send(task)
        part = bench.send(task, **{ancestor: first.id})
        assert bench.deliver(first) == LockConflict.__name__

    def test_eager_call_does_not_join(self, bench: Bench) -> None:
        task = bench.task(on_conflict="join")
        with hold_lock(task), pytest.raises(LockConflict):
            task.apply(throw=True)

    def test_headers_that_a_body_passes_on_are_ignored(self, bench: Bench) -> None:
        """The other message was sent after the first had ended, and must run."""
        pair = Pair(bench, lambda: 1)
        pair.run_first()
        copied = {"singleton_lock": pair.copies[0].headers["singleton_lock"]}
        assert bench.deliver(bench.send(pair.task, headers=copied)) == "ran"


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "conf", "says"),
        [
            ({"ignore_result": True}, {}, "ignore_result=False"),
            ({"lock_limit": 2}, {}, "lock_limit=1"),
            ({}, {"singleton_lock_done_ttl": 0}, "singleton_lock_done_ttl"),
            ({}, {"result_backend": None}, "result_backend"),
            ({}, {"result_backend": "rpc://"}, "result_backend"),
        ],
    )
    @pytest.mark.parametrize("at", ["task", "call"])
    def test_missing_requirements_are_errors(
        self,
        app: Celery,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        options: Any,
        conf: Any,
        says: str,
        at: str,
    ) -> None:
        app.conf.update(singleton_lock_accept=["on_conflict"], **conf)
        bench, policy = Bench(app, monkeypatch), {"on_conflict": "join"}
        monkeypatch.setattr(bench, "end", lambda _: None)
        task = bench.task(**options, **(policy if at == "task" else {}))
        message = bench.send(task, **({} if at == "task" else {"singleton_lock": policy}))
        with ExitStack() as stack:
            for _ in range(options.get("lock_limit", 1) if at == "call" else 0):
                stack.enter_context(hold_lock(task))
            bench.deliver(message)
        assert "InvalidOption" in caplog.text
        assert says in caplog.text
        assert bench.runs == []

    def test_eager_app_has_no_requirements(self, app: Celery, bench: Bench) -> None:
        app.conf.update(task_always_eager=True, result_backend=None)
        assert bench.task(on_conflict="join").delay().get() == "ran"
