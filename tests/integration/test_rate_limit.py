"""Celery's `rate_limit`: an execution that meets a held lock, and waits or is skipped, gives its token back."""

from __future__ import annotations

import pytest

from tests.integration.conftest import LONG, Shop, quick_first, until
from tests.patience import LIMIT

#: Longer than any test: a task gets no token but the first, and what comes back.
RATE = "1/h"


def limit(shop: Shop, task: str) -> None:
    """From now on, each worker begins with one of these tasks, and with no other one for an hour."""
    (reply,) = shop.app.control.rate_limit(f"tests.integration.app.{task}", RATE, reply=True, timeout=LIMIT, limit=1)
    assert "ok" in next(iter(reply.values()))


@pytest.mark.parametrize("pool", quick_first("prefork", "gevent", "threads", "eventlet"))
@pytest.mark.parametrize("policy", ["retry", "skip", "join", "rerun"])
def test_refused_execution_gives_its_token_back(shop: Shop, pool: str, policy: str) -> None:
    (worker,) = shop.start("one", pool=pool, concurrency=4)
    until(lambda: shop.app.control.ping([worker.name], timeout=1.0, limit=1))
    shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    limit(shop, "exclusive")
    for count in range(1, 4):
        shop.send("exclusive", "report", singleton_lock={"on_conflict": policy})
        until(lambda count=count: len(shop.refused(policy)) == count)
    assert shop.send("exclusive", "list").get(timeout=LIMIT) == "list"
    another = shop.send("exclusive", "another")
    until(lambda: f"{another.id}] received" in worker.log)
    assert shop.record.runs("another") == []
