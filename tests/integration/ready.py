"""A worker whose app imports this module reports that it is ready: `Worker.wait_until_ready` waits for that."""

from __future__ import annotations

import os
from typing import Any

from celery.signals import worker_ready
from redis import Redis


@worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    with Redis.from_url(os.environ["TEST_EVENTS"]) as client:
        client.lpush(f"ready:{sender.hostname}", 1)
