"""Tasks of celery-batches; `test_base` says what the base of the first one is."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery_batches import Batches

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask
from tests import recording

app = Celery("tests.beside.apps.batches_app", **json.loads(os.environ["TEST_CONF"]))


class BatchesFirst(Batches, SingletonTask):
    pass


class ExclusiveFirst(SingletonTask, Batches):
    pass


bases = {"BatchesFirst": BatchesFirst, "ExclusiveFirst": ExclusiveFirst, "Batches": Batches}


@app.task(base=bases[app.conf.test_base], flush_every=4, flush_interval=1, name="click")
def click(requests: list[Any]) -> None:
    """What clicks of one tenant have in common is done once for each batch."""
    for tenant in {request.kwargs["tenant"] for request in requests}:
        count.delay(tenant)


@app.task(bind=True, base=SingletonTask, on_conflict="retry", name="count")
def count(self: Any, tenant: str) -> None:
    with recording.run(tenant, self.request.id):
        time.sleep(0.2)
