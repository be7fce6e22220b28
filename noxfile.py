"""The tests on every Celery that is supported: `make versions`, or `nox -s "tests(celery-5.4)" -- tests/unit`.

And what is published, on every Python, with the oldest and the newest of what it asks for: `nox -s wheel`. And what is
not out yet, of the libraries whose inside we touch (docs/celery-inside.md): `nox -s prereleases`.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "uv|virtualenv"

PROJECT = nox.project.load_toml("pyproject.toml")

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]

VERSIONS = ["5.4", "5.5", "5.6", "5.7"]


@nox.session
@nox.parametrize("version", VERSIONS, ids=[f"celery-{version}" for version in VERSIONS])
def tests(session: nox.Session, version: str) -> None:
    """Unit, contract and integration tests on one Celery."""
    tools = nox.project.dependency_groups(PROJECT, "test")
    session.install("-e", ".[embedded,demo]", f"celery[redis]=={version}.*", *tools)
    session.run("pytest", "-m", "not slow", *session.posargs)


@nox.session
def prereleases(session: nox.Session) -> None:
    """Unit and contract tests on the newest of Celery, kombu, billiard and redis-py, pre-releases too."""
    session.install("-e", ".[embedded,demo]", *nox.project.dependency_groups(PROJECT, "test"))
    # Not with their extras, which would hold redis-py back.
    session.install("--upgrade", "--prerelease=allow", "celery", "kombu", "billiard", "redis")
    session.run("uv", "pip", "list", external=True)
    session.run("pytest", "tests/unit/test_celery_private.py")
    session.run("pytest", "-m", "not slow", *(session.posargs or ["tests/unit", "tests/contract"]))


@nox.session(python=PYTHONS)
@nox.parametrize("resolution", ["lowest-direct", "highest"], ids=["oldest", "newest"])
def wheel(session: nox.Session, resolution: str) -> None:
    """The wheel, with the tests of the sdist, where the source is not."""
    built = Path(session.create_tmp()) / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.run("uv", "build", "--quiet", "--out-dir", str(built), external=True)
    (package,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        sdist.extractall(built, filter="data")
    (source,) = (path for path in built.iterdir() if path.is_dir())
    shutil.rmtree(source / "celery_singleton_lock")
    # The oldest optional libraries know the oldest Python only.
    optional = PROJECT["project"]["optional-dependencies"] if session.python == PYTHONS[0] else ["embedded"]
    extras = [f"--extra={extra}" for extra in optional if extra != "demo"]
    session.install("--resolution", resolution, "-r", str(source / "pyproject.toml"), *extras)
    session.install("--no-deps", str(package))
    # The tests' own tools come second, and are the newest: the oldest cannot be built any more.
    session.install(*nox.project.dependency_groups(PROJECT, "test"))
    session.run("uv", "pip", "list", external=True)
    session.chdir(source)
    session.run("pytest", "-m", "not slow", *(session.posargs or ["tests/unit", "tests/contrib"]))
