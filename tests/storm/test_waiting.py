"""Histories of jobs that are locked when sent: the judge finds a second one that waits, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.storm.checker import Verdict
from tests.storm.excuses import FORGOT, KILLED_AS_IT_BEGAN, SLOW_TO_BEGIN, SLOW_TO_SEND
from tests.storm.test_checker import body, end_of, fault, found, judge
from tests.storm.waiting import FREE_AGAIN, KEEPS_OUT, SURELY

PID, OWN = 7, {"host": "east", "pid": 7}

Lines = list[dict[str, Any]]


def click(message: str, at: float, *, task: str = "once", owner: str | None = None) -> Lines:
    """A job is sent, with a lock."""
    about = {"message": message, "task": task, "key": "j", "host": "east", "pid": 1}
    queued = {"at": at, "event": "queued", "message": message, "retries": 0, "owner": owner or message, **OWN}
    return [{**about, "at": at - 0.01, "event": "clicked"}, queued, {**about, "at": at + 0.01, "event": "sent"}]


def taken(message: str, at: float) -> dict[str, Any]:
    return {"at": at, "event": "taken", "message": message, "retries": 0, "owner": message, **OWN}


def runs(message: str, start: float, end: float, **fields: Any) -> Lines:
    return [taken(message, start - 0.1), *body(message, start, end, key=message, told="SUCCESS", pid=PID, **fields)]


def twice(verdict: Verdict) -> list[str]:
    return [excuse for broken, excuse in found(verdict) if broken == "sent twice"]


def test_consecutive_messages_are_fine() -> None:
    assert found(judge(click("a", 1), runs("a", 1.2, 2), click("b", 2.1), runs("b", 2.3, 3))) == []


@pytest.mark.parametrize("task", ["once", "behind", "waiting"])
def test_two_waiting_messages(task: str) -> None:
    lines = click("a", 1, task=task), click("b", 3, task=task), runs("a", 5, 6), runs("b", 7, 8)
    assert twice(judge(*lines)) == [""]


@pytest.mark.parametrize(("task", "wrong"), [("once", [""]), ("behind", [])])
def test_message_behind_a_running_one(task: str, wrong: list[str]) -> None:
    lines = click("a", 1, task=task), runs("a", 1.5, 6), click("b", 3, task=task), runs("b", 7, 8)
    assert twice(judge(*lines)) == wrong


@pytest.mark.parametrize(("later", "wrong"), [(2.0, [""]), (KEEPS_OUT, [])])
def test_message_that_keeps_others_out_for_a_time(later: float, wrong: list[str]) -> None:
    lines = click("a", 1, task="each"), runs("a", 1.2, 1.5), click("b", 1 + later, task="each"), runs("b", 7, 8)
    assert twice(judge(*lines)) == wrong


def test_other_jobs_do_not_count() -> None:
    assert twice(judge(click("a", 1), click("b", 2, task="waiting"), runs("a", 5, 6), runs("b", 7, 8))) == []


def test_a_message_keeps_the_lock_between_two_attempts() -> None:
    first = body("a", 1.5, 2, key="a", pid=PID, last=False, how="raised")
    assert twice(judge(click("a", 1), first, click("b", 3), runs("a", 5, 6, retries=1), runs("b", 7, 8))) == [""]


def test_a_message_without_news_for_long_may_have_lost_its_lock() -> None:
    later = 1 + SURELY + 1
    assert twice(judge(click("a", 1), click("b", later), runs("a", later + 3, later + 4), runs("b", 90, 91))) == []


def test_an_expired_lock_is_not_taken_again_by_a_worker() -> None:
    later = 1 + SURELY + 1
    lines = click("a", 1), taken("a", later), click("b", later + 1), runs("a", later + 3, later + 4)
    assert twice(judge(*lines, runs("b", later + 5, later + 6))) == []


def test_a_message_whose_sender_got_an_error_has_no_lock() -> None:
    failed = {"at": 1.2, "event": "unsure", "message": "a", "host": "east", "pid": 1}
    assert twice(judge(click("a", 1)[:2], failed, click("b", 2), runs("a", 5, 6), runs("b", 7, 8))) == []


def test_a_lock_server_that_forgot_is_an_exception() -> None:
    forgets = fault("lock server: dies, and returns empty", 1.5, 2, forgot="0")
    assert twice(judge(click("a", 1), forgets, click("b", 3), runs("a", 5, 6), runs("b", 7, 8))) == [FORGOT]


def test_a_lock_server_that_forgot_the_lock_of_a_slow_sender_is_an_exception() -> None:
    forgets = fault("lock server: dies, and returns empty", 1.5, 2, forgot="0")
    slow = [{**line, "at": 1.2} if line["event"] == "clicked" else line for line in click("b", 5)]
    assert twice(judge(forgets, click("a", 3), slow, runs("a", 6, 7), runs("b", 8, 9))) == [FORGOT]


@pytest.mark.parametrize(("clicked", "excuse"), [(1.2, SLOW_TO_SEND), (4.5, "")])
def test_a_message_that_took_longer_to_send_than_its_lock_lasts(clicked: float, excuse: str) -> None:
    slow = [{**line, "at": clicked} if line["event"] == "clicked" else line for line in click("b", 5, task="each")]
    assert twice(judge(click("a", 4, task="each"), slow, runs("a", 6, 7), runs("b", 8, 9))) == [excuse]


@pytest.mark.parametrize(("task", "excuse"), [("waiting", KILLED_AS_IT_BEGAN), ("once", "")])
def test_a_worker_that_died_just_before_the_body_began_has_freed_the_lock(task: str, excuse: str) -> None:
    killed = fault("worker: SIGKILL", 2, 2.2, pids=[PID], fate="killed")
    lines = click("a", 1, task=task), taken("a", 1.5), killed, click("b", 3, task=task), runs("a", 5, 6)
    assert twice(judge(*lines, runs("b", 7, 8))) == [excuse]


@pytest.mark.parametrize(("silent", "excuse"), [("east/0", SLOW_TO_BEGIN), ("*/0", SLOW_TO_BEGIN), ("west/0", "")])
def test_a_body_that_waits_for_a_server_before_it_begins_has_freed_the_lock(silent: str, excuse: str) -> None:
    slow = fault("network: slow", 3.1, 4, silent=[silent])
    lines = click("a", 1, task="waiting"), slow, click("b", 3, task="waiting"), runs("a", 5, 6), runs("b", 7, 8)
    assert twice(judge(*lines)) == [excuse]


def test_a_body_that_begins_long_afterwards_has_not_freed_it() -> None:
    slow = fault("network: slow", 3.1, 9, silent=["*/0"])
    lines = click("a", 1, task="waiting"), slow, click("b", 3, task="waiting"), runs("a", 7, 8), runs("b", 9, 10)
    assert twice(judge(*lines)) == [""]


@pytest.mark.parametrize(("seconds", "wrong"), [(5.0, []), (FREE_AGAIN + 1.0, [("left", "")])])
def test_a_duplicate_of_a_message_that_is_over(seconds: float, wrong: list[tuple[str, str]]) -> None:
    late = {"at": 2 + seconds, "event": "duplicate", "message": "b", "of": "a", "host": "east", "pid": 1}
    assert found(judge(click("a", 1), end_of("a", 2, "REVOKED"), late)) == wrong
