"""The content of the events, which others read as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from celery.events.event import get_exchange
from kombu import Queue

import celery_singleton_lock.worker.events  # noqa: F401 - as a worker does
from celery_singleton_lock import LockConflict, signals
from tests.bench import Bench, raises


def test_conflict_with_a_lock_that_never_expires_is_valid_json(bench: Bench) -> None:
    bench.app.conf.worker_send_task_events = True
    task, read = bench.task(), list[Any]()
    with bench.app.connection_for_read() as connection:
        queue = Queue(f"events-of-{bench.app.main}", get_exchange(connection), routing_key="#")(
            connection.default_channel
        )
        queue.declare()
        for remaining in (2.5, math.inf):
            conflict = LockConflict("k", "other", remaining)
            signals.lock_conflict.send(sender=task, task_id="id", key="k", conflict=conflict, policy="skip")
            event: Any = queue.get(no_ack=True)
            read.append(json.loads(event.body, parse_constant=raises(AssertionError("no JSON"))))
    told = {"type": "lock-conflict", "policy": "skip", "holder": "other"}
    assert [it["remaining"] for it in read] == [2.5, None]
    assert all(it.items() >= told.items() for it in read)
