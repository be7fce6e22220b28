"""A lock that is taken as a message is sent: what callers get, how long it lasts, and when it ends."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import chain, chord, group, states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError
from celery.result import EagerResult
from kombu.exceptions import EncodeError, OperationalError

from celery_singleton_lock import (
    DuplicateResult,
    DuplicateTask,
    InvalidKey,
    InvalidOption,
    LockUnavailable,
    lock_duplicate,
)
from celery_singleton_lock.runtime import write_all
from celery_singleton_lock.testing import memory_locks
from tests.bench import Bench, Sent, raises
from tests.inside import at_question, first_try_fails, raise_at_line, says_again, silence
from tests.servers import until

#: Of which the lock ends with the message, and not before.
KEPT = {"lock_scope": "until_executed", "lock_queue_ttl": 1000.0}

#: More questions than a sender asks the lock server.
QUESTIONS = 5


def queued(bench: Bench, body: Callable[..., Any] = lambda: "ran", **options: Any) -> Any:
    return bench.task(body, **{**KEPT, **options})


def is_free(task: Any) -> bool:
    """Whether the next call is sent, and thereby has the lock."""
    return not isinstance(task.delay(), DuplicateResult)


def gets_free(task: Any) -> None:
    """A main process frees the lock in another thread, where it has to."""
    until(lambda: is_free(task), "another message can be sent")


def lasts(bench: Bench, task: Any, least: float, most: float) -> bool:
    """Whether the lock ends by itself between these seconds from now."""
    write_all()  # What a sender confirms, it confirms in another thread.
    bench.later(max(least, 0.0))
    is_held = not is_free(task)
    bench.later(most - max(least, 0.0))
    return is_held and is_free(task)


@contextmanager
def silent(bench: Bench) -> Iterator[None]:
    """The lock server answers nothing while something is sent."""
    with at_question(bench.app, 1, raises(LockUnavailable("server", "silent"))):
        yield


class TestCaller:
    @pytest.mark.parametrize("way", ["by itself", "connection", "producer", "send_task"])
    def test_only_one_is_sent_in_whatever_way(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        """A body may have a connection of its own, and instrumentation wraps what sends."""
        task, send_task = queued(bench), bench.app.send_task
        with bench.app.connection_for_write() as connection, bench.app.producer_or_acquire() as producer:
            if way == "send_task":
                monkeypatch.setattr(bench.app, "send_task", lambda *args, **options: send_task(*args, **options))
            options = {"connection": {"connection": connection}, "producer": {"producer": producer}}.get(way, {})
            found = [isinstance(task.apply_async(**options), DuplicateResult) for _ in range(2)]
        assert found == [False, True]
        assert len(bench.queued()) == 1

    def test_other_arguments_have_another_lock(self, bench: Bench) -> None:
        task = queued(bench, lambda number: number, lock_key=None)
        assert len({type(task.delay(number)) for number in (1, 2)}) == 1
        assert len(bench.queued()) == 2

    def test_no_more_than_the_limit_are_sent(self, bench: Bench) -> None:
        task = queued(bench, lock_limit=3)
        found = [isinstance(task.delay(), DuplicateResult) for _ in range(5)]
        assert found == [False, False, False, True, True]

    def test_while_executing_needs_no_lock_server(self, bench: Bench) -> None:
        with at_question(bench.app, 1, raises(LockUnavailable("server", "silent"))) as asked:
            bench.send(queued(bench, lock_scope="while_executing", lock_queue_ttl=None))
        assert asked == []

    def test_duplicate_raises(self, bench: Bench) -> None:
        task = queued(bench, on_duplicate="raise")
        first = task.delay()
        with pytest.raises(DuplicateTask, match=first.id) as raised:
            task.delay()
        assert raised.value.task_id == first.id

    def test_duplicate_is_skipped(self, bench: Bench) -> None:
        task = queued(bench, on_duplicate="skip")
        first, second = task.delay(), task.delay()
        assert isinstance(second, EagerResult)
        assert (second.state, second.id == first.id) == (states.REVOKED, False)
        with pytest.raises(TaskRevokedError, match=first.id):
            second.get()

    def test_callable_chooses_the_policy(self, bench: Bench) -> None:
        met: list[DuplicateTask] = []
        task = queued(bench, on_duplicate=lambda task, duplicate: met.append(duplicate) or "skip")
        first = task.delay()
        assert isinstance(task.delay(), EagerResult)
        assert [duplicate.task_id for duplicate in met] == [first.id]

    def test_callable_that_returns_no_valid_policy_is_an_error(self, bench: Bench) -> None:
        task = queued(bench, on_duplicate=lambda task, duplicate: "replace")
        task.delay()
        with pytest.raises(InvalidOption, match="'replace'; allowed: existing, raise, skip"):
            task.delay()

    @pytest.mark.parametrize(("part", "policy"), [(False, "existing"), (True, "follow")])
    def test_duplicate_sends_a_signal(self, bench: Bench, part: bool, policy: str) -> None:
        seen: list[str] = []

        def receive(policy: str, **_: Any) -> None:
            seen.append(policy)

        task = queued(bench)
        lock_duplicate.connect(receive, weak=False)
        try:
            for _ in range(2):
                task.apply_async(**({"link": bench.task().s()} if part else {}))
        finally:
            lock_duplicate.disconnect(receive)
        assert seen == [policy]


class TestCanvas:
    """Something waits for each part, so it is sent nevertheless; see `test_following` for what becomes of it."""

    @pytest.mark.parametrize(
        "canvas",
        [
            lambda task: chain(task.si(), task.si()),
            lambda task: group(task.si(), task.si()),
            lambda task: chord([task.si(), task.si()], task.si()),
            lambda task: task.si().on_error(task.si()),
        ],
        ids=["chain", "group", "chord", "errback"],
    )
    @pytest.mark.parametrize("policy", ["existing", "skip", "raise", lambda *_: "skip"])
    def test_parts_are_sent_and_end_as_the_message_that_has_the_lock(
        self, bench: Bench, canvas: Callable[[Any], Any], policy: Any
    ) -> None:
        task = queued(bench, on_duplicate=policy)
        first = bench.send(task)
        canvas(task).apply_async()
        parts = [message for message in bench.queued() if message.headers["task"] == task.name]
        assert parts
        bench.deliver(first)
        assert {bench.deliver(part) for part in parts} == {"ran"}
        assert bench.runs == [first.id]

    @pytest.mark.parametrize(
        ("options", "conf"),
        [
            ({"ignore_result": True}, {}),
            ({}, {"singleton_lock_done_ttl": 0}),
            ({"lock_scope": "until_executing", "on_duplicate": "replace"}, {}),
            ({"lock_scope": "until_executing", "on_duplicate": lambda *_: "replace"}, {}),
            ({"lock_scope": "until_expired", "lock_name": "shared"}, {}),
        ],
        ids=["no results", "no records", "newest wins", "newest may win", "unclear whose result"],
    )
    def test_parts_that_cannot_follow_run(self, bench: Bench, options: Any, conf: Any) -> None:
        bench.app.conf.update(conf)
        task = queued(bench, **options)
        task.delay()
        bench.queued()
        group(task.si(), task.si()).apply_async()
        parts = bench.queued()
        assert len(parts) == 2
        for part in parts:
            bench.deliver(part)
        assert bench.runs == [part.id for part in parts]

    def test_part_with_an_option_of_another_package_goes_on(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It was sent before the package was replaced: an error would fail the step before it."""
        follows = queued(bench)
        with pytest.raises(InvalidOption, match="celery-once"):
            follows.apply_async(once={"graceful": True})
        message = bench.send(bench.task(), link=follows.si().set(once={"graceful": True}))
        assert bench.deliver(message) == "ran"
        assert bench.put_back().headers["task"] == follows.name
        assert "'once', an option of celery-once" in caplog.text

    def test_failing_callable_is_an_error(self, bench: Bench) -> None:
        """The sender of a canvas gets an error."""
        task = queued(bench, on_duplicate=raises(ZeroDivisionError()))
        task.delay()
        with pytest.raises(ZeroDivisionError):
            group(task.si(), task.si()).apply_async()


class TestNothingIsSent:
    @pytest.mark.parametrize("error", [OperationalError("no broker"), EncodeError("no json"), KeyboardInterrupt()])
    def test_lock_is_free_after_a_failed_send(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        task = queued(bench)
        with monkeypatch.context() as broken, pytest.raises(type(error)):
            broken.setattr(bench.app.amqp, "send_task_message", raises(error))
            task.delay()
        assert is_free(task)

    @pytest.mark.parametrize("scope", ["until_executed", "until_expired"])
    def test_sender_that_is_interrupted_at_any_line_leaves_no_lock(self, bench: Bench, scope: str) -> None:
        for number in itertools.count(1):
            task = queued(bench, lock_scope=scope)
            assert task.name  # Celery makes it now.
            where = raise_at_line(number, KeyboardInterrupt())
            try:
                with suppress(KeyboardInterrupt):
                    task.delay()
            finally:
                sys.settrace(None)
            if not where:
                break
            assert bench.queued() or is_free(task), where
            bench.queued()

    def test_arguments_that_do_not_fit_leave_no_lock(self, bench: Bench) -> None:
        task = queued(bench)
        with pytest.raises(TypeError):
            task.apply_async((1, 2), {"no": 1})
        assert is_free(task)


class TestSilentServer:
    def test_message_is_sent_without_a_lock(self, bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
        task = queued(bench)
        with silent(bench):
            message = bench.send(task)
        assert "is sent without a lock" in caplog.text
        assert is_free(task)
        assert bench.deliver(message) == "ran"

    def test_caller_may_ask_for_an_error_instead(self, bench: Bench) -> None:
        with silent(bench), pytest.raises(LockUnavailable):
            bench.send(queued(bench, on_send_unavailable="raise"))
        assert bench.queued() == []

    @pytest.mark.parametrize("is_part", [False, True])
    def test_body_that_sends_gets_the_error(self, bench: Bench, is_part: bool) -> None:
        other = queued(bench, on_send_unavailable="raise")

        def body() -> None:
            with silent(bench):
                other.apply_async(**({"link": other.si()} if is_part else {}))

        for base in (bench.task(body), bench.app.task(name="plain", shared=False)(body)):
            assert isinstance(bench.deliver(bench.send(base)), LockUnavailable)

    @pytest.mark.parametrize("why", ["silent", "no key"])
    def test_what_celery_sends_on_is_sent_without_a_lock(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, why: str
    ) -> None:
        """There is nobody to whom an error would be raised."""

        def body() -> str:
            if why == "silent":
                stack.enter_context(silence(bench.app, heard=0))
            else:
                monkeypatch.setattr(follows, "lock_key", raises(InvalidKey("none")), raising=False)
            return "ran"

        follows = queued(bench, on_send_unavailable="raise")
        message = bench.send(bench.task(body), link=follows.si())
        with ExitStack() as stack:
            assert bench.deliver(message) == "ran"
        (sent,) = bench.queued()
        assert sent.headers["task"] == follows.name
        monkeypatch.undo()
        assert is_free(follows)


class TestEnds:
    """When the next message can be sent."""

    @pytest.mark.parametrize(
        ("scope", "in_body"),
        [("until_executing", True), ("until_and_while_executing", True), ("until_executed", False)],
    )
    def test_with_the_body_or_as_it_begins(self, bench: Bench, scope: str, in_body: bool) -> None:
        task = queued(bench, lambda: is_free(task), lock_scope=scope)
        message = bench.send(task)
        assert not is_free(task)
        assert bench.deliver(message) is in_body
        bench.later(0 if in_body else 1.0)
        assert is_free(task) is not in_body

    def test_also_if_the_lock_was_got_at_the_second_try(self, bench: Bench) -> None:
        """It has another owner on a Redlock."""
        task = queued(bench, lambda: is_free(task), lock_scope="until_executing")
        with first_try_fails(bench.app):
            message = bench.send(task)
        assert not is_free(task)
        assert bench.deliver(message)

    def test_also_if_the_next_attempt_is_sent_at_the_second_try(self, bench: Bench) -> None:
        """The message names its lock's owner already: no try may have another one."""

        def body() -> str:
            if len(bench.runs) == 1:
                with first_try_fails(bench.app):
                    task.retry(countdown=0)
            return "ran"

        task = queued(bench, body)
        bench.deliver(bench.send(task))
        assert not is_free(task)
        assert bench.deliver(bench.put_back()) == "ran"
        assert is_free(task)

    @pytest.mark.parametrize("scope", ["until_executing", "until_executed", "until_and_while_executing"])
    @pytest.mark.parametrize(
        "end", [ValueError(), Ignore(), Reject(), SystemExit()], ids=lambda end: type(end).__name__
    )
    def test_however_the_body_ends(self, bench: Bench, scope: str, end: BaseException) -> None:
        task = queued(bench, raises(end), lock_scope=scope)
        bench.deliver(bench.send(task))
        gets_free(task)

    @pytest.mark.parametrize("end", ["revoked", "expired", "skipped", "wrong options"])
    def test_without_a_body(self, bench: Bench, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
        task = queued(bench, lock_limit=1)
        message = bench.send(task)
        if end == "revoked":
            bench.revoke(message)
        if end == "expired":
            message = message.but(expires="2020-01-01T00:00:00+00:00")
        if end == "wrong options":
            monkeypatch.setattr(task, "on_conflict", "nonsense")
        if end == "skipped":
            other = bench.task(lambda: bench.deliver(message), lock_name=task.name)
            monkeypatch.setattr(task, "lock_name", task.name)
            bench.deliver(bench.send(other))
        else:
            bench.deliver(message)
        monkeypatch.undo()
        assert message.id not in bench.runs
        gets_free(task)

    def test_retry_with_other_arguments_has_their_lock(self, bench: Bench) -> None:
        def body(number: int) -> Any:
            return task.retry(args=(2,), countdown=0) if number == 1 else number

        task = queued(bench, body, lock_key=None)
        bench.deliver(bench.send(task, 1))
        second = bench.put_back()
        assert not isinstance(task.delay(1), DuplicateResult)
        assert isinstance(task.delay(2), DuplicateResult)
        bench.queued()
        assert bench.deliver(second) == 2
        until(lambda: not isinstance(task.delay(2), DuplicateResult), "it is free")

    def test_failed_retry_ends_it_with_its_message(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        task = queued(bench, lambda: task.retry(countdown=0), acks_late=True)
        message = bench.send(task)
        with monkeypatch.context() as broken:
            broken.setattr(bench.app.amqp, "send_task_message", raises(OperationalError("no broker")))
            bench.deliver(message)
        assert bench.answers == ["reject"]
        gets_free(task)

    def test_header_that_was_copied_to_another_message_frees_nothing(self, bench: Bench) -> None:
        task, other = queued(bench), bench.task()
        message: Sent = bench.send(task)
        copied = bench.send(other).but(singleton_lock=message.headers["singleton_lock"])
        assert bench.deliver(copied) == "ran"
        assert not is_free(task)

    def test_next_attempt_of_a_call_without_a_lock_has_none(self, bench: Bench) -> None:
        def body() -> Any:
            return task.retry(countdown=0) if len(bench.runs) == 1 else "ran"

        bench.app.conf.singleton_lock_accept = "all"
        task = queued(bench, body)
        message = bench.send(task, singleton_lock=False)
        assert is_free(task)
        bench.queued()
        bench.deliver(message)
        assert bench.deliver(bench.put_back()) == "ran"

    def test_worker_with_another_prefix_says_so_once(
        self, bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By default, the prefix may follow the result backend's, which a program that only sends may not have."""
        says_again(monkeypatch)
        task = queued(bench, lambda number: number, lock_key=None)
        messages = [bench.send(task, number) for number in range(2)]
        bench.app.conf.singleton_lock_prefix = "another"
        with memory_locks():
            assert [bench.deliver(message) for message in messages] == [0, 1]
        assert caplog.text.count("Set the same singleton_lock_prefix where tasks are sent and where they run") == 1

    def test_retry_that_was_sent_and_caught_keeps_it(self, bench: Bench) -> None:
        def body() -> str:
            if len(bench.runs) == 1:
                with pytest.raises(Retry):
                    task.retry(countdown=0)
            return "ran"

        task = queued(bench, body, ignore_result=True)
        message = bench.send(task)
        bench.deliver(message)
        second = bench.put_back()
        write_all()
        assert not is_free(task)
        bench.queued()
        bench.later(20.0)
        bench.deliver(message, redelivered=True)
        assert not is_free(task), "a late copy leaves it to the next attempt"
        bench.deliver(second)
        gets_free(task)

    def test_retry_keeps_it_whatever_its_attempt_before_has_returned(self, bench: Bench) -> None:
        """The result backend has an end of the message by then."""
        task = queued(bench, lambda: task.retry(countdown=0, throw=False) and "ran")
        assert bench.deliver(bench.send(task)) == "ran"
        assert not is_free(task)

    def test_retry_with_the_arguments_of_another_message_is_sent_nevertheless(self, bench: Bench) -> None:
        def body(number: int) -> Any:
            return task.retry(args=(2,), countdown=0) if number == 1 else number

        task = queued(bench, body, lock_key=None, on_duplicate="raise")
        bench.send(task, 2)
        bench.deliver(bench.send(task, 1))
        assert bench.deliver(bench.put_back()) == 2
        with pytest.raises(DuplicateTask):
            task.delay(2)


class TestOwnId:
    """A body that sends its task again is to use `retry`."""

    @pytest.mark.parametrize("scope", ["until_executing", "until_executed"])
    def test_new_message_under_a_messages_own_id_is_a_duplicate(self, bench: Bench, scope: str) -> None:
        """As under any other id: it is sent only if the lock has ended as the body began."""

        def body() -> bool:
            sent = task.apply_async(task_id=bench.runs[-1], countdown=500)
            return not isinstance(sent, DuplicateResult)

        task = queued(bench, body, lock_scope=scope)
        assert bench.deliver(bench.send(task)) is (scope == "until_executing")
        assert len(bench.queued()) == (scope == "until_executing")
        assert is_free(task) is (scope == "until_executed")


class TestHowLong:
    """Seconds for which a waiting message keeps others from being sent."""

    @pytest.mark.parametrize(
        ("options", "seconds"),
        [
            ({}, 3660),
            ({"countdown": 3600}, 7260),
            ({"eta": datetime.now(timezone.utc) + timedelta(days=1)}, 90_060),
            ({"expires": 600}, 660),
            ({"expires": datetime.now(timezone.utc) + timedelta(hours=1)}, 3660),
            ({"countdown": math.nan}, 3660),
            ({"countdown": -5}, 3660),
        ],
    )
    def test_lock_lasts_as_long_as_the_message_may_wait(self, bench: Bench, options: Any, seconds: float) -> None:
        task = queued(bench, lock_queue_ttl=None)
        try:
            task.apply_async(**options)
        except ValueError:  # Celery makes no date of it, and nothing is sent.
            assert is_free(task)
            return
        assert lasts(bench, task, seconds - 1800, seconds + 1800)

    def test_throttle_needs_lock_queue_ttl(self, bench: Bench) -> None:
        task = queued(bench, lock_scope="until_expired", lock_queue_ttl=None)
        with pytest.raises(InvalidOption, match="'until_expired', which needs lock_queue_ttl"):
            task.delay()
