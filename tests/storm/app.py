"""The app of the storm: tasks of every kind that write their history, and a broker that reports what it has."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery, states
from celery.backends.redis import RedisBackend
from celery.concurrency.asynpool import AsynPool

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.options.rules import SCOPES, UNTIL_EXECUTING, UNTIL_EXPIRED
from tests.storm import history, mutants
from tests.storm.broker import report_queue

#: Seconds between two lines of a body.
BEAT = 0.1

#: The variable that names the mutant of the package that a worker runs.
MUTANT = "STORM_MUTANT"

#: The tasks, and their options; those of a `lock_scope` have its name, and are not sent without a lock.
TASKS: Mapping[str, Mapping[str, Any]] = {
    "work": {},
    "joining": {"on_conflict": "join"},
    "replacing": {"on_conflict": "replace"},
    "paired": {"on_conflict": "retry", "lock_limit": 2, "lock_name": "pair"},
    "tick": {},
    **{scope: {"lock_scope": scope, "lock_name": scope, "on_send_unavailable": "raise"} for scope in SCOPES},
}

#: Tasks that a Redlock refuses.
ONE_SERVER = ("replacing", "paired")

#: Tasks whose messages may run at once: only while they wait is one of them the only one.
NOT_ALONE = (UNTIL_EXECUTING, UNTIL_EXPIRED)

#: Settings that make a message come back whichever process dies: without them Celery itself would lose some.
SURE = {"bind": True, "shared": False, "acks_late": True, "reject_on_worker_lost": True}


def make(conf: Mapping[str, Any]) -> Celery:
    """An app for workers or senders."""
    app = Celery("storm", set_as_current=False)
    app.conf.update({"worker_prefetch_multiplier": 1, "broker_connection_retry_on_startup": True, **conf})
    for name, options in TASKS.items():
        if name not in ONE_SERVER or ";redis:" not in app.conf.singleton_lock_backend:
            way = {"base": SingletonTask, "lock_key": ["key"], "lock_name": "storm", **options}
            app.task(name=name, **SURE, **way)(_body)
    return app


def _body(self: Any, key: str, seconds: float = 0.0) -> str:
    """Its value says whose run it was."""
    job = f"{self.lock_name}:{key}" + (f":{self.request.id}" if self.name in NOT_ALONE else "")
    due = self.request.get("singleton_lock", {}).get("due")
    about = {"fence": self.lock.fence, "limit": TASKS[self.name].get("lock_limit", 1), "due": due}
    with history.attempt(job, self.request.id, **about) as beat:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, BEAT))
            beat()
    return str(self.request.id)


def _report_ends() -> None:
    """Make the result backend record each end that it is given."""
    store = RedisBackend.store_result

    def told(self: Any, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        found = store(self, task_id, result, state, *args, **kwargs)
        if state in states.READY_STATES:
            history.write("told", message=task_id, **end_of(result, state))
        return found

    RedisBackend.store_result = told


def end_of(result: Any, state: str) -> dict[str, Any]:
    """An end as it is in the history: a success says whose run it was."""
    return {"state": state, "of": result if state == states.SUCCESS else None, "error": type(result).__name__}


if history.HOST in os.environ:
    socket.gethostname = partial(os.environ.__getitem__, history.HOST)
    # Celery looks every five seconds for tasks whose process has ended.
    AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.5})
    mutants.apply(os.environ.get(MUTANT, ""))
    _report_ends()
    report_queue()
    app = make(json.loads(os.environ["TEST_CONF"]))
