"""Workers that are started and stopped in a process that goes on, as tests do it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import programs
from tests.redis_server import RedisServer


def lives(pool: str, server: RedisServer) -> list[dict[str, Any]]:
    ran = programs.run("tests.integration.embedded", [pool, server.url_of(0)], environment={})
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    "pool", [*(pytest.param(pool, marks=pytest.mark.slow) for pool in ("solo", "threads")), "prefork"]
)
def test_stopped_worker_leaves_nothing_behind(redis_server: RedisServer, pool: str) -> None:
    first, *others = lives(pool, redis_server)
    for life in (first, *others):
        assert life["threads"] == []
        if pool != "prefork":  # Of which Celery 5.7 itself keeps the app, a thread and some fifteen descriptors.
            assert life["apps"] == 1
            assert life["pipes"] == first["pipes"]
