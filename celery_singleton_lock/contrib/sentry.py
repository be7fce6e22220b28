"""Closes the check-in of a tick of beat's schedule that ends without a run, for Sentry's monitoring of schedules.

With `CeleryIntegration(monitor_beat_tasks=True)`, Sentry's SDK opens a check-in when beat sends a tick, and closes it
when the task succeeds, fails or is retried. A tick that was skipped, or superseded by a newer one, does none of this:
it is `ok`, since a run of its task is under way. A tick that has expired, was terminated or rejected is an `error`.

A worker imports this if `sentry_sdk` is installed; you need not switch anything on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.signals import task_revoked
from sentry_sdk.crons import MonitorStatus, capture_checkin

from celery_singleton_lock import signals
from celery_singleton_lock.task.singleton_task import SingletonTask

#: The beginning of the headers in which the SDK names the check-in of a message.
PREFIX = "sentry-monitor"


@task_revoked.connect
def _revoked(sender: Any, request: Any, terminated: bool, expired: bool, **_: Any) -> None:
    if isinstance(sender, SingletonTask):
        _close(request, MonitorStatus.ERROR if terminated or expired else MonitorStatus.OK)


@signals.lock_conflict.connect
def _refused(sender: Any, policy: str, **_: Any) -> None:
    if policy == "reject":  # Celery's `task_failure` then comes without a request.
        _close(sender.request, MonitorStatus.ERROR)


def _close(request: Any, status: str) -> None:
    headers = request.headers
    if isinstance(headers, Mapping) and f"{PREFIX}-slug" in headers:
        capture_checkin(
            monitor_slug=headers[f"{PREFIX}-slug"],
            monitor_config=headers.get(f"{PREFIX}-config"),
            check_in_id=headers.get(f"{PREFIX}-check-in-id"),
            status=status,
        )
