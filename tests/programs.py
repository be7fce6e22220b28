"""Python programs that start in a moment: forked from a process that has already imported Celery and this package.

`celery worker` spends most of its start on imports. Nothing else is shared: each program is a process in its own
session, with its own environment, and makes its own app.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import current_process, get_context
from pathlib import Path

from tests.patience import LIMIT

ROOT = Path(__file__).parents[1]

#: Variables that Celery reads when it is imported: a program with one of these in its environment is not forked, or it
#: might be the first one, and all later ones would have it, too.
_READ_AT_IMPORT = ("C_FORCE_ROOT", "AUTOSCALE_KEEPALIVE", "REMAP_SIGTERM")

_fork_server = get_context("forkserver")
_fork_server.set_forkserver_preload(["tests.imported"])


class Forked:
    """A program that was forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[Path],
        directory: Path,
    ) -> None:
        given = (module, [*arguments], {**environment}, [*map(str, files)], str(directory))
        self._process = _fork_server.Process(target=_run, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: Path,
    errors: Path | None = None,
    given: Path = Path(os.devnull),
    directory: Path = ROOT,
    python: str | None = None,
) -> subprocess.Popen[bytes] | Forked:
    """Start `python -m module arguments` in its own session.

    Args:
        module: what to run.
        arguments: of the program.
        environment: variables beyond those of the tests.
        output: file to which its output is appended.
        errors: file to which it writes errors; the same file by default.
        given: file that it reads as its input.
        directory: where it runs.
        python: another interpreter than the one of the tests, which has other packages.
    """
    # When aborted, it prints the lines in which its threads are.
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
    files = (given, output, errors or output)
    if python is None and not _must_be_fresh(arguments, environment):
        return Forked(module, arguments, environment, files, directory)
    with files[0].open("rb") as stdin, files[1].open("ab") as stdout, files[2].open("ab") as stderr:
        command, streams = [python or sys.executable, "-m", module, *arguments], (stdin, stdout, stderr)
        return subprocess.Popen(command, -1, None, *streams, cwd=directory, env=environment, start_new_session=True)


def run(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str], given: str = "", directory: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` to its end; `given` is its input."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("given", "output", "errors")]
        files[0].write_text(given)
        places = {"given": files[0], "output": files[1], "errors": files[2], "directory": directory}
        process = start(module, arguments, environment=environment, **places)
        status = process.wait(LIMIT)
        return subprocess.CompletedProcess([module, *arguments], status, files[1].read_text(), files[2].read_text())


def group_of(pid: int) -> list[int]:
    """The processes of a program that have not ended: each program has its own process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(group) == pid and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


def _must_be_fresh(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    # Greenlets patch what is imported after them; coverage starts to measure with the interpreter.
    measured = any(name.startswith("COVERAGE_PROCESS") for name in environment)
    return (
        measured or bool({"gevent", "eventlet"} & {*arguments}) or any(name in environment for name in _READ_AT_IMPORT)
    )


def _run(module: str, arguments: list[str], environment: dict[str, str], files: list[str], directory: str) -> None:
    os.setsid()
    gc.freeze()  # Celery collects garbage before it forks, and imported modules stay anyway.
    given, output, errors = files
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    opened = [os.open(given, os.O_RDONLY), os.open(output, flags, 0o644), os.open(errors, flags, 0o644)]
    for number, file in enumerate(opened):
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable(2)
    # multiprocessing has replaced it by another file.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [directory, *(place for place in sys.path if place not in ("", directory))]
    sys.path[1:1] = environment["PYTHONPATH"].split(os.pathsep) if environment.get("PYTHONPATH") else []
    sys.argv = [module, *arguments]
    current_process().name = "MainProcess"
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # What an interpreter does when it exits; multiprocessing leaves some of it out.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
