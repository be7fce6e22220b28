"""Made-up histories of beats: what is counted, and what is not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tests.storm.ticks import Ticks, count

#: When the storm begins and ends, and when the calm is over.
BEGINS, CALM, OVER = 0.0, 20.0, 40.0

_numbers = itertools.count()


def tick(at: float, *, pid: int = 1, message: str = "", due: float | None = None) -> dict[str, Any]:
    return {"at": at, "event": "tick", "pid": pid, "message": message or f"m{next(_numbers)}", "due": due}


def ticks(*times: float, pid: int = 1) -> list[dict[str, Any]]:
    return [tick(at, pid=pid) for at in times]


def regular(begin: float, end: float, *, pid: int = 1) -> list[dict[str, Any]]:
    """A tick every second, from half a second after the begin."""
    return ticks(*(begin + 0.5 + number for number in range(int(end - begin))), pid=pid)


def fault(
    begin: float, end: float, *, kind: str = "beat: stopped", fate: str = "frozen", pids: Sequence[int] = (1,)
) -> Any:
    return {"at": end, "event": "fault", "kind": kind, "begin": begin, "fate": fate, "pids": list(pids)}


def counted(*lines: Any) -> Ticks:
    flat: list[Any] = [{"at": BEGINS, "event": "begins"}, {"at": CALM, "event": "calm"}, {"at": OVER, "event": "over"}]
    for one in lines:
        flat += one if isinstance(one, list) else [one]
    return count(flat)


def test_regular_ticks() -> None:
    found = counted(regular(0, 40))
    assert (found.seconds, found.arrived, found.at_the_end, found.goes_on) == (20, 20, 10, True)
    assert (found.twice, found.resumed, found.silent, found.longest) == (0, 0, 0, 1)


def test_two_beats_that_send_the_same_ticks() -> None:
    found = counted(regular(0, 40), [tick(line["at"] + 0.1, pid=2) for line in regular(0, 40)])
    assert (found.arrived, found.twice, found.early, found.repeated) == (40, 20, 20, 0)


def test_a_beat_that_takes_over_in_time_sends_nothing_twice() -> None:
    assert counted(regular(0, 10), regular(10, 40, pid=2)).twice == 0


@pytest.mark.parametrize(("later", "twice"), [(0.4, 1), (0.6, 0)])
def test_half_an_interval_makes_a_tick_early(later: float, twice: int) -> None:
    assert counted(ticks(5), ticks(5 + later, pid=2)).twice == twice


@pytest.mark.parametrize(("due", "twice", "late"), [(104.9, 1, 0), (105.0, 0, 1), (None, 1, 0)])
def test_a_late_tick_and_the_next_one_of_a_successor(due: float | None, twice: int, late: int) -> None:
    """They are two if both say so: the first was due a second before, not just a moment."""
    found = counted(tick(5.9, due=104.5), tick(6, pid=2, due=due))
    assert (found.twice, found.late) == (twice, late)


def test_a_late_tick_and_the_next_one_in_time_are_two() -> None:
    """A beat that keeps to its grid catches up."""
    assert counted(ticks(5, 6.8, 7)).twice == 0


@pytest.mark.parametrize("pid", [1, 2])
def test_a_tick_that_is_sent_again_under_its_id(pid: int) -> None:
    found = counted(tick(5, message="m"), tick(11, message="m", pid=pid))
    assert (found.twice, found.early, found.repeated) == (1, 0, 1)


def test_a_tick_that_is_early_and_repeated_counts_once() -> None:
    found = counted(tick(5, message="m"), tick(5.1, message="m", pid=2))
    assert (found.twice, found.early, found.repeated) == (1, 1, 1)


def test_silence_counts_beyond_the_interval() -> None:
    found = counted(regular(0, 5), regular(12, 40))
    assert (found.longest, found.silent) == (8, 7)


def test_a_tick_that_is_a_little_late_is_no_silence() -> None:
    found = counted(ticks(0.5, 1.9, 2.5), regular(3, 40))
    assert (found.longest, found.silent) == (pytest.approx(1.4), 0)


def test_a_storm_without_ticks_is_one_silence() -> None:
    found = counted()
    assert (found.arrived, found.longest, found.silent, found.goes_on) == (0, 20, 19, False)


def test_silence_until_the_end_of_the_storm() -> None:
    assert counted(regular(0, 15), regular(20, 40)).longest == 5.5


def test_what_comes_in_the_calm_is_not_counted_as_of_the_storm() -> None:
    found = counted(regular(0, 40), ticks(25.6, pid=2))
    assert (found.arrived, found.twice) == (20, 0)


def test_a_schedule_that_stops_in_the_calm_does_not_go_on() -> None:
    found = counted(regular(0, 33))
    assert (found.at_the_end, found.goes_on) == (3, False)


@pytest.mark.parametrize("at", [9.9, 10.3])
def test_a_beat_that_sends_as_it_goes_on_though_another_has_taken_over(at: float) -> None:
    """The tick is early, or makes the next one early."""
    found = counted(regular(0, 5), fault(4.8, 9.9), regular(8, 40, pid=2), ticks(at))
    assert (found.twice, found.resumed) == (1, 1)


@pytest.mark.parametrize(
    ("lines", "twice"),
    [
        pytest.param([fault(4.8, 9.9), *ticks(8.9, pid=2), *ticks(10.0)], 0, id="in time"),
        pytest.param([fault(4.8, 9.9), *ticks(11.2, pid=2), *ticks(11.5)], 1, id="it went on long before"),
        pytest.param([fault(4.8, 9.9, pids=[3]), *ticks(9.8, pid=2), *ticks(10.0)], 1, id="another was frozen"),
        pytest.param([fault(4.8, 9.9, fate="killed"), *ticks(9.8, pid=2), *ticks(10.0)], 1, id="not frozen"),
    ],
)
def test_ticks_that_have_nothing_to_do_with_a_freeze(lines: list[Any], twice: int) -> None:
    found = counted(lines)
    assert (found.twice, found.resumed) == (twice, 0)


def test_beats_that_ended_by_themselves_are_not_faults() -> None:
    found = counted(fault(1, 2), fault(3, 4, kind="beat: ended by itself", fate="killed"))
    assert (found.faults, found.ended) == (1, 1)
