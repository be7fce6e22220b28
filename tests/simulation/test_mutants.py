"""The simulator finds faults that are put into the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("greenlet")
lua51 = pytest.importorskip("lupa.lua51")

from tests.simulation.mutants import MUTANTS, SEEDS  # noqa: E402
from tests.simulation.mutants.mutant import Mutant  # noqa: E402

_ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_still_be_made(mutant: Mutant) -> None:
    changed = mutant.edit(mutant.path, (_ROOT / mutant.path).read_text())
    if mutant.file.endswith(".lua"):
        lua51.LuaRuntime().compile(changed)
    else:
        compile(changed, mutant.path, "exec")


def test_each_mutant_breaks_a_promise_of_its_own_and_was_found() -> None:
    assert sorted(json.loads(SEEDS.read_text())) == sorted(mutant.name for mutant in MUTANTS)
