"""Every code block of the documentation is run, see `tests/pages.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.pages import blocks
from tests.programs import ROOT

#: Pages with real workers and beats take longer.
SLOW = ("tutorial.md",)

#: Pages that other tests run, on databases, with Django and with Flask: see tests/contrib and tests/beside.
ELSEWHERE = ("fencing.md", "testing.md", "flask.md")

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in page.parts and page.name not in ELSEWHERE and any(blocks(page.read_text()))
]


def run(page: Path) -> subprocess.CompletedProcess[str]:
    return programs.run("tests.pages", [str(page)], environment={})


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] if page.name in SLOW else [])
        for page in PAGES
    ],
)
def test_page_does_what_it_shows(page: Path) -> None:
    done = run(page)
    assert done.returncode == 0, done.stderr
