"""The app of a flood: a task for each `lock_scope`; each of its steps, and of the broker's, is recorded."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.signals import task_postrun, task_prerun

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.options.rules import SCOPES
from celery_singleton_lock.signals import lock_conflict
from tests.storm import history
from tests.storm.broker import report_queue
from tests.storm.flood.rules import Rules

#: Seconds that a body takes.
WORK = 0.01

#: Conflicts after which a copy neither runs nor is sent again.
_FINAL = ("skip", "raise", "reject")


def make(conf: dict[str, Any], rules: Rules) -> Celery:
    """An app for workers or senders."""
    app = Celery("flood", set_as_current=False)
    app.conf.update({"broker_connection_retry_on_startup": True, **conf})
    late = {"acks_late": True, "reject_on_worker_lost": True} if rules.is_late else {}
    for scope in SCOPES:
        lock = {"base": SingletonTask, "lock_scope": scope, "lock_queue_ttl": rules.seconds_of(scope)}
        app.task(name=scope, bind=True, shared=False, lock_key=["job"], **late, **lock)(_work)
    return app


def _work(self: Any, job: str) -> None:
    _note("start", self.request.id)
    time.sleep(WORK)
    _note("end", self.request.id)


def _note(event: str, message: str) -> None:
    history.write(event, message=message, group=os.getpgrp())


def _begun(task_id: str, **_: Any) -> None:
    _note("begun", task_id)


def _over(task_id: str, **_: Any) -> None:
    _note("over", task_id)


def _refused(task_id: str, policy: str, **_: Any) -> None:
    if policy in _FINAL:
        _note("refused", task_id)


def report() -> None:
    """Make a worker record what it does with each message."""
    report_queue()
    task_prerun.connect(_begun, weak=False)
    task_postrun.connect(_over, weak=False)
    lock_conflict.connect(_refused, weak=False)


if Rules.VARIABLE in os.environ and "TEST_EVENTS" in os.environ:
    report()
    app = make(json.loads(os.environ["TEST_CONF"]), Rules.of_environment())
