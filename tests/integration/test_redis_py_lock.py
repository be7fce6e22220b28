"""redis-py's own tests of its lock, from the sdist of the installed redis-py, with our lock in place of its lock."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.patience import until
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]

#: The tests that fail, and why; the same list is in docs/locks.md. All others pass.
DIFFERENT = {
    "test_lock": "reads the value, and asks for a key that never ends",
    "test_lock_token": "reads the value, and asks for a key that never ends",
    "test_lock_token_thread_local_false": "reads the value, and asks for a key that never ends",
    "test_context_manager": "reads the value",
    "test_blocking_timeout": "replaces the clock of redis-py's module, and counts its sleeps",
    "test_context_manager_blocking_timeout": "replaces the clock of redis-py's module, and counts its sleeps",
}

#: The tests that fail as well unless `renew=False`.
RENEWED = {
    "test_context_manager_not_raise_on_release_lock_not_owned_error": "waits for a held lock to end, which is renewed",
}

PLUGIN = """
import redis.lock
from celery_singleton_lock import Lock

class OurLock(Lock):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, renew={renew}, **options)

redis.lock.Lock = OurLock
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with redis-py's tests."""
    folder, version = tmp_path_factory.mktemp("redis-py"), importlib.metadata.version("redis")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    download += ["--no-binary", "redis", "--dest", str(folder), f"redis=={version}"]
    done = subprocess.run(download, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = f"the sdist of redis-py {version} cannot be had: {done.stderr[-500:]}"
        if os.environ.get("REDIS_PY_TESTS") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    (archive,) = folder.glob("redis-*.tar.gz")
    with tarfile.open(archive) as sdist:
        members = [it for it in sdist.getmembers() if re.fullmatch(r"[^/]+/tests/[^/]+\.py", it.name)]
        for member in members:
            if file := sdist.extractfile(member):
                path = folder / "tests" / Path(member.name).name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(file.read())
    if not (folder / "tests" / "test_lock.py").exists():
        pytest.skip(f"the sdist of redis-py {version} has no tests")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("renew", [True, False])
def test_only_known_tests_fail(theirs: Path, own_redis: RedisServer, renew: bool) -> None:
    known = DIFFERENT.keys() | (RENEWED.keys() if renew else set())
    names, failed, output = outcome(theirs, own_redis, renew)
    assert len(names) - len(failed) >= 25, output
    if renew and RENEWED.keys() & names - failed:
        # A busy machine has let a lease of a tenth of a second end.
        until(lambda: outcome(theirs, own_redis, renew, *RENEWED)[1] == RENEWED.keys(), "it is renewed")
        failed |= RENEWED.keys()
    # Some versions of redis-py lack some of these tests.
    assert failed == known & names, output


def outcome(theirs: Path, server: RedisServer, renew: bool, *only: str) -> tuple[set[str], set[str], str]:
    """The names of redis-py's tests, of those that fail, and what was printed."""
    plugin, report = theirs / "our_lock.py", theirs / f"report-{renew}.xml"
    plugin.write_text(PLUGIN.format(renew=renew))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "our_lock", "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["tests/test_lock.py", f"--redis-url={server.url}", f"--junitxml={report}"]
    command += ["-k", " or ".join(only)] if only else []
    environment = {**os.environ, "PYTHONPATH": f"{theirs}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=theirs, env=environment, capture_output=True, text=True, check=False)
    cases = [*ElementTree.parse(report).iter("testcase")]
    failed = {str(case.get("name")) for case in cases if [*case.iter("failure"), *case.iter("error")]}
    return {str(case.get("name")) for case in cases}, failed, done.stdout


def test_documentation_names_the_tests_that_fail() -> None:
    text = (ROOT / "docs" / "locks.md").read_text()
    assert set(re.findall(r"`(test_\w+)`", text)) == DIFFERENT.keys() | RENEWED.keys()
