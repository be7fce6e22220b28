"""A promise breaks without its assumptions, and not with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("greenlet")
pytest.importorskip("lupa")

from tests.simulation.beyond import ASSUMPTIONS, BY_NAME, draw_without

_ROOT = Path(__file__).resolve().parents[2]


def edges(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation.edges", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)


def test_names_of_assumptions_are_unique() -> None:
    assert len(BY_NAME) == len(ASSUMPTIONS)


def test_a_plan_without_an_assumption_is_the_same_each_time() -> None:
    assert all(draw_without(it, seed) == draw_without(it, seed) for it in ASSUMPTIONS for seed in range(5))


@pytest.mark.slow
def test_two_bodies_run_where_the_server_forgets_or_the_records_expire() -> None:
    done = edges("no flush", "records outlive copies", "--seeds", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs beside" in done.stdout
    assert "runs again after its success" in done.stdout


@pytest.mark.slow
def test_each_assumption_is_needed() -> None:
    done = edges("--seeds", "600")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_nothing_is_found_where_all_assumptions_hold() -> None:
    done = edges("--kept", "--seeds", "30")
    assert done.returncode == 0, done.stdout + done.stderr
