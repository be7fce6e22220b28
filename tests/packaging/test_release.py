"""Everything that a release and the workflows need exists, and says the same everywhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

PYPROJECT = (ROOT / "pyproject.toml").read_text()

MAKEFILE = (ROOT / "Makefile").read_text()

PYTHONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def commands(workflow: Path) -> list[str]:
    return [step["run"] for job in jobs(workflow).values() for step in job.get("steps", ()) if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_everything_that_a_workflow_calls_exists(workflow: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    text = "\n".join(commands(workflow))
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets
    for script in re.findall(r"python (\S+\.py)", text):
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_may_only_read_and_each_job_has_a_time_limit(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(workflow).items():
        assert "uses" in job or job["timeout-minutes"] <= 60, name
    writing = {name for name, job in jobs(workflow).items() if "permissions" in job}
    assert writing <= {"publish"}, "only the job that publishes without a password may write"


def test_tests_run_on_every_supported_python_and_celery() -> None:
    found = jobs(ROOT / ".github" / "workflows" / "tests.yml")
    assert found["tests"]["strategy"]["matrix"]["python"] == PYTHONS == numbered("wheel")
    assert found["celery"]["strategy"]["matrix"]["version"] == numbered("celery")


def numbered(name: str) -> list[str]:
    """The versions that the Makefile has such a target for."""
    return re.findall(rf"\b{name}-(\d+\.\d+)", re.findall(rf"^\w+ := {name}-.*", MAKEFILE, re.MULTILINE)[0])


@pytest.mark.parametrize(
    ("tag", "changelog", "expected"),
    [
        ("v0.1.0", "## 0.1.0 - 2026-12-01\n", []),
        ("v0.1.0", "## 0.1.0 (unreleased)\n", ["CHANGELOG.md has no section"]),
        ("v0.2.0", "## 0.2.0 - 2026-12-01\n", ["the tag is v0.2.0, and pyproject.toml has version 0.1.0"]),
    ],
)
def test_tag_package_and_changelog_must_name_one_version(tag: str, changelog: str, expected: list[str]) -> None:
    problems = runpy.run_path(str(ROOT / ".github" / "version.py"))["problems"]
    found = problems(tag, 'name = "x"\nversion = "0.1.0"\n', changelog)
    assert [text[: len(start)] for text, start in zip(found, expected, strict=True)] == expected


def test_changelog_starts_with_this_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert f'\nversion = "{first[1]}"\n' in PYPROJECT
