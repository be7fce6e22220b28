"""`on_conflict="rerun"` and `"replace"`: only the newest runs, how older messages end, and what is refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from celery import states
from celery.exceptions import TaskRevokedError
from celery.signals import before_task_publish

from celery_singleton_lock import (
    Aborted,
    InvalidOption,
    LockConflict,
    LockLost,
    LockSuperseded,
    clock,
    lock_superseded,
)
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent
from tests.inside import learns_at_once
from tests.patience import LIMIT
from tests.servers import until

LATE = {"expires": "2020-02-02T02:02:02+00:00"}


@pytest.fixture
def told() -> Iterator[list[tuple[str, str, str]]]:
    """What the signal says: whom, of which lock, and by whom."""
    found: list[tuple[str, str, str]] = []

    def receive(sender: Any, **details: Any) -> None:
        found.append((details["task_id"], details["key"], details["by"]))

    lock_superseded.connect(receive, weak=False)
    yield found
    lock_superseded.disconnect(receive)


@pytest.fixture
def heard(bench: Bench) -> Iterator[list[int]]:
    """What a foreign handler of the signal hears that stops bodies: how many runs there were."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(len(bench.runs)))
    yield heard
    signal.signal(signal.SIGUSR1, before)


def waits(bench: Bench, message: Sent) -> Sent:
    """Deliver a message that meets the lock; returns its copy."""
    assert bench.deliver(message) == "PENDING"
    return bench.put_back()


def is_superseded(bench: Bench, older: Sent, newest: Sent, task: Any) -> bool:
    stored = bench.app.backend.get_task_meta(older.id, cache=False)
    error = stored["result"]
    assert stored["status"] == states.REVOKED
    assert isinstance(error, TaskRevokedError)
    assert isinstance(error, LockSuperseded)
    return error.args == (task.lock_key_of(), newest.id)


class Waiting:
    """Two messages that wait, the second of which is the newest."""

    def __init__(self, bench: Bench) -> None:
        self.task = bench.task(lambda: "done", on_conflict="rerun")
        self.first, self.second = bench.send(self.task), bench.send(self.task)
        with hold_lock(self.task):
            self.older, self.newest = waits(bench, self.first), waits(bench, self.second)


@pytest.fixture
def waiting(bench: Bench) -> Waiting:
    return Waiting(bench)


class TestSuperseded:
    def test_older_one_ends_while_the_lock_is_held(self, bench: Bench, waiting: Waiting) -> None:
        with hold_lock(waiting.task):
            assert bench.deliver(waiting.older) == "REVOKED"
            assert bench.deliver(waiting.newest) == "PENDING"

    def test_older_one_runs_not_after_the_newest(self, bench: Bench, waiting: Waiting) -> None:
        assert bench.deliver(waiting.newest) == "done"
        assert bench.deliver(waiting.older) == "REVOKED"
        assert bench.runs == [waiting.second.id]

    def test_expired_message_supersedes_nobody(self, bench: Bench) -> None:
        """It had expired when the broker redelivered it, and it had never asked for the lock."""
        task = bench.task(lambda: "done", on_conflict="rerun")
        first, late = bench.send(task), bench.send(task).but(**LATE)
        with hold_lock(task):
            first = waits(bench, first)
            bench.deliver(late, redelivered=True)
            bench.queued()
        assert bench.deliver(first) == "done"
        assert bench.deliver(late, redelivered=True) == "REVOKED"
        assert bench.runs == [first.id]

    def test_message_with_copied_headers_is_a_new_message(self, bench: Bench, waiting: Waiting) -> None:
        """A body passed the headers of its message on."""
        copied = {"singleton_lock": waiting.older.headers["singleton_lock"]}
        third = bench.send(waiting.task, headers=copied)
        with hold_lock(waiting.task):
            third = waits(bench, third)
        assert bench.deliver(waiting.newest) == "REVOKED"
        assert bench.deliver(third) == "done"

    def test_superseded_message_with_the_id_of_the_holder_stores_no_result(self, bench: Bench) -> None:
        def body() -> str:
            if len(bench.runs) == 1:
                copy = waits(bench, again)
                waits(bench, newest)
                bench.deliver(copy)
            return "of the holder"

        task = bench.task(body, on_conflict="rerun")
        first, again = (bench.send(task, task_id=bench.app.main) for _ in range(2))
        newest = bench.send(task)
        assert bench.deliver(first) == "of the holder"


_sleeps = threading.Event()


class Stopped:
    """An older execution that runs, with `on_conflict="replace"`, and is stopped as a newer message comes.

    Args:
        then: called as that has been sent, until it is stopped.
    """

    def __init__(self, bench: Bench, then: Callable[[], Any], **options: Any) -> None:
        self.bench = bench

        def body() -> Any:
            if len(bench.runs) > 1:
                return "done"
            self.other.start()
            return then()

        self.task = bench.task(body, **{"on_conflict": "replace", "lock_ttl": 600.0, **options})
        self.first, self.newest = bench.send(self.task), bench.send(self.task)
        _sleeps.clear()
        self.other = threading.Thread(target=self._send_newest)

    def _send_newest(self) -> None:
        assert _sleeps.wait(LIMIT)
        self.bench.deliver(self.newest)

    def run(self) -> Any:
        """Run the older one; returns its end."""
        end = self.bench.deliver(self.first)
        copies: dict[str, Sent] = {}

        def is_put_back() -> bool:
            copies.update({message.id: message for message in self.bench.queued()})
            return self.newest.id in copies

        until(is_put_back, "the newest waits")
        self.copy, self.own = copies[self.newest.id], copies.get(self.first.id)
        return end

    @property
    def is_superseded(self) -> bool:
        return is_superseded(self.bench, self.first, self.newest, self.task)


def sleep(seconds: float = LIMIT) -> None:
    """Sleep until stopped; the newest comes not before, so that a body is stopped where it expects that."""
    _sleeps.set()
    clock.sleep(seconds)


def run_in(main_thread: bool, run: Callable[[], Any]) -> Any:
    """Run it in this thread, or in another one."""
    if main_thread:
        return run()
    with ThreadPoolExecutor(1) as another:
        return another.submit(run).result()


def stopped_as_it_ends(bench: Bench, seconds: float) -> Any:
    bench.runs.clear()
    stopped = Stopped(bench, lambda: sleep(seconds) or "in time")  # type: ignore[func-returns-value]
    end = bench.deliver(stopped.first)
    stopped.other.join()
    bench.queued()
    return end


class TestStopped:
    @pytest.fixture(autouse=True)
    def _at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        learns_at_once(monkeypatch)

    def test_stopped_execution_is_revoked_and_the_newest_runs(self, bench: Bench, told: list[Any]) -> None:
        stopped = Stopped(bench, sleep)
        assert stopped.run() == "REVOKED"
        assert stopped.is_superseded
        assert told == [(stopped.first.id, stopped.task.lock_key_of(), stopped.newest.id)]
        assert bench.deliver(stopped.copy) == "done"
        assert bench.runs == [stopped.first.id, stopped.newest.id]

    def test_copy_of_a_stopped_execution_does_not_run(self, bench: Bench) -> None:
        stopped = Stopped(bench, sleep, acks_late=True)
        stopped.run()
        bench.deliver(stopped.copy)
        bench.later(60.0)
        bench.deliver(stopped.first, redelivered=True)
        assert len(bench.runs) == 2

    def test_failure_during_clean_up_does_not_change_the_end(self, bench: Bench) -> None:
        def fail() -> None:
            try:
                sleep()
            except Aborted:
                raise ValueError from None

        stopped = Stopped(bench, fail)
        stopped.run()
        assert stopped.is_superseded

    def test_stopped_execution_that_also_loses_its_lock_fails(self, bench: Bench) -> None:
        def lose() -> None:
            try:
                sleep()
            except Aborted:
                stopped.other.join()
                bench.later(1000.0)
                stopped.task.lock.check()

        stopped = Stopped(bench, lose)
        assert isinstance(stopped.run(), LockLost)

    def test_autoretry_does_not_retry_a_stopped_execution(self, bench: Bench) -> None:
        stopped = Stopped(bench, sleep, autoretry_for=(Exception,), retry_backoff=False, default_retry_delay=0)
        assert stopped.run() == "REVOKED"
        assert len(bench.runs) == 1

    @pytest.mark.parametrize("in_main_thread", [True, False])
    def test_loop_that_survives_every_exception_is_stopped(self, bench: Bench, in_main_thread: bool) -> None:
        def loop() -> None:
            while True:
                with suppress(Exception):
                    sleep(0.005)

        assert run_in(in_main_thread, Stopped(bench, loop).run) == "REVOKED"

    def test_it_is_stopped_with_what_it_calls(self, bench: Bench) -> None:
        stopped = Stopped(bench, bench.task(sleep).apply)
        assert stopped.run() == "REVOKED"
        assert stopped.is_superseded

    @pytest.mark.parametrize("in_main_thread", [True, False])
    @pytest.mark.parametrize(("how", "end"), [("retry", "RETRY"), ("replace", "PENDING")])
    def test_what_it_is_sending_under_its_id_is_sent(
        self, bench: Bench, heard: list[int], how: str, end: str, in_main_thread: bool
    ) -> None:
        """Nobody could tell otherwise."""

        def is_sent(headers: Any, **_: Any) -> None:
            if headers["retries"] or headers.get("replaced_task_nesting"):
                is_sending.set()
                stopped.other.join()
                for _ in range(50):
                    clock.sleep(0.01)
                if in_main_thread:
                    signal.raise_signal(signal.SIGUSR1)  # As if what stops it came late.

        def come() -> None:
            assert is_sending.wait(LIMIT)
            bench.deliver(stopped.newest)

        def send() -> None:
            raise stopped.task.retry(countdown=0) if how == "retry" else stopped.task.replace(other.si())

        is_sending, other = threading.Event(), bench.task()
        stopped = Stopped(bench, send)
        stopped.other = threading.Thread(target=come)
        before_task_publish.connect(is_sent)
        try:
            assert run_in(in_main_thread, stopped.run) == end
        finally:
            before_task_publish.disconnect(is_sent)
        assert stopped.own is not None
        assert heard == [], "the signal was not for others"

    @pytest.mark.parametrize("in_main_thread", [True, False])
    @pytest.mark.parametrize(("how", "end"), [("retry", "RETRY"), ("replace", "PENDING")])
    def test_what_it_has_sent_under_its_id_goes_on(
        self, bench: Bench, how: str, end: str, in_main_thread: bool
    ) -> None:
        """A stop that comes as it ends for that is too late: it would be another end."""

        def send() -> None:
            try:
                raise stopped.task.retry(countdown=0) if how == "retry" else stopped.task.replace(other.si())
            finally:
                while True:  # A thread is not stopped as it sleeps.
                    sleep(0.005)

        other = bench.task()
        stopped = Stopped(bench, send)
        assert run_in(in_main_thread, stopped.run) == end
        assert stopped.own is not None

    @pytest.mark.parametrize("in_main_thread", [True, False])
    def test_nothing_is_raised_after_its_end(self, bench: Bench, in_main_thread: bool) -> None:
        """Although it ends just as the newest comes."""
        for turn in range(30):
            end = run_in(in_main_thread, lambda turn=turn: stopped_as_it_ends(bench, turn / 10_000))
            assert end in ("in time", "REVOKED")

    def test_foreign_signal_reaches_its_handler(self, bench: Bench, heard: list[int]) -> None:
        """Celery's soft time limit and its stack dumps use the same one."""
        bench.deliver(bench.send(bench.task(lambda: signal.raise_signal(signal.SIGUSR1))))
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [1, 1]

    def test_execution_with_another_policy_is_not_stopped(self, bench: Bench) -> None:
        """The running call did not choose this policy."""

        def body() -> str:
            if len(bench.runs) == 1:
                copies.append(waits(bench, newest))
                clock.sleep(0.2)
            return "done"

        bench.app.conf.singleton_lock_accept = ["on_conflict"]
        copies: list[Sent] = []
        task = bench.task(body, on_conflict="replace")
        first, newest = bench.send(task, singleton_lock={"on_conflict": "rerun"}), bench.send(task)
        assert bench.deliver(first) == "done"
        assert bench.deliver(copies[0]) == "done"

    def test_end_that_cannot_be_stored_at_first_does_not_change(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A soft time limit strikes meanwhile, or the result backend is briefly unavailable."""
        stopped = Stopped(bench, sleep)
        backend, mark = bench.app.backend, bench.app.backend.mark_as_failure

        def fail_once(*_: Any, **__: Any) -> None:
            monkeypatch.setattr(backend, "mark_as_failure", mark)
            raise ConnectionError("the result backend")

        monkeypatch.setattr(backend, "mark_as_failure", fail_once)
        stopped.run()
        if stopped.own is not None:  # It could be stored later only.
            bench.later(11.0)
            bench.deliver(stopped.own)
        assert stopped.is_superseded
        assert len(bench.runs) == 1

    def test_success_counts_that_comes_nevertheless(self, bench: Bench) -> None:
        def ends() -> str:
            with suppress(Aborted):
                sleep()
            return "in time"

        assert Stopped(bench, ends).run() == "in time"


class TestOutsideOfTheOrder:
    def test_eager_call_meets_a_conflict(self, bench: Bench) -> None:
        task = bench.task(on_conflict="rerun")
        with hold_lock(task), pytest.raises(LockConflict):
            task.apply(throw=True)

    @pytest.mark.parametrize("policy", ["rerun", "replace"])
    def test_callable_cannot_choose_the_policy(self, bench: Bench, policy: str) -> None:
        task = bench.task(on_conflict=lambda task, conflict: policy)
        with hold_lock(task):
            end = bench.deliver(bench.send(task))
        assert isinstance(end, InvalidOption)
        assert f"returned '{policy}'; allowed: skip, raise, retry, reject" in str(end)
        assert bench.runs == []


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
@pytest.mark.parametrize("at", ["task", "call"])
def test_incompatible_options_are_refused(
    bench: Bench, options: dict[str, Any], words: str, policy: str, at: str
) -> None:
    bench.app.conf.singleton_lock_accept = ["on_conflict"]
    given = {"on_conflict": policy}
    task = bench.task(**options, **(given if at == "task" else {}))
    with pytest.raises(InvalidOption, match=words):
        end = bench.deliver(bench.send(task, **({} if at == "task" else {"singleton_lock": given})))
        assert bench.runs == []
        raise end


def test_replace_with_a_mere_warning_on_loss_is_refused(bench: Bench) -> None:
    task = bench.task(on_conflict="replace", on_lock_lost="warn")
    end = bench.deliver(bench.send(task))
    assert isinstance(end, InvalidOption)
    assert "is 'replace' with on_lock_lost 'warn'" in str(end)
