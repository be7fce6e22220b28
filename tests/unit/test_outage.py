"""What is logged while a lock server does not answer: little, but all that an operator needs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import pytest

from celery_singleton_lock import LockUnavailable
from celery_singleton_lock.outage import QUIET, Outage

SERVER = "redis://locks:6379"
SILENT = LockUnavailable(SERVER, "ConnectionError: refused")


class Lease(NamedTuple):
    """A lease that ends unless the server answers."""

    name: str
    give_up_at: float

    def in_words(self) -> str:
        return f"task shop.{self.name}[id] (tenant_id=7), p:1:{{{self.name}}}"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests set."""
    times = [1000.0]
    monkeypatch.setattr("celery_singleton_lock.clock.now", lambda: times[0])
    return times


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged since the last call."""
    caplog.set_level(logging.DEBUG)

    def since() -> list[str]:
        found = [f"{it.levelname} {it.getMessage()}" for it in caplog.records if it.name.endswith("outage")]
        caplog.clear()
        return found

    return since


def test_outage_is_reported_at_its_start_at_half_time_and_at_its_end(
    now: list[float], said: Callable[[], list[str]]
) -> None:
    outage = Outage(lambda: [Lease("export", 1020.0), Lease("bill", 1010.0)])
    outage.failed(SILENT)
    assert said() == [
        f"WARNING lock server {SERVER}: ConnectionError: refused; trying again; 2 leases are given up unless "
        "they are renewed, the first in 10.0 s: task shop.bill[id] (tenant_id=7), p:1:{bill}"
    ]
    for now[0] in (1000.5, 1001.0, 1002.0):
        outage.failed(SILENT)
    assert said() == []
    for now[0] in (1005.0, 1007.0, 1008.0):
        outage.failed(SILENT)
    (half,) = said()
    assert (
        "for 5.0 s now; trying again; 2 leases are given up unless they are renewed, the first in 5.0 s: task" in half
    )
    now[0] += QUIET
    outage.answered(SERVER)
    assert said() == [f"WARNING {SERVER} answers again, after an outage of 9.0 s"]
    outage.answered(SERVER)
    assert said() == []


def test_only_lease_is_named(now: list[float], said: Callable[[], list[str]]) -> None:
    Outage(lambda: [Lease("bill", 1010.0)]).failed(SILENT)
    (began,) = said()
    assert "; 1 lease is given up in 10.0 s unless it is renewed: task shop.bill[id] (tenant_id=7), p:1:{bill}" in began


def test_half_time_is_that_of_a_lease_that_was_taken_meanwhile(now: list[float], said: Callable[[], list[str]]) -> None:
    """In a cluster, some servers still grant locks."""
    leases: list[Lease] = []
    outage = Outage(lambda: leases)
    outage.failed(SILENT)
    leases.append(Lease("bill", 1010.0))
    outage.failed(SILENT)
    now[0] = 1005.0
    outage.failed(SILENT)
    began, half = said()
    assert "lease" not in began
    assert "for 5.0 s now" in half


def test_outage_goes_on_despite_answers_between_failures(now: list[float], said: Callable[[], list[str]]) -> None:
    """In a cluster, some servers answer."""
    outage = Outage()
    for _ in range(10):
        outage.failed(SILENT)
        outage.answered(SERVER)
        now[0] += QUIET / 2
    assert said() == [f"WARNING lock server {SERVER}: ConnectionError: refused; trying again"]


def test_outage_lasts_until_the_first_answer(now: list[float], said: Callable[[], list[str]]) -> None:
    """Neither until the last failure, nor until the answer that shows that it is over."""
    outage = Outage()
    outage.failed(SILENT)
    for now[0] in (1034.0, 1034.5):
        outage.failed(SILENT)
        outage.answered(SERVER)
    assert len(said()) == 1
    now[0] = 1050.0
    outage.answered(SERVER)
    assert said() == [f"WARNING {SERVER} answers again, after an outage of 34.5 s"]


def test_next_outage_is_reported_again(now: list[float], said: Callable[[], list[str]]) -> None:
    outage = Outage(lambda: [Lease("export", 1010.0)])
    for _ in range(2):
        outage.failed(SILENT)
        now[0] += 60.0
        outage.answered(SERVER)
    assert len(said()) == 4


def test_nothing_is_reported_without_a_failure(now: list[float], said: Callable[[], list[str]]) -> None:
    Outage().answered(SERVER)
    assert said() == []


@pytest.mark.parametrize(
    ("level", "begins", "ends"), [(logging.DEBUG, "DEBUG", "DEBUG"), (logging.ERROR, "ERROR", "WARNING")]
)
def test_end_is_at_most_a_warning(
    now: list[float], said: Callable[[], list[str]], level: int, begins: str, ends: str
) -> None:
    outage = Outage(begins="nothing is sent: %s%s", level=level)
    outage.failed(SILENT)
    now[0] += QUIET
    outage.answered(SERVER)
    began, ended = said()
    assert began == f"{begins} nothing is sent: lock server {SERVER}: ConnectionError: refused"
    assert ended.startswith(f"{ends} {SERVER} answers again")


class Shared(Outage):
    """Another thread begins an outage whenever this one has looked at the half time."""

    half_time: float | None = None

    @property
    def _half_time(self) -> float | None:
        found, self.half_time = self.half_time, None
        return found

    @_half_time.setter
    def _half_time(self, value: float | None) -> None:
        self.half_time = value


def test_threads_may_note_failures_at_once(now: list[float]) -> None:
    outage = Shared(lambda: [Lease("sync", now[0] + 10)])
    outage.failed(SILENT)
    now[0] += 6
    outage.failed(SILENT)
    assert outage.is_under_way
