"""The compose files with a real Docker: they are valid, and do what docs/containers.md says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.smoke.engine import IMAGE, MISSING, ROOT

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(400)]

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

OVERRIDES = ((), ("rabbitmq",), ("redlock",), ("rabbitmq", "redlock"))


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("overrides", OVERRIDES, ids="+".join)
def test_compose_files_are_valid(overrides: tuple[str, ...]) -> None:
    files = ["docker-compose.yml", *(f"docker/{name}.yml" for name in overrides)]
    docker("compose", *(argument for file in files for argument in ("--file", file)), "config", "--quiet")


@pytest.mark.parametrize("overrides", OVERRIDES[:-1], ids="+".join)
def test_demo_succeeds_and_leaves_nothing(overrides: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "examples.containers", *overrides]
    demo = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        told, _ = demo.communicate(timeout=350)
    finally:
        demo.send_signal(signal.SIGINT)  # It has ended, or must now take everything down.
        demo.wait(60)
    assert demo.returncode == 0, told
    assert re.search(r"ran \d\d times on 2 workers; 0 twice, 0 lost", told)
    assert "0 pairs at the same time" in told
    ours = ("--filter", f"label=com.docker.compose.project=singleton-lock-demo-{demo.pid}", "--quiet")
    assert docker("ps", "--all", *ours) == docker("network", "ls", *ours) == docker("volume", "ls", *ours) == ""


def test_image_contains_only_what_it_runs() -> None:
    build_args = [f"--build-arg={name}" for name in ("PIP_INDEX_URL",) if name in os.environ]
    docker("build", "--quiet", *build_args, "--file", "docker/Dockerfile", "--tag", IMAGE, ".")
    run = ("run", "--rm", IMAGE)
    assert docker(*run, "id", "--user").strip() != "0"
    assert docker(*run, "celery", "--app", "examples.containers.tasks", "locks", "--help")
    assert docker(*run, "ls", "/app", "/app/examples/containers").split()[:2] == ["/app:", "examples"]
    assert "pip" not in docker(*run, "ls", "/venv/bin").split()
    assert docker(*run, "find", "/", "-xdev", "-name", "src", "-maxdepth", "1") == ""
