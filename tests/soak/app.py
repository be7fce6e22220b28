"""The app of the soak: tasks that do nothing, on hot and cold keys."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask


def make(conf: Mapping[str, Any]) -> Celery:
    """An app for the workers and for the sender."""
    app = Celery("soak", set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True, task_acks_late=True, **conf)
    way = {"base": SingletonTask, "lock_key": ["key"], "lock_name": "soak", "shared": False}

    @app.task(name="skipped", **way)
    def skipped(key: str) -> str:
        return key

    @app.task(name="waited", lock_wait=1.0, on_conflict="retry", **way)
    def waited(key: str) -> str:
        return key

    @app.task(name="shared", **{**way, "lock_name": "some"}, lock_limit=3, on_conflict="retry", ignore_result=True)
    def shared(key: str) -> str:
        return key

    return app


if "TEST_CONF" in os.environ:
    app = make(json.loads(os.environ["TEST_CONF"]))
