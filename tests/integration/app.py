"""The app that the workers of the integration tests run; set up by the environment that a test gives it."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery import Celery
from celery.backends.redis import RedisBackend
from celery.concurrency.asynpool import AsynPool
from celery.exceptions import Ignore, Reject
from celery.signals import task_success
from kombu import Queue
from kombu.common import Broadcast
from kombu.utils.encoding import ensure_bytes

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask, lock_lost, lock_released
from celery_singleton_lock.backend import Backend, Kind
from celery_singleton_lock.options import app as options_app
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.store import Place
from celery_singleton_lock.task.delivery import original_of
from celery_singleton_lock.task.turn import message_of
from celery_singleton_lock.worker import request
from tests import recording
from tests.patience import LIMIT

app = Celery("tests.integration.app")
app.conf.update(
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=True,
    **json.loads(os.environ.get("TEST_CONF", "{}")),
)

if "test_broadcast" in app.conf:
    app.conf.task_queues = [Broadcast(app.conf.test_broadcast), Queue("celery")]

if "test_without_pidfds" in app.conf:
    del os.pidfd_open

if "test_host" in app.conf:
    socket.gethostname = lambda: app.conf.test_host

if "test_held" in app.conf:
    request.HELD = app.conf.test_held
    options_app.MAX_DELAY_AMQP = app.conf.test_held

if "test_wakes_once" in app.conf:  # What loses a wake-up waits for as long as a test: who looks again, keeps its place.
    request.HELD = 2.0 * LIMIT
    _look, _seen = RedisStore.look, set()

    def _look_once(self: RedisStore, places: Sequence[Place]) -> list[int]:
        found = [0 if it.name in _seen else free for it, free in zip(places, _look(self, places), strict=True)]
        _seen.update(it.name for it in places)
        return found

    RedisStore.look = _look_once

# Celery looks every five seconds for tasks whose process has ended; tests would wait for that.
AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.5})

# Every event of a lock into the worker's log, which a failed test shows.
logging.getLogger("celery_singleton_lock").setLevel(logging.DEBUG)


@lock_lost.connect
def _lost(task_id: str, key: str, lease: Any, reason: str, **_: Any) -> None:
    recording.mark("lost", task_id)


@lock_released.connect
def _released(task_id: str, **_: Any) -> None:
    """The body has ended, and nothing is stored or sent yet: the whole worker dies."""
    if task_id.startswith("dies-unstored"):
        os.killpg(0, signal.SIGKILL)


@task_success.connect
def _stored(sender: Any, **_: Any) -> None:
    """The whole worker dies after the result is stored, before the message is acknowledged."""
    if sender.request.id.startswith("dies-stored"):
        os.killpg(0, signal.SIGKILL)


_count_part = RedisBackend.on_chord_part_return


def _fail_to_count(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a part of a chord is stored. Then, once, the whole worker dies before the part is counted, or its
    process does.
    """
    if request.id.startswith("child-uncounted") and _is_first("uncounted", request.id):
        os.kill(os.getpid(), signal.SIGKILL)
    if request.id.startswith("dies-uncounted") and _is_first("uncounted", request.id):
        os.killpg(0, signal.SIGKILL)
    return _count_part(self, request, *args, **kwargs)


def _is_first(job: str, task_id: str) -> bool:
    before = recording.Record(Path(os.environ[recording.VARIABLE])).runs(job)
    if not before:
        recording.mark(job, task_id)
    return not before


RedisBackend.on_chord_part_return = _fail_to_count


class Exclusive(SingletonTask):
    """One lock for each job, whichever of the tasks below does it."""

    lock_key = ["job"]
    lock_name = "job"


def _work(task: Any, job: str, seconds: float) -> str:
    with recording.run(job, task.request.id, task.lock.fence if isinstance(task, SingletonTask) else 0):
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not recording.may_end(job):
            time.sleep(min(left, 0.02))
    return job


@app.task(bind=True)
def plain(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task
def echo(value: Any) -> Any:
    return value


@app.task
def mark(*values: Any) -> str:
    recording.mark("mark", "mark")
    return "marked"


@app.task(bind=True, base=Exclusive)
def exclusive(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, on_conflict="retry")
def patient(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, on_conflict="rerun")
def rerunning(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, on_conflict="rerun", acks_late=True, reject_on_worker_lost=True)
def rerunning_late(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, on_conflict="replace")
def replacing(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, on_conflict="replace", acks_late=True, reject_on_worker_lost=True)
def replacing_late(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, on_conflict="retry")
def described(self: Any, job: str, *values: Any, **named: Any) -> dict[str, Any]:
    """The message as it arrived here: the parts that must be as they were sent."""
    came = original_of(self.request)
    assert came is not None
    way = [self.request.delivery_info[name] for name in ("exchange", "routing_key")]
    message = {
        "body": ensure_bytes(came.body).hex(),
        "content": [came.content_type, came.content_encoding],
        "headers": dict(came.headers),
        "properties": {name: value for name, value in came.properties.items() if name != "application_headers"},
        "queue": came.queue,
        "way": way,
        "put back": message_of(self.request).put_back_count("conflict"),
    }
    return dict(json.loads(json.dumps(message, default=repr)))


@app.task(bind=True, base=Exclusive, lock_wait=60, on_conflict="raise")
def waiting(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive)
def failing(self: Any, job: str) -> None:
    with recording.run(job, self.request.id):
        raise ValueError("as told")


@app.task(bind=True, base=Exclusive, max_retries=2, default_retry_delay=0)
def retrying(self: Any, job: str) -> str:
    with recording.run(job, self.request.id):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
    return job


@app.task(bind=True, base=Exclusive, acks_late=True)
def late(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, acks_late=True, reject_on_worker_lost=True)
def rejected_when_lost(self: Any, job: str, seconds: float = 0.05) -> str:
    """Long in its first run only."""
    before = recording.Record(Path(os.environ[recording.VARIABLE])).runs(job)
    return _work(self, job, 0.05 if any(run.task_id == self.request.id for run in before) else seconds)


@app.task(bind=True, base=Exclusive, acks_late=True, reject_on_worker_lost=True, on_conflict="retry")
def certain(self: Any, job: str, seconds: float) -> str:
    """As safe as Celery can make it: each message is to be carried out exactly once."""
    return _work(self, job, seconds)


def _kill_worker(task: Any, job: str) -> None:
    with recording.run(job, task.request.id):
        os.killpg(0, signal.SIGKILL)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)
def plain_poison(self: Any, job: str) -> None:
    _kill_worker(self, job)


@app.task(bind=True, base=Exclusive, acks_late=True, reject_on_worker_lost=True, on_conflict="retry")
def poison(self: Any, job: str) -> None:
    _kill_worker(self, job)


@app.task(bind=True, base=Exclusive, acks_late=True)
def large(self: Any, job: str, size: int) -> str:
    _work(self, job, 0.05)
    return "x" * size


@app.task(bind=True, base=Exclusive)
def holding_gil(self: Any, job: str, seconds: int) -> str:
    """Runs C code that lets no other thread of its process run."""
    with recording.run(job, self.request.id, self.lock.fence):
        ctypes.PyDLL(None).sleep(seconds)
        self.lock.check()
    return job


@app.task(bind=True, base=Exclusive, lock_retain_on_retry=True, max_retries=2)
def retaining(self: Any, job: str, countdown: float, *, succeeds: bool = True) -> str:
    with recording.run(job, self.request.id, self.lock.fence):
        if self.request.retries < 2 or not succeeds:
            raise self.retry(countdown=countdown)
    return job


@app.task(bind=True, base=Exclusive, acks_late=True)
def ending(self: Any, job: str, how: str) -> str:
    """Ends in one of the ways in which a task may end; the second run just returns."""
    again = self.request.delivery_info["redelivered"]
    with recording.run(job, self.request.id, self.lock.fence):
        if how == "ignore":
            raise Ignore
        if how == "reject":
            raise Reject("as told", requeue=False)
        if how == "requeue" and not again:
            raise Reject("as told", requeue=True)
        if how == "exit" and not again:
            os._exit(1)
        if how == "replace":
            raise self.replace(exclusive.s(job))
        if how == "replace by itself":
            raise self.replace(self.s(job, "return"))
        if how == "delay itself":
            self.apply_async((job, "return"), task_id=f"{self.request.id}-child")
        if how == "apply itself":
            return str(self.apply((job, "return")).state)
        if how == "apply itself, waiting":
            return str(self.apply((job, "return"), singleton_lock={"wait": 60}).state)
    if how == "call itself":
        return str(self(job, "return"))
    return job


@app.task(bind=True, base=Exclusive)
def retrying_when_told(self: Any, job: str, seconds: float, countdown: float) -> str:
    _work(self, job, seconds)
    if not self.request.retries:
        raise self.retry(countdown=countdown)
    return job


@app.task(bind=True, base=Exclusive)
def replaced_when_told(self: Any, job: str, seconds: float, longer: float) -> None:
    _work(self, job, seconds)
    raise self.replace(plain.s("after", longer))


@app.task(bind=True, base=Exclusive)
def exclusive_again(self: Any, job: str, seconds: float = 0.05) -> str:
    """Takes the lock of `job`, but its run counts as another job."""
    _work(self, "again", seconds)
    return job


@app.task(bind=True, base=Exclusive)
def stubborn(self: Any, job: str, seconds: float) -> str:
    """Swallows whatever is raised in it, which no task should do."""
    deadline = time.monotonic() + seconds
    with recording.run(job, self.request.id):
        while time.monotonic() < deadline:
            with suppress(BaseException):
                time.sleep(0.02)
    return job


@app.task(bind=True, base=Exclusive, soft_time_limit=1)
def limited_softly(self: Any, job: str, seconds: float) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, time_limit=1)
def limited_hard(self: Any, job: str, seconds: float) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive)
def blocking(self: Any, job: str, seconds: float) -> str:
    """One blocking call, without a bytecode in between."""
    with recording.run(job, self.request.id):
        time.sleep(seconds)
    return job


#: Runs of `counting_threads` wait for each other.
_all_here = threading.Barrier(200)


@app.task(bind=True, base=Exclusive)
def counting_threads(self: Any, job: str, seconds: float) -> int:
    """How many threads look after leases in the process, once all runs have started and gone on for that long."""
    with recording.run(job, self.request.id, self.lock.fence):
        _all_here.wait(LIMIT)
        time.sleep(seconds)
        return sum(it.name in ("singleton-lock-heartbeat", "singleton-lock-watchdog") for it in threading.enumerate())


@app.task(bind=True, base=Exclusive, on_lock_lost="warn")
def warned(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, lock_limit=2, lock_wait=60)
def paired(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=Exclusive, lock_limit=2, acks_late=True)
def late_paired(self: Any, job: str, seconds: float = 0.05) -> str:
    return _work(self, job, seconds)


def slow_key(arguments: dict[str, Any]) -> str:
    """A user's callable that takes its time, and records where it is called."""
    recording.mark("key", str(os.getpid()))
    deadline = time.monotonic() + arguments["key_takes"]
    while time.monotonic() < deadline and not recording.may_end("key"):
        time.sleep(0.02)
    return str(arguments["job"])


@app.task(bind=True, base=SingletonTask, lock_key=slow_key, lock_name="slow-key")
def slowly_keyed(self: Any, job: str, key_takes: float, seconds: float) -> str:
    return _work(self, job, seconds)


@app.task(bind=True, base=SingletonTask, lock_key=lambda _: os.urandom(8).hex(), lock_name="unstable")
def unstably_keyed(self: Any, job: str) -> str:
    """Each call has its own lock: nothing keeps two calls apart."""
    return _work(self, job, 0.05)


def unregister_refused() -> None:
    """Leave out the tasks with which no worker starts on a Redlock."""
    with suppress(ValueError):  # The worker reports a wrong URL.
        if Backend.parse(app.conf.get("singleton_lock_backend", "memory://")).kind is Kind.REDLOCK:
            for refused in [name for name, task in app.tasks.items() if _needs_one_server(task)]:
                app.tasks.unregister(refused)


def _needs_one_server(task: Any) -> bool:
    found = {getattr(task, name, None) for name in ("lock_limit", "on_conflict", "on_duplicate")}
    return bool(found & {2, "rerun", "replace"})


unregister_refused()
