"""The app of the storm: tasks of every kind that write their history, and a broker that reports what it has."""

from __future__ import annotations

import ctypes
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
from celery.signals import worker_ready
from redis import Redis

from celery_singleton_lock import LockConflict, LockSuperseded
from celery_singleton_lock.signals import lock_conflict
from tests.storm import history, mutants, newest
from tests.storm.borrowed import JOINING
from tests.storm.broker import report_queue
from tests.storm.waiting import KEEPS_OUT

#: Seconds between two lines of a body.
BEAT = 0.1

#: Variables that name the mutant of the package that a worker runs, and the package that locks its tasks.
MUTANT, PACKAGE = "STORM_MUTANT", "STORM_PACKAGE"

#: Tasks that are locked when they are sent, and their options.
SCOPED: Mapping[str, Mapping[str, Any]] = {
    "once": {"lock_scope": "until_executed", "on_conflict": "retry"},
    "behind": {"lock_scope": "until_and_while_executing", "on_conflict": "retry"},
    "waiting": {"lock_scope": "until_executing"},
    "each": {"lock_scope": "until_expired", "lock_queue_ttl": KEEPS_OUT},
}

#: Tasks whose newest message alone is to run, by policy.
NEWEST = {"rerun": newest.RERUN, "replace": newest.REPLACE}

#: Settings that make a message come back whichever process dies: without them Celery itself would lose some.
SURE = {"bind": True, "shared": False, "acks_late": True, "reject_on_worker_lost": True}


def make(conf: Mapping[str, Any], package: str = "") -> Celery:
    """An app for workers or senders."""
    app = Celery("storm", set_as_current=False)
    app.conf.update({"worker_prefetch_multiplier": 1, "broker_connection_retry_on_startup": True, **conf})
    if package:
        _add_tasks(app, _way_of(package, round(conf["singleton_lock_ttl"])))
    else:
        from celery_singleton_lock import SingletonTask

        _add_tasks(app, {"base": SingletonTask, "lock_key": ["key"], "lock_name": "storm"})
        _add_exclusive(app, {"base": SingletonTask, "lock_key": ["key"], "lock_name": "storm"})
        for name in SCOPED:
            _add_scoped(app, name, {"base": SingletonTask, "lock_key": ["key"]})
    return app


def _way_of(package: str, seconds: int) -> Mapping[str, Any]:
    from benchmarks.tasks import WAYS

    return WAYS[package](seconds)


def _add_tasks(app: Celery, way: Mapping[str, Any]) -> None:
    """Add the tasks that every package can have."""

    @app.task(name="work", **SURE, **way)
    def work(self: Any, key: str, seconds: float) -> str:
        return _work(self, key, seconds)


def _add_exclusive(app: Celery, way: Mapping[str, Any]) -> None:
    @app.task(name="patient", on_conflict="retry", **SURE, **way)
    def patient(self: Any, key: str, seconds: float) -> str:
        return _work(self, key, seconds)

    @app.task(name="deciding", on_conflict=_decide, **SURE, **way)
    def deciding(self: Any, key: str, seconds: float) -> str:
        return _work(self, key, seconds)

    @app.task(name="retrying", on_conflict="retry", max_retries=2, **SURE, **way)
    def retrying(self: Any, key: str, seconds: float) -> str:
        _work(self, key, seconds, last=self.request.retries == 1)
        if self.request.retries == 0:
            raise self.retry(countdown=0.5)
        return str(self.request.id)

    @app.task(name="retaining", on_conflict="retry", max_retries=2, lock_retain_on_retry=True, **SURE, **way)
    def retaining(self: Any, key: str, seconds: float) -> str:
        _work(self, key, seconds, last=self.request.retries == 1)
        if self.request.retries == 0:
            raise self.retry(countdown=0.5)
        return str(self.request.id)

    @app.task(name=JOINING, on_conflict="join", **SURE, **way)
    def joining(self: Any, key: str, seconds: float) -> str:
        return _work(self, key, seconds)

    if ";" not in app.conf.singleton_lock_backend:  # A Redlock refuses these.

        @app.task(name="paired", **SURE, **{**way, "lock_name": "pair"}, lock_limit=2, on_conflict="retry")
        def paired(self: Any, key: str, seconds: float) -> str:
            return _work(self, key, seconds, limit=2)

        for policy, name in NEWEST.items():
            app.task(name=name, on_conflict=policy, **SURE, **way)(_work)

    @app.task(name="hogging", on_conflict="retry", **SURE, **way)
    def hogging(self: Any, key: str, seconds: int) -> str:
        """Runs C code that lets no other thread of its process run."""
        with _attempt(self, key):
            ctypes.PyDLL(None).sleep(seconds)
        return str(self.request.id)

    @app.task(name="tick", **SURE, **way)
    def tick(self: Any, key: str) -> None:
        with _attempt(self, key, due=self.request.get("singleton_lock", {}).get("due")):
            pass


def _add_scoped(app: Celery, name: str, way: Mapping[str, Any]) -> None:
    """Add a task that is locked when it is sent."""
    is_exclusive = "on_conflict" in SCOPED[name]

    @app.task(name=name, max_retries=2, **SURE, **way, **SCOPED[name])
    def scoped(self: Any, key: str, seconds: float) -> str:
        retries = key == "j1" and self.request.retries == 0
        job = f"{name}:{key}" if is_exclusive else f"{name}:{key}:{self.request.id}"
        _work(self, job, seconds, last=not retries)
        if retries:
            raise self.retry(countdown=0.5)
        return str(self.request.id)


def _decide(task: Any, conflict: LockConflict) -> str:
    return "raise"


def _work(task: Any, key: str, seconds: float, *, limit: int = 1, last: bool = True) -> str:
    """A body; its value says whose run it was."""
    with _attempt(task, key, limit=limit, last=last) as beat:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, BEAT))
            beat()
    return str(task.request.id)


def _attempt(task: Any, key: str, *, limit: int = 1, last: bool = True, **fields: object) -> Any:
    fence = task.lock.fence if hasattr(task, "lock") else 0
    retries = task.request.retries
    return history.attempt(key, task.request.id, fence=fence, limit=limit, last=last, retries=retries, **fields)


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
    """An end as it is in the history: with the message whose run it was, or the newer message."""
    whose = {"value": result} if state == states.SUCCESS else {}
    newer = {"by": result.task_id} if isinstance(result, LockSuperseded) else {}
    return {"state": state, "error": type(result).__name__, **whose, **newer}


def _met(task_id: str, policy: str, **_: Any) -> None:
    if policy in NEWEST:
        history.write("met", message=task_id)


def _report_records() -> None:
    """Make a refusal, or a stopped run, note that its end is recorded: it is reported some time later."""
    from celery_singleton_lock.task import refusal

    record = refusal._record_at_store

    def recorded(acquisition: Any, *args: Any) -> Any:
        copy = record(acquisition, *args)
        if copy is None:
            history.write("recorded", message=acquisition.execution.request.id)
        return copy

    refusal._record_at_store = recorded


@worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    """Notify the storm, which waits at this list."""
    with Redis.from_url(os.environ["TEST_EVENTS"]) as client:
        client.lpush(f"ready:{sender.hostname}", 1)


if history.HOST in os.environ:
    socket.gethostname = partial(os.environ.__getitem__, history.HOST)
    # Celery looks every five seconds for tasks whose process has ended.
    AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.5})
    mutants.apply(os.environ.get(MUTANT, ""))
    _report_ends()
    report_queue()
    _report_records()
    lock_conflict.connect(_met, weak=False)
    app = make(json.loads(os.environ["TEST_CONF"]), os.environ.get(PACKAGE, ""))
