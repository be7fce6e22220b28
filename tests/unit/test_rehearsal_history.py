"""The faults in a rehearsal's history, of which it must not miss any."""

from __future__ import annotations

from pathlib import Path

from celery_singleton_lock.rehearsal.history import DONE, Line, Run, append, fences_grow, overlaps, read, runs


def began(run: str, at: float, *, key: str = "k", fence: int = 0) -> Line:
    return Line("began", at, 1, "id", 0, run, key=key, fence=fence)


def ended(run: str, at: float) -> Line:
    return Line("ended", at, 1, "id", 0, run, DONE)


def of(*lines: Line) -> list[Run]:
    return runs(lines)


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    history = tmp_path / "history"
    assert read(history) == []
    lines = [began("a", 1.5, fence=7), ended("a", 2.0)]
    for line in lines:
        append(history, line)
    with history.open("a") as file:
        file.write('["began", 3.0, "half a li')
    assert read(history) == lines


def test_runs_are_ordered_by_their_start() -> None:
    first, second = of(began("b", 2.0), ended("b", 3.0), began("a", 1.0))
    assert second.ended is not None
    assert (first.began.run, first.ended, second.began.run, second.ended.about) == ("a", None, "b", DONE)


class TestOverlaps:
    def test_consecutive_runs_do_not_overlap(self) -> None:
        assert overlaps(of(began("a", 1.0), ended("a", 2.0), began("b", 2.0)), 1, {}) == 0

    def test_run_that_begins_within_another_is_an_overlap(self) -> None:
        assert overlaps(of(began("a", 1.0), began("b", 1.5), ended("b", 1.6), ended("a", 2.0)), 1, {}) == 1

    def test_run_without_an_end_overlaps_all_later_ones(self) -> None:
        assert overlaps(of(began("a", 1.0), began("b", 1000.0)), 1, {}) == 1

    def test_killed_run_ends_at_its_death(self) -> None:
        ran = of(began("a", 1.0), began("b", 2.0))
        assert overlaps(ran, 1, {"a": 1.5}) == 0
        assert overlaps(ran, 1, {"a": 2.5}) == 1

    def test_limit_allows_several_runs_at_once(self) -> None:
        ran = of(began("a", 1.0), began("b", 1.1), began("c", 1.2), ended("a", 1.15))
        assert overlaps(ran, 2, {}) == 0
        assert overlaps(ran, 1, {}) == 2


class TestFences:
    def test_growing_fences_are_accepted(self) -> None:
        assert fences_grow(of(began("a", 1.0, fence=1), began("b", 2.0, fence=2)))

    def test_repeated_or_falling_fences_are_found(self) -> None:
        assert not fences_grow(of(began("a", 1.0, fence=2), began("b", 2.0, fence=2)))
        assert not fences_grow(of(began("a", 1.0, fence=2), began("b", 2.0, fence=1)))

    def test_fences_of_each_lock_are_compared_separately(self) -> None:
        assert fences_grow(of(began("a", 1.0, fence=2), began("b", 2.0, key="other", fence=1)))
