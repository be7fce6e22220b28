"""Celery's tests from its sdist, an environment for them, and a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.celery_suite.plugin import LOCKS, OUTCOMES
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]

#: The tests to run, by a short name.
PARTS: Mapping[str, tuple[str, ...]] = {
    "unit": ("t/unit/tasks", "t/unit/worker", "t/unit/app"),
    "integration": ("t/integration/test_tasks.py", "t/integration/test_canvas.py"),
}

#: Seconds that a test may take: longer than any test that ends at all.
PATIENCE = 300

#: The outcome of each test.
Outcomes = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of the installed Celery, kept in the folder `.venv`."""

    place: Path
    version: str

    @classmethod
    def ready(cls) -> Suite:
        """Get them with all that they need, unless it is already there."""
        suite = cls(ROOT / ".venv" / "celery-suite" / version("celery"), version("celery"))
        if not (suite.place / "ready").exists():
            shutil.rmtree(suite.place, ignore_errors=True)
            suite._get_tests()
            suite._make_environment()
            (suite.place / "ready").touch()
        suite._install_ours()
        return suite

    def run(self, name: str, tests: Iterable[str], *, exclusive: bool) -> Outcomes:
        """Run some tests, by path or id.

        Args:
            name: of the log.
            tests: to run.
            exclusive: with our task class and its own lock server, instead of Celery's task class.
        """
        with RedisServer() as broker, RedisServer() as locks, TemporaryDirectory() as directory:
            outcomes, arguments = Path(directory, "outcomes.json"), Path(directory, "tests")
            arguments.write_text("\n".join(tests))
            environment = {
                **os.environ,
                # Without our package in that environment, its entry points are not found.
                "PYTHONPATH": os.pathsep.join([*([str(self._ours)] if exclusive else []), str(ROOT)]),
                "TEST_BROKER": broker.url,
                "TEST_BACKEND": broker.url,
                "REDIS_HOST": "127.0.0.1",
                "REDIS_PORT": str(broker.port),
                OUTCOMES: str(outcomes),
                **({LOCKS: locks.url} if exclusive else {}),
            }
            plugins = ("-p", "tests.celery_suite.plugin", "-p", "no:cacheprovider")
            options = (*plugins, "-q", "--disable-warnings", "--tb=short", f"--timeout={PATIENCE}")
            with (self.place / f"{name}.log").open("w") as log:
                subprocess.run(
                    [str(self._python), "-m", "pytest", *options, f"@{arguments}"],
                    cwd=self._source,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    check=False,  # Failing tests are expected.
                )
            if not outcomes.exists():
                raise RuntimeError(f"the run {name} did not end; see {log.name}")
            found: dict[str, str] = json.loads(outcomes.read_text())
            return found

    @property
    def _source(self) -> Path:
        return self.place / "source"

    @property
    def _python(self) -> Path:
        return self.place / "venv" / "bin" / "python"

    @property
    def _ours(self) -> Path:
        return self.place / "ours"

    def _get_tests(self) -> None:
        sdist = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "celery")
        _call(*sdist, "--dest", self.place, f"celery=={self.version}")
        (archive,) = self.place.glob("celery-*.tar.gz")
        with tarfile.open(archive) as packed:
            # The tests without the code that they test, which is the installed Celery.
            wanted = [each for each in packed.getmembers() if each.name.split("/")[1:2] != ["celery"]]
            packed.extractall(self.place, members=wanted, filter="data")
        self.place.joinpath(f"celery-{self.version}").rename(self._source)

    def _make_environment(self) -> None:
        _call("uv", "venv", "--quiet", "--python", sys.executable, self.place / "venv")
        needed = ("-r", self._source / "requirements" / "test.txt", f"celery[redis]=={self.version}", "hiredis")
        pinned = tuple(f"{name}=={version(name)}" for name in ("kombu", "billiard", "redis"))
        _call("uv", "pip", "install", "--quiet", "--python", self._python, *needed, *pinned)

    def _install_ours(self) -> None:
        shutil.rmtree(self._ours, ignore_errors=True)
        place = ("--python", self._python, "--target", self._ours)
        _call("uv", "pip", "install", "--quiet", *place, "--no-deps", "--reinstall", ROOT)


def _call(program: str | Path, *arguments: str | Path) -> None:
    # `make setup` installed it beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run([str(program), *map(str, arguments)], check=True, env={**os.environ, "PATH": path})
