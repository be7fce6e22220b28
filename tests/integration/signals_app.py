"""The app of a worker that notes each of Celery's signals about the end of a task."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.signals import task_failure, task_rejected, task_retry, task_revoked, task_success

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.options.rules import POLICIES
from tests import recording

app = Celery("tests.integration.signals_app")
app.conf.update(worker_hijack_root_logger=True, **json.loads(os.environ["TEST_CONF"]))

SIGNALS = {
    "success": task_success,
    "failure": task_failure,
    "retry": task_retry,
    "revoked": task_revoked,
    "rejected": task_rejected,
}


def _note(name: str, signal: Any) -> None:
    def note(sender: Any, request: Any = None, task_id: str | None = None, **fields: Any) -> None:
        of = [word for word in ("expired", "terminated") if fields.get(word)]
        recording.mark(" ".join(["signal", name, *of]), task_id or (request or sender.request).id)

    signal.connect(note, weak=False)


for each in SIGNALS.items():
    _note(*each)


def _body(self: Any, job: str, fails: bool = False) -> str:
    with recording.run(job, self.request.id):
        while not recording.may_end(job):
            time.sleep(0.02)
    if fails:
        raise ValueError("as told")
    return job


def _retries(self: Any, job: str) -> str:
    if not self.request.retries:
        raise self.retry(countdown=1)  # At once, Celery may store RETRY over the end of the next attempt.
    return job


for policy in POLICIES:
    app.task(name=policy, base=SingletonTask, bind=True, lock_key=["job"], lock_name="one", on_conflict=policy)(_body)
app.task(name="retried", base=SingletonTask, bind=True)(_retries)
app.task(name="queued", base=SingletonTask, bind=True, lock_key=["job"], lock_scope="until_executed")(_body)
