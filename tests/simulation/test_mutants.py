"""The simulator finds faults that are put into the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("greenlet")
lua51 = pytest.importorskip("lupa.lua51")

from tests.simulation.mutants import MUTANTS  # noqa: E402
from tests.simulation.mutants.mutant import Mutant  # noqa: E402

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_still_be_made(mutant: Mutant) -> None:
    changed = mutant.edit(mutant.path, (_ROOT / mutant.path).read_text())
    if mutant.file.endswith(".lua"):
        lua51.LuaRuntime().compile(changed)
    else:
        compile(changed, mutant.path, "exec")


def test_names_of_mutants_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
def test_mutants_are_found() -> None:
    """A mutant of a script, one of a worker's main process, and one that shows only at the end."""
    names = ["free deletes nothing", "the main process frees for the living", "a fence without end"]
    found = subprocess.run(
        [sys.executable, "-m", "tests.simulation.mutants", *names, "--seeds", "40", "--jobs", "1"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 of 3 are found." in found.stdout
