"""The published files: built, inspected, installed in an empty environment, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from tests.patience import LIMIT
from tests.redis_server import RedisServer
from tests.servers import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

PACKAGE = "celery_singleton_lock"

#: The pytest plugin, a module beside the package.
PLUGIN = "_celery_singleton_lock_pytest.py"

APP = """
import os
from celery import Celery
from celery_singleton_lock import SingletonTask

app = Celery("shop", broker=os.environ["SHOP"], backend=os.environ["SHOP"])
app.conf.broker_connection_retry_on_startup = True


@app.task(base=SingletonTask, bind=True)
def rebuild(self, tenant_id):
    return [tenant_id, self.lock.fence]
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a program that must succeed; returns what it printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode == 0, f"{command}:\n{ended.stdout}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "uv", "build", "--out-dir", folder, ROOT, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has only the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "uv", "pip", "install", "--python", python, built[1], cwd=folder)
    return python.parent


def sources() -> set[str]:
    """The files of the package."""
    found = (path for path in (ROOT / PACKAGE).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {PLUGIN, *(str(path.relative_to(ROOT)) for path in found)}


def test_wheel_contains_only_the_package(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    about = {name for name in names if ".dist-info/" in name}
    assert names - about == sources()
    assert {name.partition("/")[2] for name in about} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }
    assert {Path(name).suffix for name in names - about} == {".css", ".html", ".js", ".lua", ".py", ".typed"}


def test_sdist_contains_the_files_under_version_control(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= sources()
    assert {"LICENSE", "README.md", "docs/install.md", "pyproject.toml", "tests/conftest.py"} <= names
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
        assert names - {"PKG-INFO"} == {name for name in listed if (ROOT / name).exists()}


@pytest.mark.parametrize("command", ["check-wheel-contents", "twine check --strict", "validate-pyproject"])
def test_packaging_tools_find_no_fault(built: tuple[Path, Path], command: str, tmp_path: Path) -> None:
    program, *options = command.split()
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        pytest.skip(f"no {program} here (dependency group: release)")
    checked = {"twine": built, "validate-pyproject": (ROOT / "pyproject.toml",)}.get(program, built[1:])
    run(path, *options, *checked, cwd=tmp_path)


def test_docs_list_every_extra(built: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(built[1])
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    page = (ROOT / "docs" / "install.md").read_text()
    assert set(metadata.get_all("Provides-Extra", [])) == set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    oldest, after = (int(re.findall(rf"{sign}3\.(\d+)", str(metadata["Requires-Python"]))[0]) for sign in (">=", "<"))
    for text in (page, (ROOT / "README.md").read_text()):
        assert f"Python 3.{oldest} to 3.{after - 1}" in text


def test_every_module_that_needs_no_extra_can_be_imported(installed: Path, tmp_path: Path) -> None:
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sorted(sources() - {PLUGIN})
        if name.endswith(".py") and not any(f"/{room}/" in name for room in ("contrib", "web"))
    ]
    modules.append(f"{PACKAGE}.contrib.fencing")
    code = f"import {', '.join(modules)}; print({PACKAGE}.__file__)"
    assert run(installed / "python", "-c", code, cwd=tmp_path).startswith(str(installed.parent))


@pytest.fixture
def celery(installed: Path, tmp_path: Path, own_redis: RedisServer) -> Callable[..., str]:
    """Run Celery's program for an app, with only the wheel installed."""
    (tmp_path / "shop.py").write_text(APP)
    return lambda *arguments: run(
        installed / "celery", "-A", "shop", *arguments, cwd=tmp_path, SHOP=own_redis.url, PYTHONPATH=str(tmp_path)
    )


@pytest.fixture
def worker(celery: object, installed: Path, tmp_path: Path, own_redis: RedisServer) -> Iterator[None]:
    environment = {**os.environ, "SHOP": own_redis.url, "PYTHONPATH": str(tmp_path)}
    command = [installed / "celery", "-A", "shop", "worker", "-c", "1", "-l", "INFO"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    try:
        until(lambda: " ready." in (tmp_path / "log").read_text(), "the worker is ready")
        yield
    finally:
        process.terminate()
        process.wait(LIMIT)


@pytest.mark.usefixtures("worker")
def test_task_runs_under_its_lock(installed: Path, tmp_path: Path, own_redis: RedisServer) -> None:
    code = "from shop import rebuild; tenant, fence = rebuild.delay(7).get(timeout=60); print(tenant, fence > 0)"
    environment = {"SHOP": own_redis.url, "PYTHONPATH": str(tmp_path)}
    assert run(installed / "python", "-c", code, cwd=tmp_path, **environment) == "7 True\n"


def test_entry_points_are_found(celery: Callable[..., str]) -> None:
    assert "list" in celery("locks", "--help")
    assert "--singleton-lock-backend" in celery("worker", "--help")


def test_type_hints_are_found(installed: Path, tmp_path: Path) -> None:
    """As a user's mypy sees them: with the wheel, and without the source."""
    mypy = Path(sys.executable).with_name("mypy")
    if not mypy.exists():
        pytest.skip("no mypy here (dependency group: lint)")
    python = installed / "python"
    run(sys.executable, "-m", "uv", "pip", "install", "--python", python, "celery-types", cwd=tmp_path)
    shutil.copy(ROOT / "tests" / "typing" / "api.py", tmp_path)
    run(mypy, "--strict", "--python-executable", python, "api.py", cwd=tmp_path)
