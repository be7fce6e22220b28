"""What a process writes to the journal: everything once, and without blocking anybody; and what it warns of."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleton_lock import cli, clock, lock_blocked
from celery_singleton_lock.outage import MUTE
from celery_singleton_lock.runtime import write_all
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench
from tests.contract.forging import ForgingProxy
from tests.inside import writes_no_journal
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Entries that wait until they are written.
MOST = 20


@pytest.fixture
def app(app: Celery, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Celery:
    writes_no_journal(monkeypatch, most=MOST)
    app.conf.singleton_lock_backend = redis_server.url_of(0)
    app.conf.singleton_lock_blocked_after = 3
    return app


@pytest.fixture
def blocked() -> Iterator[list[dict[str, Any]]]:
    """What the signal says of refusals in a row."""
    heard: list[dict[str, Any]] = []

    def receive(**details: Any) -> None:
        heard.append(details)

    lock_blocked.connect(receive)
    yield heard
    lock_blocked.disconnect(receive)


def refuse(bench: Bench, task: Any, times: int = 1) -> None:
    """Deliver messages while another task has their lock."""
    with hold_lock(task):
        for _ in range(times):
            bench.deliver(bench.send(task))


def counts(task: Any) -> dict[str, Any]:
    """What `celery locks stats` shows of a task."""
    context = CLIContext(app=task.app, no_color=True, workdir=None)
    shown = CliRunner().invoke(cli.locks, ["stats", "--json"], obj=context)
    assert shown.exit_code == 0, shown.output
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    found: list[dict[str, Any]] = [line for line in lines if line.get("task") == task.name]
    return found[0] if found else {}


def test_each_kind_of_entry_is_counted_once(bench: Bench) -> None:
    def body() -> str:
        bench.deliver(message, redelivered=True)
        clock.sleep(0.3)
        return "ran"

    policies = ["retry", "raise", "skip", "skip"]
    task = bench.task(body, acks_late=True, on_conflict=lambda task, conflict: policies.pop())
    message = bench.send(task)
    assert bench.deliver(message) == "ran"
    bench.later(11.0)
    bench.deliver(message, redelivered=True)
    bench.queued()
    refuse(bench, task, 4)
    bench.queued()
    for _ in range(2):
        write_all()
    found = counts(task)
    assert found["runs"] == {"SUCCESS": 1}
    assert found["conflicts"] == {"skip": 2, "raise": 1, "retry": 1}
    assert found["redeliveries"] == {"stand-by": 1, "repeat": 1}
    assert found["held"] >= 0.25


def test_failed_write_is_repeated_later(app: Celery, own_redis: RedisServer, bench: Bench) -> None:
    app.conf.singleton_lock_backend = own_redis.url_of(0)
    task = bench.task()
    bench.deliver(bench.send(task))
    own_redis.kill()
    write_all()
    own_redis.restart()
    bench.later(MUTE)
    bench.deliver(bench.send(task))
    write_all()
    assert counts(task)["runs"] == {"SUCCESS": 2}


def test_forked_child_reports_only_its_own_entries(bench: Bench) -> None:
    task = bench.task()
    refuse(bench, task)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            refuse(bench, task)
            write_all()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert counts(task)["conflicts"] == {"skip": 1}
    write_all()
    assert counts(task)["conflicts"] == {"skip": 2}


def test_no_server_is_asked_if_there_is_nothing_to_write(app: Celery, bench: Bench) -> None:
    """A process that ends does not wait for a silent one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        app.conf.singleton_lock_backend = f"redis://127.0.0.1:{server.getsockname()[1]}"
        assert bench.task().lock_key_of()  # Its settings are read.
        write_all()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_process_that_ends_waits_for_a_silent_server_once(app: Celery, own_redis: RedisServer, bench: Bench) -> None:
    """As its worker ends, and then the interpreter."""
    with ForgingProxy(own_redis.port) as proxy:
        app.conf.singleton_lock_backend = f"redis://127.0.0.1:{proxy.port}"
        task = bench.task()
        bench.deliver(bench.send(task))
        proxy.forge(b"", b"-LOADING it is not ready\r\n")
        write_all()
        asked = proxy.answered
        write_all()
        assert proxy.answered == asked > 0


def test_nothing_is_written_without_a_journal(bench: Bench) -> None:
    bench.app.conf.singleton_lock_journal = 0
    task = bench.task()
    refuse(bench, task)
    write_all()
    assert counts(task) == {}


def test_foreign_counts_are_left_out(bench: Bench, redis_server: RedisServer) -> None:
    task = bench.task()
    refuse(bench, task)
    write_all()
    before = counts(task)
    with redis_server.client() as client:
        hashes = [key for key in client.scan_iter() if client.type(key) == "hash"]
        assert hashes
        for key in hashes:
            client.hset(key, mapping={"x": 1, '["a"]': 2, f'["conflicts", "{task.name}", 3]': 4})
    assert counts(task) == before


class TestWarnings:
    def test_repeated_refusals_are_reported(
        self, bench: Bench, blocked: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
    ) -> None:
        """After three, six and twelve of them, not each time."""
        task = bench.task()
        with hold_lock(task):
            bench.later(5.0)
            for _ in range(14):
                bench.deliver(bench.send(task))
                write_all()
        assert [it["in_a_row"] for it in blocked] == [3, 6, 12]
        assert blocked[0]["sender"] == task
        assert blocked[0]["key"] == task.lock_key_of()
        assert blocked[0]["holder"].startswith("hold-lock")
        assert 5.0 <= blocked[0]["held"] < 5.0 + LIMIT
        assert f"task {task.name} was refused 3 times in a row: {task.lock_key_of()}" in caplog.text
        assert f"has been held by task {blocked[0]['holder']} on" in caplog.text
        write_all()
        assert counts(task)["blocked"] == 3

    def test_run_in_between_resets_the_count(self, bench: Bench, blocked: list[dict[str, Any]]) -> None:
        task = bench.task()
        for _ in range(3):
            refuse(bench, task, 2)
            bench.deliver(bench.send(task))
        write_all()
        assert blocked == []

    def test_zero_disables_the_warning(self, bench: Bench, blocked: list[dict[str, Any]]) -> None:
        bench.app.conf.singleton_lock_blocked_after = 0
        refuse(bench, bench.task(), 20)
        write_all()
        assert blocked == []
