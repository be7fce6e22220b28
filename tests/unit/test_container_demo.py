"""What examples/containers makes of a record: the verdict of `make compose-demo`."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from examples.containers.__main__ import Kill, judge
from examples.containers.record import Run, overlaps

#: Nothing was killed while the ticks below were due.
BEAT, WORKER = Kill("beat-one", 100.0, 103.0), Kill("worker-one", 200.0, 203.0)


def tick(due: float, worker: str = "celery@one") -> Run:
    return Run("tick", "", worker, 1, datetime.fromtimestamp(due, timezone.utc).isoformat(), (0,), due, due, "done")


def report(*places: int) -> Run:
    return Run("report", "", "celery@two", 1, "", places, 0.0, 0.0, "done")


GOOD = [*(tick(due) for due in (1.0, 2.0, 3.0)), report(1, 2), report(3, 4)]


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        pytest.param([], True, id="all went well"),
        pytest.param([tick(2.0)], False, id="a tick ran twice"),
        pytest.param([tick(6.0)], False, id="some ticks are missing"),
        pytest.param([tick(due) for due in (*range(4, 101), *range(104, 107))], True, id="missing while no beat led"),
        pytest.param([report(5, 7), report(6, 8)], False, id="two reports at the same time"),
    ],
)
def test_verdict(more: list[Run], verdict: bool) -> None:
    assert judge([*GOOD, *more], BEAT, WORKER) is verdict


def test_verdict_asks_for_two_workers() -> None:
    assert not judge([tick(1.0), tick(2.0)], BEAT, WORKER)


def test_what_a_run_left_after_the_start_of_another_is_an_overlap() -> None:
    first, second, third = report(1, 2, 5), report(3, 4), report(6)
    assert overlaps([third, second, first]) == [(first, second)]
