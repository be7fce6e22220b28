"""The faults in a rehearsal's history, of which it must not miss any."""

from __future__ import annotations

from pathlib import Path

from celery_singleton_lock.rehearsal.witness import HISTORY, Line, overlaps, read, write

ENDED = Line("ended", 1.0, 1)


def began() -> Line:
    return Line("began", 1.0, 1)


def test_complete_lines_are_read_in_the_order_in_which_they_happened(tmp_path: Path) -> None:
    write(tmp_path, "began", task_id="a", key="k")
    with (tmp_path / HISTORY).open("a") as file:
        file.write('["ready", 0.5, 1]\n["began", 3.0, "half a li')
    first, second = read(tmp_path)
    assert first == Line("ready", 0.5, 1)
    assert (second.what, second.task_id, second.key) == ("began", "a", "k")


class TestOverlaps:
    def test_consecutive_runs_do_not_overlap(self) -> None:
        assert overlaps([began(), ENDED, began()]) == 0

    def test_run_that_begins_within_another_is_an_overlap(self) -> None:
        assert overlaps([began(), began(), ENDED, ENDED]) == 1

    def test_run_without_an_end_overlaps_all_later_ones(self) -> None:
        assert overlaps([began(), began(), ENDED, began()]) == 2

    def test_killed_run_ends_at_its_death(self) -> None:
        killed = Line("killed", 1.0, 1)
        assert overlaps([began(), killed, began()]) == 0
        assert overlaps([began(), began(), killed]) == 1
