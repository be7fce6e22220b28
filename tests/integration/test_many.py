"""Many executions at once in one process."""

from __future__ import annotations

import pytest

from tests.integration.conftest import Shop
from tests.patience import LIMIT
from tests.recording import overlaps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
def test_two_hundred_at_once_share_one_heartbeat(shop: Shop, pool: str) -> None:
    # Renewed once while they run; long, since a process that starts 200 at once may be slow for a moment.
    shop.conf["singleton_lock_ttl"] = 12.0
    shop.start("one", pool=pool, concurrency=200)
    results = [shop.send("counting_threads", f"job-{n}", 5.0) for n in range(200)]
    counts = [result.get(timeout=LIMIT) for result in results]
    assert set(counts) == {1}, "heartbeat threads in the process"
    runs = shop.record.runs()
    assert max(run.start for run in runs) < min(run.end for run in runs), "they did not run at once"
    assert shop.record.runs("lost") == []


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
def test_two_hundred_copies_in_one_process_run_one_after_the_other(shop: Shop, pool: str) -> None:
    shop.start("one", pool=pool, concurrency=200)
    results = [shop.send("waiting", "report", 0.01) for _ in range(200)]
    for result in results:
        assert result.get(timeout=LIMIT) == "report"
    runs = shop.record.runs("report")
    assert len(runs) == 200
    assert overlaps(runs) == []
    assert len({run.fence for run in runs}) == 200
