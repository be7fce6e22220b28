"""Whether containers can run here, and from which image."""

from __future__ import annotations

import importlib.util
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The image's name in docker-compose.yml.
IMAGE = "celery-singleton-lock-demo"


def _missing() -> str:
    if importlib.util.find_spec("pytest_celery") is None:
        return "pytest-celery is not installed; `make smoke` does that"
    from docker.errors import DockerException

    import docker

    try:
        with closing(docker.from_env(timeout=10)) as client:
            client.ping()
    except DockerException:
        return "no Docker engine answers"
    return ""


#: Why these tests cannot run here; empty if they can.
MISSING = _missing()
