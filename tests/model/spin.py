"""Spin: checks a model, and shows the path to an error."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent

#: Megabytes of memory that a check may use.
MEMORY = 6000

#: Lines that Spin prints, and not the model.
_NOISE = ("spin:", "ltl ", "#processes", "Never claim")


class NotChecked(Exception):
    """Spin did not finish."""


@dataclass(frozen=True)
class Check:
    """A model and what to check of it.

    Attributes:
        model: the file's name.
        about: what is checked, or what a broken variant leaves out.
        switches: macros of the model.
        liveness: whether to check its `ltl`, under weak fairness, instead of assertions and end states.
        broken: whether Spin must find an error.
        shortest: whether to look for the shortest path to it first, which takes more memory.
        depth: the maximum number of steps of a path.
        long: whether it takes minutes or gigabytes, so that only `make model` runs it.
    """

    model: str
    about: str
    switches: tuple[str, ...] = ()
    liveness: bool = False
    broken: bool = False
    shortest: bool = True
    depth: int = 1_000_000
    long: bool = False

    @property
    def name(self) -> str:
        return "-".join([self.model, "liveness" if self.liveness else "safety", *self.switches])


@dataclass
class Found:
    """What Spin found: the number of states, and the path to an error if there is one."""

    states: int
    seconds: float
    megabytes: float
    errors: int
    trace: list[str] = field(default_factory=list)


def is_here() -> bool:
    return shutil.which("spin") is not None and shutil.which("gcc") is not None


def run(check: Check) -> Found:
    """Check the model.

    Raises:
        NotChecked: the check takes too much memory, or too many steps.
    """
    with tempfile.TemporaryDirectory(prefix="spin-") as place:
        return _run(check, Path(place))


def _run(check: Check, place: Path) -> Found:
    model = f"{check.model}.pml"
    shutil.copy(HERE / model, place)
    switches = [f"-D{switch}" for switch in check.switches]
    _call(place, "spin", *switches, "-a", model)
    mode = ["-DNFAIR=3", "-DCOLLAPSE"] if check.liveness else ["-DSAFETY", "-DNOCLAIM"]
    if check.broken and check.shortest and not check.liveness:
        mode.append("-DBFS")
    built = _run_in(place, "gcc", "-w", "-O2", f"-DMEMLIM={MEMORY}", *mode, "-o", "pan", "pan.c")
    if built.returncode:
        raise NotChecked(f"it could not be built: {built.stderr[-1000:]}")
    began = time.monotonic()
    said = _call(place, "./pan", *(["-a", "-f"] if check.liveness else []), f"-m{check.depth}")
    errors = int(_number(r"errors: (\d+)", said))
    if not errors and ("max search depth too small" in said or "Search not completed" in said):
        raise NotChecked(said[-2000:])
    found = Found(
        states=int(_number(r"(\d+) states, stored", said)),
        seconds=time.monotonic() - began,
        megabytes=_number(r"([\d.]+)\s+total actual memory usage", said),
        errors=errors,
    )
    if errors:
        shown = _call(place, "spin", *switches, "-t", "-T", "-B", model)
        found.trace = [line for line in shown.splitlines() if line.strip() and not line.strip().startswith(_NOISE)]
    return found


def _call(place: Path, *command: str) -> str:
    return _run_in(place, *command).stdout


def _run_in(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def _number(pattern: str, said: str) -> float:
    if (found := re.search(pattern, said)) is None:
        raise NotChecked(said[-2000:])
    return float(found.group(1))
