"""The verdict of `make compose-demo` on a record of examples/containers."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from examples.containers.__main__ import Kill, judge
from examples.containers.record import Run, overlaps

KILLS = (Kill("beat-one", 1.0, 2.0), Kill("worker-one", 2.0, 3.0))

SENT = {"1.0", "2.0", "3.0"}


def tick(due: float, outcome: str = "done") -> Run:
    iso = datetime.fromtimestamp(due, timezone.utc).isoformat()
    return Run("tick", str(due), "celery@one", 1, iso, (0,), due, due, outcome)


def report(*places: int) -> Run:
    return Run("report", "", "celery@two", 1, "", places, 0.0, 0.0, "done")


GOOD = [*(tick(due) for due in (1.0, 2.0, 3.0)), report(1, 2), report(3, 4)]


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        pytest.param(GOOD, True, id="all went well"),
        pytest.param([*GOOD, tick(2.0)], False, id="a tick ran twice"),
        pytest.param([tick(2.0, "open"), *GOOD], True, id="a tick was killed and ran again"),
        pytest.param(GOOD[1:], False, id="a tick was lost"),
        pytest.param([tick(1.0, "open"), *GOOD[1:]], False, id="a tick was killed and lost"),
        pytest.param([*GOOD, report(5, 7), report(6, 8)], False, id="two reports at the same time"),
        pytest.param(GOOD[:3], False, id="one worker did it all"),
    ],
)
def test_verdict_of_a_demo(runs: list[Run], verdict: bool) -> None:
    assert judge(runs, SENT, KILLS) is verdict


def test_output_after_the_start_of_another_run_is_an_overlap() -> None:
    first, second, third = report(1, 2, 5), report(3, 4), report(6)
    assert overlaps([third, second, first]) == [(first, second)]


def test_demo_without_messages_fails() -> None:
    assert not judge(GOOD, set(), KILLS)
