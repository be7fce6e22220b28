"""On every result backend that needs no further service, tasks end as they do with the stock Task."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_singleton_lock.task import decide
from tests.contrib.endings import SERIALIZERS, differences
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]

BACKENDS: dict[str, Callable[[Path, RedisServer], str | None]] = {
    "file system": lambda path, _: f"file://{path}",
    "SQLite": lambda path, _: f"db+sqlite:///{path}/results",
    "memory": lambda *_: "cache+memory://",
    "Redis": lambda _, redis: redis.url_of(1),
    "rpc": lambda *_: "rpc://",
    "none": lambda *_: None,
    "as MongoDB": lambda *_: "tests.contrib.endings:Overriding",
    "as Elasticsearch": lambda *_: "tests.contrib.endings:Writing",
}


#: Each of the others is tried with these two, except YAML, which is slow; the other combinations take their time.
QUICK = {"Redis", "json"}


@pytest.mark.parametrize(
    ("backend", "serializer"),
    [
        pytest.param(*pair, marks=[] if QUICK & {*pair} and "yaml" not in pair else [pytest.mark.slow])
        for pair in itertools.product(BACKENDS, SERIALIZERS)
    ],
)
def test_tasks_end_as_they_do_with_the_stock_task(
    backend: str, serializer: str, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLING", 0.0)
    try:
        assert differences(BACKENDS[backend](tmp_path, redis_server), serializer) == []
    finally:
        redis_server.flush()


@pytest.mark.slow
def test_tasks_end_as_they_do_with_the_stock_task_with_django_celery_results() -> None:
    command = [sys.executable, "-m", "tests.contrib.endings"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr[-3000:]
