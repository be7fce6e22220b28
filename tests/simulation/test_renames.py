"""The simulator misses each name of the package's inside that it knows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("greenlet")
pytest.importorskip("lupa.lua51")

from tests.simulation import renames
from tests.simulation.test_simulator import scene


@pytest.mark.slow
def test_renames_are_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One of an attribute, one of a part of keys, and those of a list in a header."""
    monkeypatch.setattr(sys, "argv", ["renames", "waits", "_all_opened", "done"])
    assert renames.main() == 0, capsys.readouterr().out
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_no_rename_is_left_out() -> None:
    names = {rename.name for rename in renames.every()}
    assert {"queue", "joins", "wake", "line", "_channel", "MAX_PAUSE"} <= names


def test_plans_have_each_field_of_a_header_and_each_part_of_a_key() -> None:
    assert scene("not_carried") == []


def test_a_name_that_nobody_misses_is_seen(tmp_path: Path) -> None:
    seed, message = renames.found(renames.Rename("nothing", "no such text anywhere", ""), tmp_path)
    assert (seed, message) == (None, "is not in the package")
