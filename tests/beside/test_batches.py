"""celery-batches: a batch is never exclusive; what it sends is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from tests.beside.conftest import conf_of
from tests.recording import Record, overlaps
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow

APP = "tests.beside.apps.batches_app"


@pytest.mark.parametrize("base", ["BatchesFirst", "ExclusiveFirst"])
def test_exclusive_batch_is_refused(worker_with: Callable[..., Any], base: str) -> None:
    with pytest.raises(AssertionError, match=r"InvalidOption: task click has the Strategy .*celery-batches"):
        worker_with(APP, group="beside-older", test_base=base)


def test_batch_may_send_an_exclusive_task_for_each_key(
    worker_with: Callable[..., Any], record: Record, redis_server: RedisServer
) -> None:
    worker_with(APP, group="beside-older", concurrency=4, test_base="Batches")
    app = Celery(set_as_current=False)
    app.conf.update(conf_of(redis_server))
    for _ in range(4):
        for tenant in ("one", "one", "two", "two"):
            app.send_task("click", kwargs={"tenant": tenant})
    runs = record.wait_for(ends=4)
    assert {run.job for run in runs} == {"one", "two"}
    assert overlaps(runs) == []
