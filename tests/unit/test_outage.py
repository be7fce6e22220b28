"""When an outage of the lock server begins and ends, for one process."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable, NewNodes
from celery_singleton_lock.outage import MUTE, QUIET, Outage

ERROR = LockUnavailable("redis://locks", "refused")


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str]]]:
    caplog.set_level(logging.DEBUG)
    return lambda: [(it.levelname, it.getMessage()) for it in caplog.records if "redis://locks" in it.getMessage()]


BEGINS = ("WARNING", "lock server redis://locks: refused; trying again")


def ends(seconds: float) -> tuple[str, str]:
    return "INFO", f"redis://locks answers again, after an outage of {seconds:.1f} s"


def test_it_is_reported_when_it_begins_and_when_it_ends(
    wait: Callable[[float], None], lines: Callable[[], list[tuple[str, str]]]
) -> None:
    outage = Outage("redis://locks")
    outage.answered()
    for _ in range(10):
        outage.failed(ERROR)
        wait(QUIET / 2)
        outage.answered()  # By another server of a cluster.
    assert lines() == [BEGINS]
    wait(QUIET)
    outage.answered()
    outage.answered()
    assert lines() == [BEGINS, ends(6 * QUIET)]
    outage.failed(ERROR)
    assert lines()[2:] == [BEGINS]


def test_new_nodes_are_no_outage(lines: Callable[[], list[tuple[str, str]]]) -> None:
    """The store has said when they vote."""
    outage = Outage("redis://locks")
    outage.failed(NewNodes("redis://locks", "no vote yet"), grants=False)
    outage.answered(grants=True)
    assert lines() == []


def test_server_that_grants_no_locks_does_not_answer(
    wait: Callable[[float], None], lines: Callable[[], list[tuple[str, str]]]
) -> None:
    outage = Outage("redis://locks")
    outage.failed(ERROR, grants=False)
    outage.failed(ERROR)
    wait(QUIET)
    outage.answered()
    assert lines() == [BEGINS]
    outage.failed(ERROR)
    outage.answered(grants=True)  # It counts, although it is too early.
    wait(QUIET)
    outage.answered()
    assert lines() == [BEGINS, ends(2 * QUIET)]


def test_who_need_not_ask_asks_again_after_a_while(wait: Callable[[float], None]) -> None:
    """Nobody else may ever ask."""
    outage = Outage("redis://locks")
    assert not outage.is_silent
    outage.failed(ERROR)
    assert outage.is_silent
    wait(MUTE)
    assert not outage.is_silent
