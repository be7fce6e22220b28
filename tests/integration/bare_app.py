"""The app before its tasks were made exclusive: what an old worker still runs."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from redis import Redis

app = Celery("tests.integration.bare_app", **json.loads(os.environ["TEST_CONF"]))


@worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    with Redis.from_url(os.environ["TEST_EVENTS"]) as client:
        client.lpush(f"ready:{sender.hostname}", 1)


@app.task(name="tests.integration.app.exclusive")
def exclusive(job: str) -> str:
    return job
