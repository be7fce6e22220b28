"""Conflicts and losses as Celery events, for `celery events`, Flower, and other listeners in a cluster.

If the worker sends task events (`-E`, or `worker_send_task_events`), it sends `lock-conflict` and `lock-lost`, each
with the task's `uuid`, `name` and `key`. They are not `task-…` events: watchers make the task's state from those, and
would show a state that no later event ends.
"""

from __future__ import annotations

import math
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import signals
from celery_singleton_lock.errors import LockConflict

logger = get_logger(__name__)


@signals.lock_conflict.connect
def _conflict(sender: Any, task_id: str, key: str, conflict: LockConflict, policy: str, **_: Any) -> None:
    remaining = None if math.isinf(conflict.remaining) else conflict.remaining  # JSON has no infinity.
    details = {"policy": policy, "holder": conflict.task_id, "remaining": remaining}
    _send("lock-conflict", sender, task_id, key, **details)


@signals.lock_lost.connect
def _lost(sender: Any, task_id: str, key: str, reason: str, **_: Any) -> None:
    _send("lock-lost", sender, task_id, key, reason=reason)


def _send(kind: str, task: Any, task_id: str, key: str, **details: Any) -> None:
    app = task.app
    if task_id is None or not app.conf.worker_send_task_events:
        return
    try:
        with app.events.default_dispatcher(hostname=task.request.hostname) as dispatcher:
            dispatcher.send(kind, uuid=task_id, name=task.name, key=key, retry=False, **details)
    except Exception as error:  # noqa: BLE001 - whatever the broker says, the task goes on
        logger.debug("event %s was not sent: %r", kind, error)
