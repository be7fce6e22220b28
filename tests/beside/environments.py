"""The environments that have other people's packages: one for each dependency group, made by `make .venv/.beside`."""

from __future__ import annotations

from pathlib import Path

from tests.programs import ROOT


def python_of(group: str) -> str:
    """The interpreter of a group's environment."""
    python: Path = ROOT / ".venv" / group / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"there is no environment with the packages of the group {group}: make .venv/.beside")
    return str(python)
