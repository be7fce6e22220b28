"""What is logged while a lock server does not answer: little, but all that an operator needs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from celery_singleton_lock import LockUnavailable
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.outage import QUIET, Outage

SILENT = LockUnavailable("redis://locks:6379", "ConnectionError: refused")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests set."""
    times = [1000.0]
    monkeypatch.setattr("celery_singleton_lock.clock.now", lambda: times[0])
    return times


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged since the last call."""
    caplog.set_level(logging.WARNING)

    def since() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name.endswith("outage")]
        caplog.clear()
        return found

    return since


def lease(name: str, now: list[float], ttl: float) -> Lease:
    return Lease(f"p:1:{{{name}}}", new_owner(), ttl=ttl, fence=1, sent_at=now[0])


def test_outage_is_reported_at_its_start_at_half_time_and_at_its_end(
    now: list[float], said: Callable[[], list[str]]
) -> None:
    outage, leases = Outage(), [lease("export", now, 20.0), lease("bill", now, 10.0)]
    outage.failed(SILENT, leases)
    (began,) = said()
    assert began.startswith("no lock from redis://locks:6379: ConnectionError: refused; trying again; 2 leases are not")
    assert "p:1:{bill} is given up in " in began, "the first lease to end"
    for now[0] in (1000.5, 1001.0, 1002.0):
        outage.failed(SILENT, leases)
    assert said() == []
    for now[0] in (1005.0, 1007.0, 1008.0):
        outage.failed(SILENT, leases)
    (half,) = said()
    assert "for 5.0 s now; trying again; 2 leases are not renewed" in half
    now[0] += QUIET
    outage.answered("redis://locks:6379")
    assert said() == ["redis://locks:6379 answers again, after an outage of 8.0 s"]
    outage.answered("redis://locks:6379")
    assert said() == []


def test_outage_goes_on_despite_answers_between_failures(now: list[float], said: Callable[[], list[str]]) -> None:
    """In a cluster, some servers answer."""
    outage = Outage()
    for _ in range(10):
        outage.failed(SILENT)
        outage.answered("redis://locks:6379")
        now[0] += QUIET / 2
    assert said() == ["no lock from redis://locks:6379: ConnectionError: refused; trying again"]


def test_next_outage_is_reported_again(now: list[float], said: Callable[[], list[str]]) -> None:
    outage = Outage()
    for _ in range(2):
        outage.failed(SILENT, [lease("export", now, 10.0)])
        now[0] += 60.0
        outage.answered("redis://locks:6379")
    assert len(said()) == 4


def test_nothing_is_reported_without_a_failure(now: list[float], said: Callable[[], list[str]]) -> None:
    Outage().answered("redis://locks:6379")
    assert said() == []
