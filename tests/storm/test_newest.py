"""Histories of messages of which only the newest is to run: the judge finds wrong runs, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.storm.checker import Verdict
from tests.storm.excuses import FORGOT, FROZEN, HOGGED, UNHEARD
from tests.storm.newest import REPLACE, RERUN, STOPPED
from tests.storm.test_checker import TTL, body, end_of, fault, judge, sent

OWN = {"host": "east", "pid": 1}

Lines = list[dict[str, Any]]


def comes(message: str, at: float, task: str = RERUN, *, met: bool = True, key: str = "k") -> Lines:
    """A message was sent, a worker got it, and it met the lock."""
    taken = {"at": at, "event": "taken", "message": message, "retries": 0, **OWN}
    meets = [{"at": at + 0.1, "event": "met", "message": message, **OWN}] if met else []
    return [{**sent(message, at=at - 0.5), "task": task, "key": key}, taken, *meets]


def superseded(message: str, at: float, by: str) -> dict[str, Any]:
    return {**end_of(message, at, "REVOKED", error="LockSuperseded"), "by": by}


def wrong(verdict: Verdict) -> list[str]:
    return [one.excuse for one in verdict.findings if one.broken == "not the newest"]


def test_newest_runs_after_the_running_message() -> None:
    lines = comes("a", 1, met=False), body("a", 1.1, 4), comes("b", 2), superseded("b", 3.2, "c"), comes("c", 3)
    assert wrong(judge(*lines, body("c", 4.1, 5), end_of("c", 5, "SUCCESS"))) == []


@pytest.mark.parametrize("task", [RERUN, REPLACE])
def test_older_message_that_runs_after_a_newer_one(task: str) -> None:
    lines = comes("a", 1, task), comes("b", 2, task), body("b", 3, 4), body("a", 5, 6)
    assert wrong(judge(*lines)) == [""]


def test_older_message_that_runs_again_after_a_newer_one() -> None:
    lines = comes("a", 1, met=False), body("a", 1.1, 2, how=""), comes("b", 3), body("b", 3.2, 4), body("a", 5, 6)
    assert wrong(judge(*lines)) == [""]


def test_two_messages_of_unknown_order() -> None:
    lines = comes("a", 1, met=False), comes("b", 1.05), body("b", 3, 4), body("a", 5, 6)
    assert wrong(judge(*lines)) == []


def test_each_key_and_each_task_has_its_own_order() -> None:
    lines = comes("a", 1), comes("b", 2, key="other"), comes("c", 2, REPLACE)
    assert wrong(judge(*lines, body("b", 3, 4), body("c", 4, 5), body("a", 6, 7))) == []


def test_lock_server_that_forgot_the_order_is_an_exception() -> None:
    forgets = fault("lock server: dies, and returns empty", 4, 4.5, forgot="0")
    assert wrong(judge(comes("a", 1), comes("b", 2), body("b", 3, 3.5), forgets, body("a", 5, 6))) == [FORGOT]


def test_superseded_by_an_older_message() -> None:
    lines = comes("a", 1), comes("b", 2), superseded("b", 3, "a"), body("a", 3, 4)
    assert wrong(judge(*lines)) == [""]


@pytest.mark.parametrize("other", [comes("x", 2, key="other"), comes("x", 2, REPLACE), []])
def test_superseded_by_no_message_of_its_key(other: Lines) -> None:
    assert wrong(judge(comes("a", 1), other, superseded("a", 3, "x"))) == [""]


class TestReplaced:
    """A run whose body goes on although a newer message has met its lock at 2.1."""

    late = 2.1 + STOPPED * TTL + 1

    def runs_until(self, end: float, task: str = REPLACE) -> list[Any]:
        return [comes("a", 1, task, met=False), body("a", 1.1, end), comes("b", 2, task)]

    def test_stopped_in_time(self) -> None:
        assert wrong(judge(*self.runs_until(2.1 + STOPPED * TTL - 1))) == []

    def test_not_stopped(self) -> None:
        assert wrong(judge(*self.runs_until(self.late))) == [""]

    def test_rerun_policy_lets_it_end(self) -> None:
        assert wrong(judge(*self.runs_until(self.late, RERUN))) == []

    def test_silent_lock_server(self) -> None:
        silent = fault("lock server: hangs", 3, 6, silent=["*/0"])
        assert wrong(judge(*self.runs_until(self.late), silent)) == [UNHEARD]

    @pytest.mark.parametrize("fate", ["frozen", "stopped"])
    def test_frozen_process(self, fate: str) -> None:
        still = fault("child: stopped", 3, 6, pids=[1], fate=fate)
        assert wrong(judge(*self.runs_until(self.late), still)) == [FROZEN]

    def test_neighbour_that_holds_the_gil(self) -> None:
        hog = body("h", 3, 6, key="hog-1")
        assert wrong(judge(*self.runs_until(self.late), hog)) == [HOGGED]
