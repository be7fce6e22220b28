"""Every example, run as its README says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from celery_singleton_lock import clock
from tests import programs
from tests.patience import LIMIT
from tests.programs import ROOT
from tests.redis_server import RedisServer


@pytest.fixture
def environment(own_redis: RedisServer, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "CELERY_BROKER_URL": own_redis.url_of(0),
        "CELERY_RESULT_BACKEND": own_redis.url_of(1),
        "TICKETS": str(tmp_path / "tickets.json"),
        "REPORT_LOG": str(tmp_path / "report.log"),
    }


@contextmanager
def celery(app: str, *arguments: str, environment: dict[str, str], log: Path) -> Iterator[None]:
    process = programs.start("celery", ["-A", app, *arguments], environment=environment, output=log)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_quickstart(environment: dict[str, str], tmp_path: Path) -> None:
    program = (
        "from examples.quickstart.tasks import rebuild_report as task\n"
        "first, second, other = task.delay(7), task.delay(7), task.delay(8)\n"
        "print(other.get(timeout=180), [copy.get(timeout=180, propagate=False) for copy in (first, second)])\n"
        "print(sorted([first.state, second.state]))\n"
    )
    with celery("examples.quickstart.tasks", "worker", "-c", "3", environment=environment, log=tmp_path / "worker.log"):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT,
            check=True,
        )  # fmt: skip
    assert "report of tenant 8 rebuilt" in done.stdout
    assert "['REVOKED', 'SUCCESS']" in done.stdout


def test_tickets(environment: dict[str, str], tmp_path: Path) -> None:
    app, log = "examples.tickets.tasks", tmp_path / "worker.log"
    with ExitStack() as workers:
        for name in ("one", "two"):
            workers.enter_context(
                celery(app, "worker", "-c", "4", "-n", f"{name}@test", environment=environment, log=log)
            )
        sold = [tickets(environment, *arguments) for arguments in ((), ("--without-lock",))]
    guarded, unguarded = sold
    assert guarded.returncode == 0, guarded.stdout + guarded.stderr
    assert "sold 10 tickets: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" in guarded.stdout
    assert unguarded.returncode == 1, "without the lock it must go wrong, or this test proves nothing"


def tickets(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.tickets", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


@pytest.mark.slow
def test_beat_report_with_two_beats(environment: dict[str, str], tmp_path: Path) -> None:
    app, report = "examples.beat_report.tasks", Path(environment["REPORT_LOG"])
    with ExitStack() as programs:
        log = tmp_path / "log"
        programs.enter_context(celery(app, "worker", "-c", "4", environment=environment, log=log))
        for name in ("one", "two"):
            schedule = ("beat", "-s", str(tmp_path / name), "--pidfile", str(tmp_path / f"{name}.pid"))
            programs.enter_context(celery(app, *schedule, environment=environment, log=log))
        deadline = clock.now() + LIMIT
        while not report.exists() or len(report.read_text().splitlines()) < 3:
            assert clock.now() < deadline, log.read_text()[-3000:]
            clock.sleep(0.05)
    runs = sorted(tuple(map(float, line.split())) for line in report.read_text().splitlines())
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(runs))


@pytest.mark.slow
def test_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exclusive:  0 overlaps" in done.stdout
