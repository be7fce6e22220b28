from __future__ import annotations

from pathlib import Path

import pytest

from tests import recording
from tests.recording import Record, Run, overlaps


def a_run(start: float, end: float, job: str = "job") -> Run:
    return Run(job, f"{start}", 1, start, end, "done")


def test_consecutive_runs_do_not_overlap() -> None:
    assert overlaps([a_run(0, 1), a_run(1, 2), a_run(2.5, 3)]) == []


def test_overlap_is_found() -> None:
    first, second = a_run(0, 2), a_run(1, 3)
    assert overlaps([second, first]) == [(first, second)]


def test_run_within_a_long_one_is_found() -> None:
    assert len(overlaps([a_run(0, 10), a_run(1, 2), a_run(3, 4)])) == 2


def test_run_that_never_ended_overlaps_all_later_ones() -> None:
    assert len(overlaps([a_run(0, float("inf")), a_run(100, 101)])) == 1


def test_different_jobs_may_run_at_once() -> None:
    assert overlaps([a_run(0, 2, "a"), a_run(1, 3, "b")]) == []


def test_recorded_runs_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recording.VARIABLE, str(tmp_path / "record"))
    record = Record(tmp_path / "record")
    for _ in range(2):
        with recording.run("job", "same-id", fence=3):
            pass
    with pytest.raises(KeyError), recording.run("job", "other-id"):
        raise KeyError
    recording.write(event="start", job="job", task_id="killed", fence=0)
    runs = record.wait_for(starts=4, ends=3)
    assert [run.outcome for run in runs] == ["done", "done", "raised", "open"]
    assert overlaps(runs[:3]) == []
    assert record.runs(killed_at=1e12)[-1].end == 1e12
