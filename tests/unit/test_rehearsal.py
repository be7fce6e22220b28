"""The faults in a rehearsal's history, of which it must not miss any."""

from __future__ import annotations

from pathlib import Path

from celery_singleton_lock.rehearsal.witness import HISTORY, Line, fences_grow, overlaps, read, write


def began(run: str, *, key: str = "k", fence: int = 0) -> Line:
    return Line("began", 1.0, 1, run=run, key=key, fence=fence)


def ended(run: str) -> Line:
    return Line("ended", 1.0, 1, run=run)


def test_complete_lines_are_read_in_the_order_in_which_they_happened(tmp_path: Path) -> None:
    write(tmp_path, "began", run="a", fence=7)
    with (tmp_path / HISTORY).open("a") as file:
        file.write('["ready", 0.5, 1]\n["began", 3.0, "half a li')
    first, second = read(tmp_path)
    assert first == Line("ready", 0.5, 1)
    assert (second.what, second.run, second.fence) == ("began", "a", 7)


class TestOverlaps:
    def test_consecutive_runs_do_not_overlap(self) -> None:
        assert overlaps([began("a"), ended("a"), began("b")], 1) == 0

    def test_run_that_begins_within_another_is_an_overlap(self) -> None:
        assert overlaps([began("a"), began("b"), ended("b"), ended("a")], 1) == 1

    def test_run_without_an_end_overlaps_all_later_ones(self) -> None:
        assert overlaps([began("a"), began("b"), ended("b"), began("c")], 1) == 2

    def test_killed_run_ends_at_its_death(self) -> None:
        killed = Line("killed", 1.0, 1, run="a")
        assert overlaps([began("a"), killed, began("b")], 1) == 0
        assert overlaps([began("a"), began("b"), killed], 1) == 1

    def test_limit_allows_several_runs_at_once(self) -> None:
        lines = [began("a"), began("b"), ended("a"), began("c")]
        assert overlaps(lines, 2) == 0
        assert overlaps(lines, 1) == 2


class TestFences:
    def test_growing_fences_are_accepted(self) -> None:
        assert fences_grow([began("a", fence=1), began("b", fence=2)])

    def test_repeated_or_falling_fences_are_found(self) -> None:
        assert not fences_grow([began("a", fence=2), began("b", fence=2)])
        assert not fences_grow([began("a", fence=2), began("b", fence=1)])

    def test_fences_of_each_lock_are_compared_separately(self) -> None:
        assert fences_grow([began("a", fence=2), began("b", key="other", fence=1)])
