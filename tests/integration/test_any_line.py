"""A signal's handler, or a fork, may come at any line of the package, and use a lock: it waits for no thread that will
never go on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery
from redis import Redis

import celery_singleton_lock
from celery_singleton_lock import DuplicateTask, Lock, SingletonTask, clock
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.runtime import write_all
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.memory import MemoryStore
from tests.bench import Bench
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Not a name: the child of a fork waits for ever at its first lookup if a thread of its parent was just at one.
HOST = "127.0.0.1"

PACKAGE = str(Path(celery_singleton_lock.__file__).parent)


Body = Callable[[], object]
Interrupt = Callable[..., None]


def traced(body: Body, at_line: Callable[[FrameType], object]) -> None:
    """Run `body`, and call `at_line` before each line of the package."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            at_line(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(before)


def stopped_at(number: int, body: Body, act: Body) -> None:
    """Run `body`, and `act` before its line of that number in the package, if there is such a line."""
    lines = count(1)
    traced(body, lambda frame: act() if next(lines) == number else None)


def numbers_of(body: Body) -> list[int]:
    """The numbers of the lines of `body` in the package: each line twice for each line that it is called from."""
    numbers, seen, lines = list[int](), Counter[object](), count(1)

    def note(frame: FrameType) -> None:
        number, back = next(lines), frame.f_back
        place = frame.f_code, frame.f_lineno, back and (back.f_code, back.f_lineno)
        seen[place] += 1
        if seen[place] <= 2:
            numbers.append(number)

    traced(body, note)
    return numbers


def handled(number: int, body: Body, other: Body) -> None:
    """As a signal's handler: in the same thread."""
    stopped_at(number, body, other)


def forked(number: int, body: Body, other: Body) -> None:
    """In a child of a fork, while the thread that is at that line is gone there."""
    is_there, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        is_there.set()
        assert goes_on.wait(LIMIT)

    def run() -> None:
        stopped_at(number, body, stop)
        is_there.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert is_there.wait(LIMIT)
    pid = os.fork()
    if pid == 0:
        status = 1
        with suppress(BaseException):
            signal.alarm(30)  # Kills a child that hangs.
            other()
            status = 0
        os._exit(status)
    goes_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, f"at line {number}"
    thread.join(LIMIT)


@pytest.fixture(params=[handled, forked])
def at_each_line(request: pytest.FixtureRequest) -> Interrupt:
    """Interrupt what the first function makes with the second one, at one line after the other."""

    def interrupt(of: Callable[[int], Body], other: Body, step: int = 1) -> None:
        other()  # What a process does only once is done.
        numbers = numbers_of(of(-1))
        assert len(numbers) > 20
        for number in numbers[:: step if request.param is handled else 7 * step]:
            request.param(number, of(number), other)

    return interrupt


def test_lock_of_a_new_client(redis_server: RedisServer, at_each_line: Interrupt) -> None:
    def use(client: Redis, name: str) -> None:
        with Lock(client, name, timeout=60, thread_local=False):  # Threads may share it: a mutex more.
            pass

    def of(number: int) -> Body:
        nonlocal client
        client = Redis(HOST, redis_server.port)
        return lambda: use(client, "its")

    client = Redis(HOST, redis_server.port)
    at_each_line(of, lambda: use(client, "the other's"))


def test_ends_that_nobody_has_heard(at_each_line: Interrupt) -> None:
    """They are to be repeated: both note that."""
    with closing(open_url("redis://127.0.0.1:1")) as store:

        def end(name: str) -> None:
            assert store.abandon(Hold(name, new_owner(), ttl=0.1)) is None

        at_each_line(lambda number: lambda: end("its"), lambda: end("the other's"))


def test_first_task_of_an_app(redis_server: RedisServer, at_each_line: Interrupt) -> None:
    def made() -> Any:
        app = Celery(set_as_current=False, broker="memory://", backend="cache+memory://")
        app.conf.singleton_lock_backend = redis_server.url_of(0)

        @app.task(base=SingletonTask, lock_scope="until_executed", on_duplicate="raise")
        def job(number: int) -> None: ...

        return job

    def of(number: int) -> Body:
        nonlocal task
        task = made()
        return lambda: task.delay(number)

    def send() -> None:
        with suppress(DuplicateTask):
            task.delay(0)

    task = made()
    at_each_line(of, send, step=7)


def test_message_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of its process carries out another one."""

    def deliver() -> None:
        assert bench.deliver(bench.send(other)) == "ran"
        write_all()

    app = Celery("any_line", set_as_current=False, broker="memory://", backend="cache+memory://")
    bench = Bench(app, monkeypatch)
    monkeypatch.undo()  # A process that lives on completes its records.
    task, other = bench.task(), bench.task()
    deliver()
    numbers = numbers_of(partial(bench.deliver, bench.send(task)))
    assert len(numbers) > 100
    for number in numbers[::5]:
        forked(number, partial(bench.deliver, bench.send(task)), deliver)


def test_first_lease_of_a_process(at_each_line: Interrupt) -> None:
    store = MemoryStore()

    def hold() -> None:
        heartbeat = Heartbeat(store)
        lease = Lease("k", new_owner(), ttl=60.0, fence=1, sent_at=clock.now())
        heartbeat.start(lease, lambda _: None)
        heartbeat.stop(lease)

    at_each_line(lambda number: hold, hold)
