"""Three beats in a minute in which everything happens to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm.beats import EVENTS, SCHEDULE, TTL, weather


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_tick_runs_once_whatever_happens(tmp_path: Path) -> None:
    def command(name: str) -> tuple[str, ...]:
        return "beat", "-S", "exclusive", "-s", str(tmp_path / f"{name}.schedule")

    outcome = weather(tmp_path, command, 3)
    print(outcome.windows)
    assert [event for event, _, _ in outcome.windows] == list(EVENTS)
    assert outcome.died == 0
    ids = [run.task_id for run in outcome.runs]
    assert len(ids) == len(set(ids)), "a tick ran twice"
    for entry in SCHEDULE:
        print(entry, len(outcome.of(entry)), "runs; missing", outcome.missing(entry), outcome.gaps(entry))
        assert outcome.twice(entry) == 0
        assert outcome.unexplained(entry) == []
        assert all(later - earlier < TTL + 7 for earlier, later in outcome.gaps(entry) if entry != "cron")
