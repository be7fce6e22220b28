"""The compose files and the Dockerfile, as far as they can be read without Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BASE = ROOT / "docker-compose.yml"
OVERRIDES = sorted((ROOT / "docker").glob("*.yml"))


def services(file: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(file.read_text())["services"]


def test_two_workers_and_two_beats_share_one_image_that_one_of_them_builds() -> None:
    ours = {name: service for name, service in services(BASE).items() if name.startswith(("worker", "beat"))}
    assert sorted(ours) == ["beat-one", "beat-two", "worker-one", "worker-two"]
    assert len({service["image"] for service in ours.values()}) == 1
    (build,) = [service["build"] for service in ours.values() if "build" in service]
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("file", [BASE, *OVERRIDES], ids=lambda file: file.name)
def test_every_dependency_has_a_health_check(file: Path) -> None:
    known = services(BASE) | services(file)
    for service in services(file).values():
        for needed, how in service.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert "healthcheck" in known[needed]


@pytest.mark.parametrize("file", OVERRIDES, ids=lambda file: file.name)
def test_override_changes_all_programs_and_adds_only_servers(file: Path) -> None:
    changed = services(BASE).keys() & services(file).keys()
    assert changed == {"beat-one", "beat-two", "worker-one", "worker-two"}
    for name, service in services(file).items():
        assert (name in changed) != ("image" in service)


def test_apps_that_the_files_run_exist() -> None:
    text = BASE.read_text() + (ROOT / "docker" / "Dockerfile").read_text()
    apps = set(re.findall(r"--app\W+([\w.]+)", text))
    assert apps
    for app in apps:
        assert (ROOT / f"{app.replace('.', '/')}.py").is_file()


def test_files_that_the_image_copies_exist_and_are_not_ignored() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    lines = [
        line.split()[1:-1] for line in dockerfile.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    copied = {name for names in lines for name in names}
    assert copied == {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in copied:
        assert (ROOT / name).exists()


def test_image_runs_as_an_unprivileged_user_on_pinned_bases() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    last_stage = dockerfile.rpartition("FROM ")[2]
    assert "\nUSER celery\n" in last_stage
    images = re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)
    images += [
        service["image"]
        for file in (BASE, *OVERRIDES)
        for service in services(file).values()
        if "image" in service and not service["image"].startswith("celery-singleton-lock")
    ]
    assert len(images) > 3
    for image in images:
        assert re.fullmatch(r"[a-z]+:\d[\w.-]*", image), image
