"""The pytest plugin in a user's project, and in projects that do not use it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import LIMIT
from tests.programs import ROOT

TASKS = """
from celery import shared_task
from celery_singleton_lock import SingletonTask

@shared_task(base=SingletonTask)
def rebuild(tenant):
    return tenant
"""

TESTS = """
import pytest
from celery_singleton_lock.testing import hold_lock
from tasks import rebuild

def test_skipped(singleton_locks):
    with hold_lock(rebuild, 7):
        rebuild.apply((7,))
    singleton_locks.assert_skipped(rebuild, 7)

@pytest.mark.parametrize("time", range(3))
def test_nothing_is_left_from_other_tests(singleton_locks, time):
    assert rebuild.apply((7,)).get() == 7
    assert len(singleton_locks.events) == 2

def test_failure(singleton_locks):
    singleton_locks.assert_skipped(rebuild, 8)
"""


def run(directory: Path, *arguments: str) -> tuple[dict[str, int], str]:
    """Run pytest as a user does; returns the number of tests by outcome, and what it printed.

    Without the plugins of the smoke tests, which import Celery.
    """
    without = [word for name in ("cacheprovider", "celery", "docker_tools") for word in ("-p", f"no:{name}")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *without, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    printed = done.stdout + done.stderr
    summary = printed.rstrip().splitlines()[-1]
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (passed|failed|error)", summary)}, printed


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "test_tasks.py").write_text(TESTS)
    return tmp_path


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_fixture_gives_each_test_its_own_locks_without_a_server(project: Path, arguments: tuple[str, ...]) -> None:
    outcomes, printed = run(project, *arguments)
    assert outcomes == {"passed": 4, "failed": 1}, printed
    assert "AssertionError: no tasks.rebuild(8) was skipped; no task asked for a lock" in printed


def test_plugin_can_be_left_out(project: Path) -> None:
    outcomes, printed = run(project, "-p", "no:celery_singleton_lock")
    assert outcomes == {"error": 5}, printed
    assert "fixture 'singleton_locks' not found" in printed


def test_projects_that_do_not_use_it_do_not_import_celery(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n"
        "def test_other(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('celery_singleton_lock')\n"
        "    assert not [name for name in sys.modules if name.startswith(('celery', 'kombu', 'redis'))]\n"
    )
    outcomes, printed = run(tmp_path)
    assert outcomes == {"passed": 1}, printed


@pytest.mark.slow
def test_example_passes() -> None:
    outcomes, printed = run(ROOT, "examples/testing")
    assert outcomes == {"passed": 4}, printed


def test_docs_tell_the_truth(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "testing.md").read_text()
    page = re.sub(r"<!-- not run: [^>]+ -->\n```python\n", "", page)
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    assert len(files) == page.count("```python\n") == 6
    for name, content in files:
        (tmp_path / name).write_text(content)
    outcomes, printed = run(tmp_path)
    assert outcomes == {"passed": 6}, printed
