"""Somebody else writes where the lock server keeps how messages have ended: none runs twice, and each has an end."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_singleton_lock import ResultLost
from tests.bench import Bench
from tests.redis_server import RedisServer

#: What takes the place of each record. Some look like ours: a state, when, and so on; then what it says.
NONSENSE = (
    b"",
    b"x",
    b"[]",
    b"null\n",
    b'["SUCCESS"]',
    b'["SUCCESS", "x", true]\n1',
    b'["SUCCESS", 1, true, 0]\n\xff{',
    b'["SUCCESS", 1, true, false]\n\x80\x04K\x01.',  # Pickle is not read if only JSON is accepted.
    b'["FAILURE", 1, true, false]\nnull',
    b'["FAILURE", 1, true, false]\n{"exc_type": 1}',
    b'["FAILURE", 1, true, false]\n{',
    b'["FOLLOWED", 1, true, false]\n["a", "b"]',
    b'["FOLLOWED", 1, true, false]\n[1, 2, 3]',
    b'["FOLLOWED", 1, true, false]\n["job", "key", ["x", "y", 0, 0, 0, false]]',
    b'["FOLLOWED", 1, true, false]\n[[], 1, null, {}]',
    b'["JOINED", 1, true, false]\n[[], 1, null, {}, 0, 0]',
)


@pytest.fixture
def app(app: Celery, redis_server: RedisServer) -> Celery:
    app.conf.singleton_lock_backend = redis_server.url_of(0)
    return app


def overwrite(server: RedisServer, value: bytes) -> None:
    """As if each record had been written so some time ago."""
    with server.client() as client:
        records = [key for key in client.scan_iter() if ":done:" in key]
        assert records
        for key in records:
            client.set(key, value, ex=1000)


@pytest.mark.parametrize("value", NONSENSE)
def test_copy_of_a_message_that_has_ended(bench: Bench, redis_server: RedisServer, value: bytes) -> None:
    message = bench.send(bench.task())
    bench.deliver(message)
    overwrite(redis_server, value)
    bench.forget(message)
    end = bench.deliver(message, redelivered=True)
    assert isinstance(end, ResultLost) or end == "PENDING"
    assert bench.runs == [message.id]


@pytest.mark.parametrize("value", NONSENSE)
def test_copy_that_has_joined(bench: Bench, redis_server: RedisServer, value: bytes) -> None:
    def body() -> str:
        if len(bench.runs) == 1:
            bench.deliver(copy)
            return "first"
        return "ran"

    task = bench.task(body, on_conflict="join")
    first, copy = bench.send(task), bench.send(task)
    bench.deliver(first)
    joined = bench.put_back()
    overwrite(redis_server, value)
    assert bench.deliver(joined) in ("first", "ran")


@pytest.mark.parametrize("value", NONSENSE)
def test_follower(bench: Bench, redis_server: RedisServer, value: bytes) -> None:
    task = bench.task(lock_scope="until_executed", lock_queue_ttl=100.0)
    first, follower = bench.send(task), bench.send(task, root_id="the root")
    bench.deliver(first)
    overwrite(redis_server, value)
    assert bench.deliver(follower) == "ran"
