"""A worker without processes of its own: it carries out a message when a test says so, as often as the test says so.

The messages are those of a broker, and what they carry is nobody's business here: Celery's own strategy, request and
tracer take them, and the answer to the broker, the result and the messages that are sent meanwhile tell what happened.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.backends.base import DisabledBackend
from celery.worker import state, strategy
from kombu import Queue
from kombu.message import Message

from celery_singleton_lock import LockConflict, SingletonTask, clock
from celery_singleton_lock.testing import hold_lock
from tests.inside import settles_nothing_later
from tests.patience import LIMIT

_numbers = itertools.count()

#: The child that this thread is.
_child = threading.local()


def raises(error: BaseException) -> Callable[..., Any]:
    """What raises this."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def is_free(task: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether nobody holds the lock of this call."""
    with suppress(LockConflict), hold_lock(task, *args, **kwargs):
        return True
    return False


@dataclass(frozen=True)
class Sent:
    """A message as it lies in a queue."""

    id: str
    body: bytes
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    content: tuple[str, str]
    route: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **headers: Any) -> Sent:
        """The same with other headers."""
        return replace(self, headers={**self.headers, **headers})


class Bench:
    """One worker, its queue and its tasks.

    Attributes:
        runs: the ids of the messages whose bodies have begun, in order.
        answers: what the broker was told, in order: "ack", "reject" or "requeue".
        events: the kinds of Celery's events that the worker has sent, in order.
        held: for how many seconds the worker would have held each message that is due later.
    """

    def __init__(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app, self._monkeypatch = app, monkeypatch
        self.runs: list[str] = []
        self.answers: list[str] = []
        self.events: list[str] = []
        self.held: list[float] = []
        self._jump = 0.0
        self._lives: tuple[bool, threading.Event] | None = None
        self._is_over = threading.Event()
        #: What Celery's worker knows of the message whose child was lost last.
        self._lost: Any = None
        settles_nothing_later(monkeypatch)
        app.conf.update(task_default_queue=app.main, task_publish_retry=False, worker_hijack_root_logger=False)
        self._consumer = SimpleNamespace(
            app=app,
            hostname="bench@here",
            connection_errors=(OSError,),
            event_dispatcher=SimpleNamespace(enabled=True, send=lambda kind, **_: self.events.append(kind)),
            timer=SimpleNamespace(call_at=self._hold),
            apply_eta_task=self._begin,
            disable_rate_limits=True,
            task_buckets={},
            on_task_request=self._begin,
            _limit_task=None,
            _limit_post_eta=None,
            pool=self,
            controller=SimpleNamespace(state=state),
            qos=SimpleNamespace(increment_eventually=lambda: None),
        )

    def task(self, body: Callable[..., Any] = lambda: "ran", **options: Any) -> Any:
        """An exclusive task whose lock does not depend on its arguments."""

        def job(task: Any, *args: Any) -> Any:
            self.runs.append(task.request.id)
            return body(*args)

        options = {"lock_key": [], "bind": True, "base": SingletonTask, "shared": False, **options}
        return self.app.task(name=f"job{next(_numbers)}", **options)(job)

    def send(self, task: Any, *args: Any, **options: Any) -> Sent:
        """Send a message, and take it from the queue."""
        task.apply_async(args, **options)
        (message,) = self.queued()
        return message

    def queued(self) -> list[Sent]:
        """Take all messages from the queue."""
        found = []
        with self.app.connection_for_read() as connection:
            queue = Queue(self.app.main)(connection.default_channel)
            while (message := queue.get(no_ack=True)) is not None:
                content = (str(message.content_type), str(message.content_encoding))
                route = {key: message.delivery_info[key] for key in ("exchange", "routing_key")}
                read: Any = message.body
                body = read.encode() if isinstance(read, str) else read
                properties = {k: v for k, v in message.properties.items() if k not in ("delivery_tag", "delivery_info")}
                found.append(Sent(message.headers["id"], body, message.headers, properties, content, route))
        return found

    def put_back(self) -> Sent:
        """Take the only message from the queue."""
        (message,) = self.queued()
        return message

    def deliver(self, message: Sent, *, redelivered: bool = False) -> Any:
        """Carry a message out; returns its end as far as its caller sees it: see `end`."""
        body: Any = message.body
        delivered = Message(
            body=body,
            headers=deepcopy(dict(message.headers)),
            properties=deepcopy(dict(message.properties)),
            delivery_info={**message.route, "redelivered": redelivered},
            content_type=message.content[0],
            content_encoding=message.content[1],
            accept=None,
        )
        name = message.headers["task"] if "task" in message.headers else json.loads(message.body)["task"]
        handle: Any = strategy.default(self.app.tasks[name], self.app, self._consumer)
        handle(delivered, None, lambda *_: self.answers.append("ack"), self._reject, ())
        return self.end(message)

    def lose(self, message: Sent, *, runs: bool = True, redelivered: bool = False) -> Any:
        """Deliver a message to a child that dies before it runs anything, or where its task calls `die`, or else as it
        is about to report the end; returns Celery's request, which knows nothing of that yet.
        """
        died = threading.Event()
        self._lives = runs, died
        try:
            self.deliver(message, redelivered=redelivered)
            assert not runs or died.wait(LIMIT)
        finally:
            self._lives = None
        return self._lost

    def die(self) -> None:
        """End the child that is to be lost, in which nothing goes on from here."""
        if (died := getattr(_child, "died", None)) is not None:
            died.set()
            self._is_over.wait()
            raise SystemExit

    def terminate(self, _signal: int) -> None:
        """As what a pool has given out for a request."""

    def close(self) -> None:
        self._is_over.set()

    def end(self, message: Sent) -> Any:
        """The value; or the exception that the body raised; or the name of any other state. None without a backend."""
        if isinstance(self.app.backend, DisabledBackend):
            return None
        meta = self.app.backend.get_task_meta(message.id, cache=False)
        return meta["result"] if meta["status"] in ("SUCCESS", "FAILURE") else meta["status"]

    def stored(self, message: Sent, meta: Mapping[str, Any]) -> None:
        """The result backend has this of the message from now on."""
        backend = type(self.app.backend)  # Each thread has its own.
        found = backend.get_task_meta

        def get(own: Any, task_id: str, **options: Any) -> Any:
            return meta if task_id == message.id else found(own, task_id, **options)

        self._monkeypatch.setattr(backend, "get_task_meta", get)

    def seconds_until(self, message: Sent) -> float:
        """Seconds until the message is due."""
        return datetime.fromisoformat(message.headers["eta"]).timestamp() - clock.wall()

    def revoke(self, message: Sent) -> None:
        """As `app.control.revoke` does."""
        state.revoked.add(message.id)

    def forget(self, message: Sent) -> None:
        """As if its worker had died before it stored the result."""
        if not isinstance(self.app.backend, DisabledBackend):
            self.app.AsyncResult(message.id).forget()

    def later(self, seconds: float) -> None:
        """Put the clock forward."""
        if not self._jump:
            now, wall = clock.now, clock.wall
            self._monkeypatch.setattr(clock, "now", lambda: now() + self._jump)
            self._monkeypatch.setattr(clock, "wall", lambda: wall() + self._jump)
        self._jump += seconds

    def apply_async(
        self, target: Any, *, args: Any, accept_callback: Any, callback: Any, error_callback: Any, **_: Any
    ) -> Bench:
        """As a pool: carry out a request. A body that raises `SystemExit`, say, is a child that is gone."""
        accept_callback(os.getpid(), time.monotonic())
        if self._lives is not None:
            (runs, died), self._lives = self._lives, None

            def run() -> None:
                _child.died = died
                with suppress(SystemExit):
                    target(*args, app=self.app)
                died.set()

            if runs:
                threading.Thread(target=run, daemon=True).start()
            return self
        try:
            ended = target(*args, app=self.app)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as gone:
            error_callback(ExceptionInfo((WorkerLostError, WorkerLostError(str(gone)), gone.__traceback__)))
        else:
            sys.settrace(None)  # What a test interrupts is the task's process.
            callback(pickle.loads(pickle.dumps(ended)))
        return self

    def _hold(self, at: float, begin: Callable[..., Any], arguments: Any, **_: Any) -> None:
        self.held.append(at - time.monotonic())
        begin(*arguments)

    def _begin(self, request: Any) -> None:
        if self._lives is not None:
            self._lost = request
        request.execute_using_pool(self)

    def _reject(self, _logger: Any, _errors: Any, requeue: bool = False) -> None:
        self.answers.append("requeue" if requeue else "reject")
