"""Histories of messages that end as another message's run: the judge finds successes without a run, nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.storm.app import JOINING, SCOPED
from tests.storm.borrowed import FOLLOWING
from tests.storm.checker import Verdict
from tests.storm.excuses import FORGOT
from tests.storm.test_checker import body, end_of, fault, found, judge, sent
from tests.storm.waiting import KEEPS_OUT


def call(message: str, at: float, task: str, key: str = "k") -> dict[str, Any]:
    return {**sent(message, at=at), "task": task, "key": key}


def success(message: str, at: float, of: str) -> dict[str, Any]:
    return {**end_of(message, at, "SUCCESS"), "value": of}


def wrong(verdict: Verdict) -> list[str]:
    return [one.text for one in verdict.findings if one.broken == "wrong end"]


def test_tasks_that_are_locked_when_sent_may_be_followed() -> None:
    assert {*FOLLOWING} == {*SCOPED}


def test_success_of_its_own_run_is_fine() -> None:
    assert found(judge(call("a", 1, "work"), body("a", 2, 3), success("a", 3.1, "a"))) == []


def test_success_of_the_joined_run_is_fine() -> None:
    lines = call("a", 1, "work"), body("a", 2, 5), success("a", 5.1, "a")
    assert found(judge(*lines, call("b", 3, JOINING), success("b", 5.2, "a"))) == []


def test_success_without_a_run() -> None:
    assert wrong(judge(call("a", 1, "work"), success("a", 3, "a"))) == ["ended as a, which has not run"]


@pytest.mark.parametrize("how", ["stopped", "raised", ""])
def test_success_of_a_run_that_did_not_complete(how: str) -> None:
    lines = call("a", 1, "work"), body("a", 2, 5, how=how), call("b", 3, JOINING)
    assert wrong(judge(*lines, success("b", 6, "a"), end_of("a", 7, "FAILURE"))) == ["ended as a, which has not run"]


def test_attempt_that_was_retried_is_not_an_end() -> None:
    lines = call("a", 1, "work"), body("a", 2, 3, last=False), call("b", 2.5, JOINING), success("b", 4, "a")
    assert len(wrong(judge(*lines, end_of("a", 5, "FAILURE")))) == 1


def test_message_that_neither_joins_nor_follows() -> None:
    lines = call("a", 1, "work"), body("a", 2, 5), success("a", 5.1, "a")
    assert wrong(judge(*lines, call("b", 3, "patient"), success("b", 5.2, "a"))) == [
        "ended as a, though it neither joins nor follows"
    ]


def test_run_of_another_key() -> None:
    lines = call("a", 1, "work"), body("a", 2, 5), success("a", 5.1, "a")
    assert wrong(judge(*lines, call("b", 3, JOINING, "other"), success("b", 5.2, "a"))) == [
        "ended as a, a run of another job"
    ]


def test_run_that_was_over_before_it_was_sent() -> None:
    lines = call("a", 1, "work"), body("a", 2, 3), success("a", 3.1, "a")
    assert wrong(judge(*lines, call("b", 6, JOINING), success("b", 7, "a"))) == [
        "ended as a, whose run was over before it was sent"
    ]


@pytest.mark.parametrize(("begin", "excuse"), [(2.5, FORGOT), (0.5, ""), (6.2, "")])
def test_lock_server_that_came_back_with_the_lock_is_an_exception(begin: float, excuse: str) -> None:
    older = fault("lock server: restarts with older data", begin, begin + 0.4, forgot="0", latest=True)
    lines = call("a", 1, "once"), body("a", 2, 3, key="once:k"), success("a", 3.1, "a"), older
    verdict = judge(*lines, call("b", 6, "once"), success("b", 7, "a"))
    assert [one.excuse for one in verdict.findings if one.broken == "wrong end"] == [excuse]


@pytest.mark.parametrize("task", FOLLOWING)
def test_followers_end_as_a_run_of_their_job(task: str) -> None:
    job = f"{task}:k" if "on_conflict" in SCOPED[task] else f"{task}:k:a"
    lines = call("a", 1, task), body("a", 2, 5, key=job), success("a", 5.1, "a")
    assert found(judge(*lines, call("b", 3, task), success("b", 5.2, "a"))) == []
    assert len(wrong(judge(*lines, call("b", 3, task, "other"), success("b", 5.2, "a")))) == 1


@pytest.mark.parametrize(("later", "count"), [(KEEPS_OUT - 1, 0), (KEEPS_OUT + 2, 1)])
def test_follower_of_a_message_that_keeps_others_out_for_a_time(later: float, count: int) -> None:
    lines = call("a", 1, "each"), body("a", 1.5, 2, key="each:k:a"), success("a", 2.1, "a")
    assert len(wrong(judge(*lines, call("b", 2 + later, "each"), success("b", 20, "a")))) == count
