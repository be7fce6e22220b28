"""A forked program behaves as if it had been started by itself, see `tests/programs.py`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from tests.integration.conftest import is_alive, until
from tests.patience import LIMIT

PROGRAM = """
import atexit, json, os, sys, threading, time
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
about = [__name__, sys.argv[1:], os.getcwd(), os.environ["GIVEN"], os.getpid() == os.getpgrp() == os.getsid(0)]
print(json.dumps([*about, sys.stdin.read()]), flush=True)
print("trouble", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""

SLEEPER = """
import os, time
print(os.fork(), flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["forked", "fresh"])
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    if request.param == "fresh":
        monkeypatch.setattr(programs, "_must_be_fresh", lambda *_: True)
    return {"GIVEN": "to it"}


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], str]:
    """Make a program; returns the name of its module."""

    def make(text: str) -> str:
        (tmp_path / "program_of_a_test.py").write_text(text)
        return "program_of_a_test"

    return make


def test_it_gets_what_it_is_given_and_ends_as_a_program_does(
    environment: dict[str, str], made: Callable[[str], str], tmp_path: Path
) -> None:
    ran = programs.run(made(PROGRAM), ["3", "ü"], environment=environment, given="input", directory=tmp_path)
    assert ran.stdout == f'["__main__", ["3", "\\u00fc"], "{tmp_path}", "to it", true, "input"]\na thread\nat the end\n'
    assert (ran.stderr, ran.returncode) == ("trouble\n", 3)
    assert "GIVEN" not in os.environ


def test_it_ends_with_an_error(environment: dict[str, str], made: Callable[[str], str], tmp_path: Path) -> None:
    ran = programs.run(made("1 / 0"), [], environment=environment, directory=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_can_be_killed_with_its_children(
    environment: dict[str, str], made: Callable[[str], str], tmp_path: Path, number: int
) -> None:
    output = tmp_path / "output"
    process = programs.start(made(SLEEPER), [], environment=environment, output=output, directory=tmp_path)
    until(lambda: output.exists() and output.read_text().count("\n") == 2)
    (child,) = (int(line) for line in output.read_text().split() if line != "0")
    assert process.poll() is None
    os.killpg(process.pid, number)
    assert process.wait(LIMIT) == -number
    until(lambda: not is_alive(child))
    process.send_signal(number)


def test_it_says_where_it_was_when_aborted(
    environment: dict[str, str], made: Callable[[str], str], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    asleep = made("import time\n\ndef rests():\n    print('rests', flush=True)\n    time.sleep(600)\n\nrests()\n")
    process = programs.start(asleep, [], environment=environment, output=output, directory=tmp_path)
    until(lambda: output.exists() and "rests" in output.read_text())
    process.send_signal(signal.SIGABRT)
    assert process.wait(LIMIT) == -signal.SIGABRT
    assert "in rests" in output.read_text()
