from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

import pytest

from benchmarks import measure, report
from benchmarks.measure import OWN, Result, Rounds, Row, Spread, Table, measured


def test_ratio_is_computed_within_each_round() -> None:
    noise = [1.0, 10.0, 100.0]
    base, twice = cycle(value for value in noise for _ in range(2)), cycle(2 * value for value in noise)
    (found,) = measured("base", 3, {"base": lambda: [next(base)], "twice": lambda: [next(twice)]})
    assert found.ratio("twice") == Spread(2.0, 2.0, 2.0)
    assert found.ratio("base") == Spread(1.0, 1.0, 1.0)


def test_several_figures_of_one_turn_are_compared_separately() -> None:
    base = cycle([(1.0, 50.0), (2.0, 100.0)])
    wall, cpu = measured("base", 1, {"base": lambda: next(base)})
    assert {wall.ratio("base").median, cpu.ratio("base").median} <= {0.5, 2.0}
    wall, cpu = measured("base", 2, {"base": lambda: (1.0, 2.0), "other": lambda: (3.0, 8.0)})
    assert (wall.ratio("other").median, cpu.ratio("other").median) == (3.0, 4.0)
    assert (wall.median("other"), cpu.median("other")) == (3.0, 8.0)


def test_no_round_starts_after_the_time_limit() -> None:
    (found,) = measured("base", 9, {"base": lambda: [1.0], "other": lambda: [2.0]}, until=0.0)
    assert found.figures == {"base": [1.0], "other": [2.0]}


def test_table_shows_columns_and_rates() -> None:
    found = Rounds("base", {"base": [1.0], "other": [3.0], "idle": [0.0]}, again=[2.0])
    assert found.table("A table", lambda name: {"name": name}, unrated=["idle"]) == Table(
        "A table",
        "base",
        [
            Row("base", Spread(0.5, 0.5, 0.5), {"name": "base"}),
            Row("other", Spread(3.0, 3.0, 3.0), {"name": "other"}),
            Row("idle", None, {"name": "idle"}),
        ],
    )


def test_page_shows_rows_with_and_without_a_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    rows = [Row("base", Spread(1.0, 0.9, 1.1)), Row(OWN, Spread(0.5, 0.4, 0.6), {"ms": "3"})]
    table = Table("A table", "base", [*rows, Row("idle", None, {"ms": "1"})])
    path = measure.save(Result("worker", "A title", [table], ["a note"]), quick=True, server_version="7.0")
    assert json.loads(path.read_text())["machine"]["redis server"] == "7.0"
    page = report.write(tmp_path).read_text()
    assert f"| **{OWN}** | **0.50** (0.40 – 0.60) | 3 |" in page
    assert "| idle | – | 1 |" in page
    assert "A quick run" in page


def test_table_without_a_baseline_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    table = Table("A table", "", [Row("one", None, {"ms": "3"})])
    measure.save(Result("beat", "A title", [table], []), quick=False, server_version="7.0")
    assert "|  | ms |\n| --- | --- |\n| one | 3 |" in report.write(tmp_path).read_text()
