"""Runs the project's tests on changed copies of it."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.mutation.change import Change
from tests.mutation.files import ROOT

#: Seconds for all tests: a change may make one wait forever.
PATIENCE = 600
_NOT_COPIED = shutil.ignore_patterns(".venv", ".git", "__pycache__", "_build")


def tested(changes: Sequence[Change], folders: Sequence[str], *, jobs: int) -> Iterator[tuple[Change, str]]:
    """For each change the first test that fails; empty if none does."""
    with _copies(jobs) as copies, ThreadPoolExecutor(jobs) as pool:

        def test(change: Change) -> str:
            copy = copies.get()
            try:
                return _test(change, folders, copy)
            finally:
                copies.put(copy)

        yield from zip(changes, pool.map(test, changes), strict=True)


@contextmanager
def _copies(count: int) -> Iterator[queue.SimpleQueue[Path]]:
    with tempfile.TemporaryDirectory(prefix="mutation-") as place:
        copies = queue.SimpleQueue[Path]()
        for number in range(count):
            copies.put(Path(shutil.copytree(ROOT, Path(place, str(number)), ignore=_NOT_COPIED)))
        yield copies


def _test(change: Change, folders: Sequence[str], copy: Path) -> str:
    file = copy / change.file
    file.write_text(change.changed)
    try:
        likely = _named_like(change, copy, folders)
        return (_first_failure(likely, copy) if likely else "") or _first_failure(folders, copy)
    finally:
        file.write_text(change.text)


def _named_like(change: Change, copy: Path, folders: Sequence[str]) -> list[str]:
    """The tests with the changed file's name in theirs: they most likely notice the change."""
    name = f"test_*{Path(change.file).stem}*.py"
    return sorted(str(path.relative_to(copy)) for folder in folders for path in (copy / folder).glob(name))


def _first_failure(tests: Sequence[str], copy: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    try:
        ended = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    if ended.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) ([^\n]*)", ended.stdout, re.MULTILINE)
    return failed.group(1)[:200] if failed else ended.stdout[-200:]
