"""Messages that reach no task: Celery drops those that it cannot read, or whose task the worker does not know.

A rolling deploy causes some; the locks that they brought with them end.
"""

from __future__ import annotations

from typing import Any

from celery.signals import task_rejected, task_unknown
from celery.utils.log import get_logger

from celery_singleton_lock.task.header import of_message
from celery_singleton_lock.task.queue_lock import lock_in
from celery_singleton_lock.worker.request import end_brought

logger = get_logger(__name__)


@task_unknown.connect
@task_rejected.connect
def _end_brought(sender: Any, message: Any, **_: Any) -> None:
    try:
        headers = message.headers or {}
        end_brought(sender.app, lock_in(of_message(headers), sender.app, headers.get("task", "")))
    except Exception as error:  # noqa: BLE001 - what a message carries may be anything
        logger.debug("the worker cannot tell which lock a message brought that reaches no task: %r", error)
