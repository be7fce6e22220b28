"""A message that follows another one ends in the same way, waits, or runs: exactly one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject

from celery_singleton_lock import DuplicateResult, LockUnavailable
from celery_singleton_lock.runtime import write_all
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent, raises
from tests.inside import at_question, line, silence, woken
from tests.patience import LIMIT
from tests.servers import until

SCOPES = ("until_executed", "until_executing", "until_and_while_executing")

#: How a task dies whose message then comes again.
DIES = {"acks_late": True, "reject_on_worker_lost": True}

#: A value that no record keeps.
LARGE = "x" * 10_000

#: More questions than a message asks the lock server.
QUESTIONS = 12


class Line:
    """Messages of one task: the first has the lock, and the others, each a part of a canvas, follow it."""

    def __init__(self, bench: Bench, followers: int = 1, **options: Any) -> None:
        self.bench = bench
        self.body: Callable[[], Any] = lambda: "ran"
        self._others = list[Sent]()
        options = {"lock_scope": "until_executed", "lock_queue_ttl": 100.0, **options}
        self.task = bench.task(lambda: self.body(), **options)
        self.first = bench.send(self.task)
        self.followers = [bench.send(self.task, root_id="the root") for _ in range(followers)]

    def run_first(self) -> Any:
        return self.bench.deliver(self.first)

    def follow(self, number: int = 0) -> Any:
        return self.bench.deliver(self.followers[number])

    def look(self, number: int = 0) -> str:
        """Deliver a follower that does not end yet."""
        assert self.follow(number) == "PENDING"
        self.followers[number] = self.bench.put_back()
        return "looked"

    def settle(self) -> None:
        """Deliver whatever was put back, until nothing is."""
        for _ in range(5):
            waiting, self._others = [*self._others, *self.bench.queued()], []
            for message in waiting:
                self.bench.deliver(message)
            self.bench.later(11.0)

    def lose(self) -> None:
        """The first message was lost by its broker: its lock ends."""
        self.bench.later(200.0)

    @property
    def is_free(self) -> bool:
        """Whether another message can be sent, which is then the one that waits."""
        result = self.task.apply_async()
        self._others += [message for message in self.bench.queued() if message.id != result.id]
        return not isinstance(result, DuplicateResult)

    def gets_free(self) -> None:
        """The main process frees it in another thread, where it has to."""
        until(lambda: self.is_free, "another message can be sent")

    def ids(self, *numbers: int) -> list[str]:
        return [self.followers[number].id for number in numbers]


@pytest.mark.parametrize("scope", SCOPES)
class TestEnds:
    @pytest.mark.parametrize("has_looked", [False, True])
    def test_follower_ends_with_the_value_of_its_leader(self, bench: Bench, scope: str, has_looked: bool) -> None:
        line = Line(bench, followers=3, lock_scope=scope)
        if has_looked:
            line.look()
        line.body = lambda: {"a": 1}
        line.run_first()
        assert [line.follow(number) for number in range(3)] == [{"a": 1}] * 3
        assert bench.runs == [line.first.id]
        line.gets_free()

    def test_one_follower_of_a_lost_leader_runs_and_the_others_follow_it(self, bench: Bench, scope: str) -> None:
        line = Line(bench, followers=3, lock_scope=scope)
        line.look(2)
        line.lose()

        def body() -> str:
            assert not (scope == "until_executed" and line.is_free)
            return line.look(1)

        line.body = body
        assert [line.follow(number) for number in range(3)] == ["looked"] * 3
        assert bench.runs == line.ids(0)
        line.gets_free()

    @pytest.mark.parametrize("end", [Reject("as told", requeue=True), Ignore()])
    def test_one_follower_runs_if_its_leader_ends_without_a_result(
        self, bench: Bench, scope: str, end: Exception
    ) -> None:
        line = Line(bench, followers=2, lock_scope=scope)
        line.body = raises(end)
        line.run_first()
        line.body = lambda: "ran"
        assert [line.follow(number) for number in range(2)] == ["ran"] * 2
        assert bench.runs == [line.first.id, *line.ids(0)]

    def test_follower_waits_for_a_retry_of_its_leader(self, bench: Bench, scope: str) -> None:
        line = Line(bench, lock_scope=scope)
        line.body = lambda: line.task.retry(countdown=0)
        line.run_first()
        second = bench.put_back()
        line.look()
        line.body = lambda: "second"
        assert bench.deliver(second) == "second"
        assert line.follow() == "second"
        assert len(bench.runs) == 2
        line.gets_free()

    def test_follower_of_a_leader_whose_lock_another_message_has_ends_as_its_leader(
        self, bench: Bench, scope: str
    ) -> None:
        line = Line(bench, lock_scope=scope)
        line.look()
        line.lose()
        assert line.is_free  # The next message has it.
        assert line.run_first() == "ran"
        assert line.follow() == "ran"
        assert bench.runs == [line.first.id]
        assert not line.is_free

    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    def test_leader_may_start_at_any_moment_of_a_follower(self, bench: Bench, scope: str, number: int) -> None:
        """Its lock had ended before it was delivered."""
        line = Line(bench, lock_scope=scope)
        line.lose()
        with at_question(bench.app, number, line.run_first) as asked:
            line.follow()
        line.settle()
        assert bench.end(line.followers[0]) == "ran"
        line.gets_free()
        if len(asked) < number:
            assert bench.runs == line.ids(0)
        else:
            assert len(bench.runs) == len({*bench.runs})

    @pytest.mark.parametrize("number", range(1, QUESTIONS))
    def test_any_answer_to_a_follower_may_be_lost(self, bench: Bench, scope: str, number: int) -> None:
        """The others follow it nevertheless."""
        line = Line(bench, followers=2, lock_scope=scope)
        line.lose()
        with at_question(bench.app, number, raises(LockUnavailable("server", "silent")), "after"):
            line.follow(0)
        line.follow(1)
        line.settle()
        assert [bench.end(follower) for follower in line.followers] == ["ran"] * 2
        assert len(bench.runs) == 1
        line.gets_free()


class TestLooks:
    @pytest.mark.parametrize("redelivered", [True, False])
    def test_follower_that_comes_again_looks_soon(self, bench: Bench, redelivered: bool) -> None:
        """It may have the lock for which it waits: its process died after it had taken it."""
        waiting = Line(bench)
        waiting.look()
        with line(bench.app):
            bench.deliver(waiting.followers[0], redelivered=redelivered)
        assert (bench.held[-1] < 10.0) is redelivered

    def test_lock_of_a_follower_that_was_put_back_lasts_as_long_as_it_may_wait(self, bench: Bench) -> None:
        """It has taken its leader's lock, at first for no longer than sending takes."""
        line = Line(bench, acks_late=True, on_conflict="retry")
        line.lose()
        # Its worker's main process has confirmed what it had as it came, which was nothing.
        with hold_lock(line.task), at_question(bench.app, 1, write_all):
            line.look()
        write_all()
        bench.later(60.0)
        assert not line.is_free

    def test_result_backend_knows_of_a_leader_that_left_no_record(self, bench: Bench) -> None:
        """After a hard time limit, or if its worker could not record more."""
        line = Line(bench)
        line.lose()
        bench.app.backend.store_result(line.first.id, ValueError("too long"), "FAILURE")
        assert repr(line.follow()) == "ValueError('too long')"
        assert bench.runs == []

    def test_follower_of_a_revoked_leader_runs(self, bench: Bench) -> None:
        line = Line(bench)
        line.lose()
        bench.app.backend.mark_as_revoked(line.first.id, "revoked")
        assert line.follow() == "ran"

    @pytest.mark.parametrize("policy", ["retry", "raise", "run"])
    def test_silent_lock_server_is_handled_as_the_policy_says(self, bench: Bench, policy: str) -> None:
        line = Line(bench, on_unavailable=policy)
        with silence(bench.app, heard=0):
            end = line.follow()
        if policy == "retry":
            assert end == "PENDING"
            line.run_first()
            assert bench.deliver(bench.put_back()) == "ran"
            assert bench.runs == [line.first.id]
        else:
            assert (isinstance(end, LockUnavailable), end == "ran") == (policy == "raise", policy == "run")

    def test_follower_looks_again_if_the_result_backend_does_not_answer(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line = Line(bench)
        line.lose()
        with monkeypatch.context() as away:
            away.setattr(bench.app.backend, "get", raises(OSError("away")))
            away.setattr(bench, "end", lambda _: None)
            line.follow()
        assert bench.runs == []
        assert bench.deliver(bench.put_back()) == "ran"


class TestWakeUps:
    """The end of a message may wake only one of those in line: whoever has no use for that wakes the next one."""

    @pytest.fixture
    def woke(self, bench: Bench) -> Iterator[list[str]]:
        with woken(bench.app) as keys:
            yield keys

    @pytest.mark.parametrize("scope", ["until_executed", "until_and_while_executing"])
    @pytest.mark.parametrize("waits", ["in line", "in its slot"])
    def test_message_that_takes_the_lock_of_the_run_before(
        self, bench: Bench, scope: str, waits: str, woke: list[str]
    ) -> None:
        """Followers of that run do not need the lock to end as it did."""
        options = {"on_conflict": "retry", "lock_wait": LIMIT if waits == "in its slot" else 0}
        line = Line(bench, lock_scope=scope, **options)
        with ExitStack() as held:
            held.enter_context(hold_lock(line.task))
            if waits == "in line":
                bench.deliver(line.first)
                line.first = bench.put_back()
                held.close()
            with at_question(bench.app, 1, held.close, "after"):
                line.run_first()
        assert bench.runs == [line.first.id]
        assert woke == [line.task.lock_key_of()]


class TestLockByTime:
    """`until_expired`: the lock says nothing about its message."""

    def test_it_outlives_its_leader(self, bench: Bench) -> None:
        line = Line(bench, lock_scope="until_expired")
        line.look()
        line.body = lambda: "of the first"
        line.run_first()
        assert not line.is_free
        assert line.follow() == "of the first"
        assert len(bench.runs) == 1

    def test_it_passes_to_a_follower_of_a_revoked_leader(self, bench: Bench) -> None:
        """Without it, nobody would see that a follower runs."""
        line = Line(bench, followers=3, lock_scope="until_expired")
        for number in range(3):
            line.look(number)
        bench.app.backend.mark_as_revoked(line.first.id, "revoked")
        line.body = lambda: [line.look(number) for number in (1, 2)]
        assert line.follow(0) == ["looked"] * 2
        assert bench.runs == line.ids(0)
        assert not line.is_free


class TestRunsLikeAnyOther:
    @pytest.mark.parametrize("ancestor", ["root_id", "parent_id"])
    def test_follower_runs_if_its_leader_may_wait_for_it(self, bench: Bench, ancestor: str) -> None:
        line = Line(bench, followers=0)
        part: Sent = bench.send(line.task, **{"root_id": "the root", ancestor: line.first.id})
        assert bench.deliver(part) == "ran"
        assert not line.is_free

    def test_follower_joins_a_leader_that_has_outlived_its_lock(self, bench: Bench) -> None:
        """The leader still has the lock of its run."""

        def body() -> str:
            line.lose()
            line.look()
            return "after all"

        line = Line(bench, acks_late=True, lock_ttl=600.0)
        line.body = body
        assert line.run_first() == "after all"
        assert line.follow() == "after all"
        assert bench.runs == [line.first.id]

    def test_follower_is_refused_if_its_leader_waits_for_its_parent(self, bench: Bench) -> None:
        """Its parent has the lock of the run, for which the leader waits."""
        line = Line(bench, followers=0, lock_scope="until_executed", lock_name="shared")
        parent = bench.task(lambda: bench.deliver(bench.send(line.task, parent_id="x")), lock_name="shared")
        assert bench.deliver(bench.send(parent)) == "REVOKED"
