"""The record that containers share, in a real Redis: the compose demo and the smoke tests judge by it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from examples.containers.record import read, run
from tests.redis_server import RedisServer


def test_record_has_what_ran_in_the_order_of_the_server(own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        with run(client, task("a"), "report") as step:
            step()
            with pytest.raises(ZeroDivisionError), run(client, task("b", due="2026-01-01T00:00:00"), "tick"):
                raise ZeroDivisionError
        with pytest.raises(KeyboardInterrupt), run(client, task("c"), "report"):
            raise KeyboardInterrupt
        outer, inner, stopped = read(client)
    assert (outer.task_id, outer.places, outer.outcome) == ("a", (0, 1, 4), "done")
    assert (inner.job, inner.places, inner.outcome, inner.due) == ("tick", (2, 3), "raised", "2026-01-01T00:00:00")
    assert (stopped.outcome, stopped.fence, stopped.worker) == ("aborted", 7, "celery@one")


def task(task_id: str, due: str = "") -> Any:
    request = SimpleNamespace(id=task_id, hostname="celery@one", singleton_lock={"due": due})
    return SimpleNamespace(request=request, lock=SimpleNamespace(fence=7))
