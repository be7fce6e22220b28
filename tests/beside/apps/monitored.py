"""An app whose schedule Sentry monitors; what the SDK would send to Sentry is written to the file in TEST_CHECK_INS."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import sentry_sdk
from celery import Celery
from celery.schedules import schedule
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.transport import Transport

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.options.rules import POLICIES
from tests import appended, recording


class _ToFile(Transport):
    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if item.type == "check_in":
                found = item.payload.json
                line = {name: found[name] for name in ("check_in_id", "monitor_slug", "status")}
                appended.append(os.environ["TEST_CHECK_INS"], line)


class Often(schedule):
    """Due each second; Sentry, which monitors whole minutes only, takes it for one of a minute."""

    @property
    def seconds(self) -> float:
        return 60.0


sentry_sdk.init(
    dsn="http://key@127.0.0.1:9/1", transport=_ToFile, integrations=[CeleryIntegration(monitor_beat_tasks=True)]
)

app = Celery("tests.beside.apps.monitored")
app.conf.update(worker_hijack_root_logger=True, **json.loads(os.environ["TEST_CONF"]))
app.conf.beat_schedule = {
    name: {"task": name, "schedule": Often(1), "args": (name,)} for name in json.loads(os.environ["TEST_SCHEDULE"])
}


def _body(self: Any, job: str) -> None:
    with recording.run(job, self.request.id):
        while not recording.may_end(job):
            time.sleep(0.02)


for policy in POLICIES:
    app.task(name=policy, base=SingletonTask, bind=True, lock_key=[], on_conflict=policy)(_body)
late = app.task(name="late", base=SingletonTask, bind=True, lock_key=[], on_conflict="retry", expires=3)(_body)
