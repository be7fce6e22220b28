"""The tests on every Celery that is supported: `make versions`, or `nox -s "tests(celery-5.4)" -- tests/unit`."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "uv|virtualenv"

PROJECT = nox.project.load_toml("pyproject.toml")

VERSIONS = ["5.4", "5.5", "5.6", "5.7"]


@nox.session
@nox.parametrize("version", VERSIONS, ids=[f"celery-{version}" for version in VERSIONS])
def tests(session: nox.Session, version: str) -> None:
    """Unit, contract and integration tests on one Celery."""
    tools = nox.project.dependency_groups(PROJECT, "test")
    session.install("-e", ".[embedded,demo]", f"celery[redis]=={version}.*", *tools)
    session.run("pytest", "-m", "not slow", *session.posargs)
