"""A newer one stops the one that runs: `on_conflict="replace"`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.result import AsyncResult

from celery_singleton_lock import LockSuperseded
from tests.integration.conftest import LONG, Shop
from tests.integration.standing import Staff
from tests.patience import LIMIT
from tests.recording import overlaps

TTL = 3.0


@pytest.fixture
def shop(staff: Staff) -> Iterator[Shop]:
    with staff.shop(singleton_lock_ttl=TTL) as shop:
        yield shop


def ran(shop: Shop, job: str = "report") -> list[str]:
    """The ids of the runs, in their order."""
    runs = shop.record.runs(job)
    assert overlaps(runs) == []
    return [run.task_id for run in runs]


def is_superseded_by(result: AsyncResult, newest: AsyncResult) -> bool:
    with pytest.raises(LockSuperseded) as caught:
        result.get(timeout=LIMIT)
    assert result.state == "REVOKED"
    return bool(caught.value.task_id == newest.id)


def test_holder_is_stopped_for_the_newest(shop: Shop) -> None:
    shop.start("one", "two")
    holder = shop.send("replacing", "report", LONG)
    shop.record.wait_for(starts=1)
    newest = shop.send("replacing", "report")
    assert newest.get(timeout=LIMIT) == "report"
    assert is_superseded_by(holder, newest)
    assert ran(shop) == [holder.id, newest.id]
    assert shop.record.runs("report")[0].outcome == "aborted"
