"""The simulator does the same for the same seed, finds what is wrong, and keeps what it has found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation import campaign, counts, found, table
from tests.simulation.figures import Figures, Outcome, kind_of
from tests.simulation.plan import draw

pytest.importorskip("lupa")
pytest.importorskip("greenlet")


def scene(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.scene", *arguments],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_seed_has_the_same_trace_in_every_process_and_after_other_seeds() -> None:
    first = scene("traces", "7", "8", "9", "21")
    second = scene("traces", "21", "9", "7", "8")
    assert first == second
    assert len(set(first.values())) == 4


@pytest.mark.slow
def test_a_finished_simulation_leaves_nothing_in_memory() -> None:
    """Except for objects in copies of the package that no later simulation has used yet."""
    before, after = scene("left", *map(str, range(8)))
    assert after <= before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(
            "stores/redis/scripts/lock/free.lua",
            "hold_of(lock, owner)",
            "hold_of(lock, '')",
            id="freed without a look at the owner",
        ),
        pytest.param(
            "trust.py",
            "return sent_at + ttl -",
            "return sent_at + 2 * ttl -",
            id="trusted for two ttls",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_is_found_and_its_plan_is_shrunk(file: str, old: str, new: str) -> None:
    seen = scene("mutant", file, old, new, "200")
    assert seen["seed"] is not None
    assert seen["after"] < seen["before"]
    assert kind_of(seen["same"]) == kind_of(seen["failure"])


@pytest.mark.parametrize("orders", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_failures_that_were_once_found_stay_fixed(orders: int) -> None:
    """In as many orders of events."""
    assert list(found.FOLDER.glob("*.json"))
    assert scene("again", str(orders)) == {}


def test_a_kept_plan_is_read_back_unchanged(tmp_path: Any) -> None:
    for seed in range(50):
        found.write(draw(seed), tmp_path / "plan.json")
        assert found.read(tmp_path / "plan.json") == draw(seed)


def test_a_kept_plan_with_an_unknown_part_is_refused(tmp_path: Any) -> None:
    (tmp_path / "plan.json").write_text('{"seed": 1, "moons": 2}')
    with pytest.raises(ValueError, match=r"plan\.json: a plan has no moons"):
        found.read(tmp_path / "plan.json")


@pytest.mark.slow
def test_seeds_are_distributed_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    seen: list[Outcome] = []
    figures = campaign.carry_out(range(6), jobs=2, on_outcome=seen.append)
    assert {outcome.seed for outcome in seen} == set(range(6))
    assert (figures.seeds, figures.failed) == (6, 0)
    assert figures.numbers["messages"] == sum(len(draw(seed).messages) for seed in range(6))
    assert 0 < figures.faults.total() <= sum(len(draw(seed).faults) for seed in range(6))
    assert figures.counts.seeds["shapes"].total() == 6
    assert figures.numbers["seconds"] > 0 < figures.numbers["bodies"]


@pytest.mark.parametrize(("simulation", "failure"), [("_crash", "crashes: exit code 3"), ("_hang", "hangs")])
def test_a_crash_or_a_hang_fails_with_its_seed(simulation: str, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "_simulate", globals()[simulation])
    seen: list[Outcome] = []
    figures = campaign.carry_out(range(3), jobs=1, on_outcome=seen.append)
    assert [outcome.seed for outcome in seen] == [0, 1, 2]
    assert [outcome.seed for outcome in seen if outcome.failure is not None and failure in outcome.failure] == [1]
    assert figures.failed == 1


def _crash(pipe: Any, nodes: int | None) -> None:
    _simulate(pipe, nodes, lambda: os._exit(3))


def _hang(pipe: Any, nodes: int | None) -> None:
    campaign.HANGS = 0.5
    _simulate(pipe, nodes, lambda: time.sleep(600))


def _simulate(pipe: Any, nodes: int | None, fails: Callable[[], None]) -> None:
    """Simulate as in a campaign, in the process that was made for it; seed 1 fails."""
    from tests.simulation import simulate

    result = simulate.Result(draw(0), None, (), 0.0, 0, 0, {})
    simulate.prepare = lambda: None  # type: ignore[assignment,misc]
    simulate.simulate = lambda plan: fails() if plan.seed == 1 else result  # type: ignore[assignment,misc,func-returns-value]
    campaign._simulate(pipe, nodes)


def test_failures_are_counted_by_kind() -> None:
    figures = Figures(minutes=1)
    figures.add(Outcome(4, "shop.late:a: message 3 runs beside [1, 2]", counts={"faults": {"cut": 2}}))
    figures.add(Outcome(2, "shop.again:b: message 12 runs beside [4]", counts={"faults": {"slow": 1, "cut back": 0}}))
    figures.add(Outcome(3, None))
    assert dict(figures.failures) == {"shop: message # runs beside […]": [4, 2]}
    assert "FAILED 2×: shop: message # runs beside […]\n    seeds 2, 4" in figures.text()
    assert f"{2:>14} {1:>8}  cut" in figures.text()
    assert f"{'never':>14} {0:>8}  cut back" in figures.text()


def test_a_campaign_misses_what_never_was_and_what_has_fallen_by_half(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "FILE", tmp_path / "counts.json")
    monkeypatch.setattr(counts, "known", lambda: {"rules": {"steady", "falls", "rare", "blind"}})
    before, now = counts.Counts(), counts.Counts()
    for seed in range(300):
        before.add({"rules": {"steady": 2, "falls": 4, "rare": seed < 9}})
        now.add({"rules": {"steady": 2, "falls": 2, "rare": seed < 1}})
    before.keep(10_000)
    assert [*now.missed(9_999)] == []
    assert [*now.missed(10_000)] == ["rules: never: blind", "rules: fell from 1,200 to 600: falls"]


def test_rules_are_known_by_what_they_say() -> None:
    rules = counts.known()["rules"]
    assert "{}: message {} runs beside itself" in rules
    assert "for {:.1f} s: {} is free, and its waiter was not woken" in rules


def test_a_table_has_a_column_for_each_process() -> None:
    trace = [
        (0.0, "redis0", "starts", "empty"),
        (0.5, "w0/main", "starts", ""),
        (1.0, "w0/main", "sends", "m1"),
        (1.5, "w1/pool", "body begins", "shop.late:a message=1 attempt=0"),
        (2.0, "nemesis", "FAULT", "cut #1"),
        (2.5, "w1/pool", "body ends well", "shop.late:a"),
    ]
    assert list(table.of_trace(trace, width=70)) == [
        "          w0                            w1",
        "   0.5000 starts",
        "   1.0000 sends m1",
        "   1.5000                               body begins shop.late:a",
        "                                        message=1 attempt=0",
        "   2.0000 ── nemesis: FAULT cut #1 ".ljust(70, "─"),
        "   2.5000                               body ends well shop.late:a",
    ]


def test_too_many_processes_make_a_list() -> None:
    trace = [(float(number), f"w{number % 9}/main", "waits", "") for number in range(18)]
    assert list(table.of_trace(trace, width=150))[9] == "   9.0000 w0/main        waits"
