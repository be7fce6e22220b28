"""Locks of messages that no longer exist are found, by asking broker and workers, and freed; no others are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import DuplicateResult, clock
from celery_singleton_lock.confirmations import UNCONFIRMED_TTL
from celery_singleton_lock.diagnosis import orphans
from celery_singleton_lock.diagnosis.doctor import diagnose
from celery_singleton_lock.keys.key import key_of_queue
from tests.integration import copies
from tests.integration.conftest import LONG, Shop, until
from tests.integration.operators import ask
from tests.integration.queued_tasks import define
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.rabbitmq import MISSING, RabbitMQ
from tests.redis_server import RedisServer

#: Seconds since the messages of these tests were sent, according to their locks.
AGE = 120.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one look follow soon after the other."""
    monkeypatch.setattr(orphans, "GAP", 0.2)


@pytest.fixture
def tasks(shop: Shop) -> SimpleNamespace:
    return defined(shop)


def defined(shop: Shop) -> SimpleNamespace:
    """The tasks of an app; their messages have their locks for longer than a test."""
    tasks = define(shop.app)
    for task in tasks.scopes.values():
        task.lock_queue_ttl = 3600.0
    return tasks


@contextmanager
def long_ago() -> Iterator[None]:
    """Pretend that what is sent meanwhile was sent some time ago."""
    real = clock.wall
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "wall", lambda: real() - AGE)
        yield


def start(shop: Shop, **options: Any) -> Worker:
    (worker,) = shop.start("one", app="tests.integration.queued_app", **options)
    return worker


def send(task: Any, job: str, seconds: float = LONG, **options: Any) -> str:
    """Send a message; returns the key of its lock."""
    with long_ago():
        result = task.apply_async((job, seconds), **options)
    assert not isinstance(result, DuplicateResult)
    return key_of_queue(task.lock_key_of(job, seconds))


def queued(shop: Shop) -> set[str]:
    return {key.removesuffix(":run") for key in shop.held() if ":queue" in key}


def are_confirmed(shop: Shop) -> bool:
    """Whether the locks of all messages last as long as the messages may wait."""
    with shop.locks() as client:
        return all(client.ttl(f"{key}:run") > UNCONFIRMED_TTL for key in queued(shop))


def lose(shop: Shop) -> None:
    """Lose one queue's messages once their locks are confirmed: a lock renewed between two looks counts as alive."""
    until(lambda: are_confirmed(shop))
    with broker(shop) as client:
        client.delete("doomed")


def clear(shop: Shop, *options: str) -> dict[str, dict[str, Any]]:
    """The output of `celery locks clear --orphaned`, by key."""
    said = ask(shop, "clear", "--orphaned", "--yes", "--json", *options)
    assert said.exit_code in (0, 1), said.output
    return {line["key"]: line for line in map(json.loads, said.stdout.splitlines())}


def broker(shop: Shop) -> Redis:
    return Redis.from_url(shop.conf["broker_url"])


def test_only_locks_without_a_message_are_freed(shop: Shop, tasks: SimpleNamespace) -> None:
    job, orphaned, kept = tasks.until_executed, set(), set()
    orphaned |= {send(job, f"purged {number}") for number in range(3)}
    assert shop.app.control.purge() == 3
    orphaned |= {send(job, "deleted", queue="doomed"), send(tasks.until_and_while_executing, "deleted", queue="doomed")}
    kept |= {send(tasks.until_expired, "by time", queue="doomed")}
    lose(shop)
    kept |= {send(job, "waits", queue="elsewhere"), send(job, "urgent", queue="elsewhere", priority=9)}
    worker = start(shop, concurrency=2)
    kept |= {send(job, "runs"), send(tasks.late, "runs late")}
    shop.record.wait_for(starts=2)
    kept |= {send(job, "due later", countdown=3600), send(job, "prefetched")}
    until(lambda: worker.log.count("] received") == 4)
    assert queued(shop) == orphaned | kept

    told = clear(shop)
    assert told.keys() == orphaned, "the others are not mentioned"
    assert {line["why"] for line in told.values()} == {"its message no longer exists"}
    assert all(line["freed"] and line["task_id"] and line["held_for"] >= AGE for line in told.values())
    assert queued(shop) == kept
    assert send(job, "purged 1", queue="elsewhere") in orphaned, "it can be sent again"


def test_messages_that_wait_in_many_queues_are_found(
    shop: Shop, tasks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_singleton_lock.diagnosis.messages.PAGE", 3)
    shop.app.conf.broker_transport_options = {"global_keyprefix": "shop[1]:"}
    shop.conf["broker_transport_options"] = shop.app.conf.broker_transport_options
    kept = {send(tasks.until_executed, f"{number}", queue=f"queue {number % 3}") for number in range(20)}
    with broker(shop) as client:
        assert client.llen("shop[1]:queue 1") == 7
        assert clear(shop) == {}
        assert queued(shop) == kept
        until(lambda: are_confirmed(shop))
        client.delete("shop[1]:queue 1")
    assert len(clear(shop)) == 7


def test_nothing_is_freed_by_a_dry_run_or_without_a_yes(shop: Shop, tasks: SimpleNamespace) -> None:
    key = send(tasks.until_executed, "report", queue="doomed")
    lose(shop)
    said = clear(shop, "--dry-run")[key]
    assert (said["freed"], said["why"]) == (False, "would be freed: its message no longer exists")
    asked = ask(shop, "clear", "--orphaned", answer="n\n")
    assert asked.exit_code == 1
    assert "1 of 1 messages that have a lock no longer exist" in asked.stderr
    assert queued(shop) == {key}


def test_message_that_was_just_sent_is_left_alone(shop: Shop, tasks: SimpleNamespace) -> None:
    tasks.until_executed.apply_async(("report",), queue="doomed")
    lose(shop)
    assert clear(shop) == {}
    assert len(queued(shop)) == 1


@pytest.mark.slow
def test_nothing_is_freed_while_a_live_worker_is_silent(
    redis_server: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    shop = shop_on(redis_server, singleton_lock_ttl=60.0)
    tasks = defined(shop)
    orphan = send(tasks.until_executed, "report", queue="doomed")
    lose(shop)
    worker = start(shop)
    tasks.while_executing.delay("other", LONG)
    shop.record.wait_for(starts=1)
    worker.pause()
    try:
        said = ask(shop, "clear", "--orphaned", "--yes")
        assert said.exit_code == 1
        assert f"In doubt: worker {worker.name} does not answer." in said.stderr
        assert queued(shop) == {orphan}
    finally:
        worker.resume()
    assert clear(shop)[orphan]["freed"]


def test_nothing_is_freed_while_the_broker_does_not_answer(shop: Shop, tasks: SimpleNamespace) -> None:
    key = send(tasks.until_executed, "report")
    until(lambda: are_confirmed(shop))
    shop.conf["broker_url"] = "redis://127.0.0.1:1"
    assert clear(shop)[key]["freed"] is False


def test_lock_of_a_message_is_shown_and_released(shop: Shop, tasks: SimpleNamespace) -> None:
    key = send(tasks.until_executed, "report", queue="doomed")
    base = key.removesuffix(":queue")
    (row,) = ask(shop, "list").stdout.splitlines()[1:]
    assert row.split()[0] == base
    assert " (queued) " in row
    assert json.loads(ask(shop, "list", "--json").stdout)["scope"] == "queued"
    shown = ask(shop, "show", base).stdout
    assert "queued   message of task " in shown
    assert "held by  nobody" in shown
    refused = ask(shop, "release", key, "--yes")
    assert refused.exit_code == 1
    assert "its message waits or runs" in refused.stdout
    lose(shop)
    freed = ask(shop, "release", key, "--yes")
    assert (freed.exit_code, freed.stdout.split()[0]) == (0, "freed")
    assert queued(shop) == set()


def test_forced_release_lets_another_message_be_sent(shop: Shop, tasks: SimpleNamespace) -> None:
    key = send(tasks.until_executed, "report")
    assert ask(shop, "release", key, "--force", "--yes").exit_code == 0
    assert send(tasks.until_executed, "report") == key
    start(shop)
    shop.record.wait_for(starts=1)
    shop.record.let_end("report")
    until(lambda: queued(shop) == set())


def test_doctor_finds_them(shop: Shop, tasks: SimpleNamespace) -> None:
    orphan = send(tasks.until_executed, "report", queue="doomed")
    lose(shop)
    send(tasks.until_executed, "other", queue="elsewhere")
    diagnosis = diagnose(shop.app, timeout=1.0)
    (found,) = [finding for finding in diagnosis.findings if "no longer exist" in finding.text]
    assert (found.severity, found.subject) == ("warning", orphan)
    assert len(queued(shop)) == 2, "it only looks"


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_on_rabbitmq_nothing_is_freed_while_anything_waits(
    rabbitmq: RabbitMQ, redis_server: RedisServer, shop_on: Callable[..., Shop], tmp_path: Path
) -> None:
    queue = os.path.basename(tmp_path)
    names = (queue, f"{queue}-other")
    shop = shop_on(
        redis_server,
        broker_url=rabbitmq.url,
        task_queues=copies.queues(*names, exchange_type="direct", queue_type="classic"),
        task_default_queue=queue,
        singleton_lock_ttl=60.0,  # The running task is frozen for a while.
    )
    tasks = defined(shop)
    orphan = send(tasks.until_executed, "purged", queue=queue)
    with shop.app.connection_for_write() as connection:
        until(lambda: connection.default_channel.queue_purge(queue) == 1)
    waiting = send(tasks.until_executed, "waits", queue=names[1])
    until(lambda: are_confirmed(shop))  # A lock that is renewed between two looks counts as alive.
    assert {key: line["freed"] for key, line in clear(shop).items()} == {orphan: False, waiting: False}

    worker = start(shop, concurrency=1, arguments=("-Q", ",".join(names)))
    shop.record.wait_for(starts=1)
    kept = {waiting, send(tasks.until_executed, "later", countdown=3600), send(tasks.until_executed, "prefetched")}
    until(lambda: worker.log.count("] received") == 3)
    worker.pause()
    try:
        said = ask(shop, "clear", "--orphaned", "--yes")
        assert "consumers, but only 0 of them answer" in said.stderr
        assert queued(shop) == {orphan, *kept}
    finally:
        worker.resume()
    assert {key: line["freed"] for key, line in clear(shop).items()} == {orphan: True}
    assert queued(shop) == kept
    shop.record.let_end("waits")
    until(lambda: waiting not in queued(shop), LIMIT)
