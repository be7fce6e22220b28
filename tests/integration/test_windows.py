"""On Windows a program can send, and a worker says what it cannot do; see `windows` for what that means here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery
from celery.result import AsyncResult

from tests.patience import LIMIT, until
from tests.programs import ROOT
from tests.redis_server import RedisServer

PROGRAM = [sys.executable, "-m", "tests.integration.windows_app"]

#: Each module, except those that need libraries of extras.
IMPORTS = """
import tests.integration.windows
import importlib, pathlib
for path in sorted(pathlib.Path("celery_singleton_lock").rglob("*.py")):
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if name.split(".")[1:2] not in (["web"], ["contrib"]):
        importlib.import_module(name)
"""


@pytest.fixture
def conf(redis_server: RedisServer) -> dict[str, str]:
    of = {"broker_url": 0, "result_backend": 1, "singleton_lock_backend": 2}
    return {name: redis_server.url_of(database) for name, database in of.items()}


@pytest.fixture
def environment(conf: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "TEST_CONF": json.dumps(conf)}


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )


def test_every_module_can_be_imported(environment: dict[str, str]) -> None:
    done = run([sys.executable, "-c", IMPORTS], environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_program_sends_and_a_worker_runs(
    pool: str, conf: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    done = run(PROGRAM, environment)
    assert done.returncode == 0, done.stderr
    app, log = Celery(set_as_current=False), tmp_path / "log"
    app.conf.update(conf)
    with log.open("wb") as output:
        command = [*PROGRAM, "worker", "-P", pool, "-l", "INFO", "--without-mingle"]
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        assert AsyncResult(done.stdout.strip(), app=app).get(timeout=LIMIT) == 7
        until(lambda: "on Windows, a task that loses its lock" in log.read_text())
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_pool_that_needs_another_system_is_refused(pool: str, environment: dict[str, str]) -> None:
    done = run([*PROGRAM, "worker", "-P", pool], environment)
    assert done.returncode != 0
    assert f"worker_pool is '{pool}', in which exclusive tasks cannot run on Windows" in done.stderr
