"""The compose files and the Dockerfile, as far as they can be read without Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
BASE = ROOT / "docker-compose.yml"
OVERRIDES = sorted((ROOT / "docker").glob("*.yml"))


def services(file: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(file.read_text())["services"]


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
