"""A signal's handler may come at any line of the package, and use a lock: it must not wait for its own thread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from redis import Redis

import celery_singleton_lock
from celery_singleton_lock import DuplicateTask, Lock, SingletonTask
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.testing import RedisServer

PACKAGE = str(Path(celery_singleton_lock.__file__).parent)


def interrupted_at(number: int, body: Callable[[], object], handler: Callable[[], object]) -> bool:
    """Run `body`, and `handler` before its line of that number in the package; whether there was such a line."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(before)
    return lines >= number


def at_each_line(of: Callable[[int], Callable[[], object]], handler: Callable[[], object], step: int = 1) -> int:
    """How many lines there were; `of` makes something new to interrupt."""
    for number in count(1, step):
        if not interrupted_at(number, of(number), handler):
            return number
    raise AssertionError


@pytest.mark.timeout(120)
def test_lock_of_a_new_client(redis_server: RedisServer) -> None:
    def use(client: Redis, name: str) -> None:
        with Lock(client, name, timeout=60):
            pass

    def of(number: int) -> Callable[[], object]:
        nonlocal client
        client = Redis(port=redis_server.port)
        return lambda: use(client, "its")

    client = Redis(port=redis_server.port)
    assert at_each_line(of, lambda: use(client, "the handler's")) > 50


@pytest.mark.timeout(120)
def test_ends_that_nobody_has_heard() -> None:
    """They are to be repeated: both note that."""
    with closing(open_url("redis://127.0.0.1:1")) as store:

        def end(name: str) -> None:
            assert store.abandon(Hold(name, new_owner(), ttl=0.1)) is None

        assert at_each_line(lambda number: lambda: end("its"), lambda: end("the handler's")) > 50


@pytest.mark.timeout(120)
def test_first_task_of_an_app(redis_server: RedisServer) -> None:
    def made() -> Any:
        app = Celery(set_as_current=False, broker="memory://", backend="cache+memory://")
        app.conf.singleton_lock_backend = redis_server.url_of(0)

        @app.task(base=SingletonTask, lock_scope="until_executed", on_duplicate="raise")
        def job(number: int) -> None: ...

        return job

    def of(number: int) -> Callable[[], object]:
        nonlocal task
        task = made()
        return lambda: task.delay(number)

    def handle() -> None:
        with suppress(DuplicateTask):
            task.delay(0)

    task = made()
    assert at_each_line(of, handle, 7) > 50
