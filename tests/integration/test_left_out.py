"""Arguments that a call leaves out mean their defaults: a short call does to a server what the full call does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from redis import Redis

from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.redis import lock_commands
from celery_singleton_lock.stores.redis.script import Call
from tests.redis_server import RedisServer

KEY = "left-out:1:{job:1}"
OWNER, OTHER = new_owner(), new_owner()
ME = Holder("me")
PLAIN = [
    {"check_finished": False, "waiting": False},
    {"check_finished": True, "waiting": False},
    {"check_finished": False, "waiting": True},
    {"check_finished": True, "waiting": True},
]
RECORDS = [None, Record(ME.message, b"r", 60.0)]

Said = Callable[[Any], Sequence[object]]


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Redis]:
    with Redis.from_url(redis_server.url) as client:
        yield client
        client.flushall()


def waiter_of(owner: str) -> str:
    return f"left-out:mail:here|{owner}"


def acquired(client: Redis, options: dict[str, bool], said: Said, owner: str = OWNER) -> Any:
    """The first part of the answer."""
    request = LockRequest(KEY, owner, 30.0, ME, since=6.0, member=waiter_of(owner), **options)
    with patch.object(lock_commands, "without_defaults", said):
        return run(client, lock_commands.acquire(request))[0]


def freed(client: Redis, record: Record | None, said: Said) -> Any:
    with patch.object(lock_commands, "without_defaults", said):
        return run(client, lock_commands.free(Hold(KEY, OWNER, ttl=30.0), record=record))


def run(client: Redis, call: Call) -> Any:
    return client.execute_command(*call.by_text)


def left(client: Redis) -> dict[bytes, tuple[object, int]]:
    """The values on the server, without fences and times, and their minutes to live."""
    found = {}
    for key in client.scan_iter():
        kind = client.type(key)
        value = client.get(key) if kind == b"string" else kind
        if key.endswith((b":run", b":fence")):
            value = value.rpartition(b",")[0]
        found[key] = (value, round(client.pttl(key) / 60_000))
    return found


#: What may be on the server.
STATES: dict[str, Callable[[Redis], object]] = {
    "free": lambda client: None,
    "held": lambda client: acquired(client, {}, lock_commands.without_defaults, OTHER),
    "waited for": lambda client: client.zadd(f"{KEY}:waiting", {waiter_of(OTHER): 5}),
    "waited for by itself": lambda client: client.zadd(f"{KEY}:waiting", {waiter_of(OWNER): 5}),
    "given up": lambda client: client.set(f"{KEY}:tombstone:{OWNER}", 1),
    "recorded": lambda client: run(client, lock_commands.free(Hold(KEY, OTHER, ttl=30.0), record=RECORDS[1])),
}

#: States in which an acquire gets nothing; and those for an acquire that also looks for a record.
NONE = {"held", "given up"}
NONE_ONCE = {*NONE, "recorded"}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_acquire(client: Redis, options: dict[str, bool], state: str) -> None:
    outcomes = []
    for said in (tuple, lock_commands.without_defaults):
        client.flushall()
        STATES[state](client)
        answer = acquired(client, options, said)
        outcomes.append((answer, left(client)))
    assert outcomes[0] == outcomes[1]
    assert (answer == 1) == (state not in (NONE_ONCE if options["check_finished"] else NONE))


@pytest.mark.parametrize("state", ["free", "held", "waited for"])
@pytest.mark.parametrize("record", RECORDS, ids=["no record", "record"])
def test_free(client: Redis, record: Record | None, state: str) -> None:
    outcomes = []
    for said in (tuple, lock_commands.without_defaults):
        client.flushall()
        acquired(client, {}, lock_commands.without_defaults, OTHER if state == "held" else OWNER)
        if state == "waited for":
            STATES[state](client)
        answer = freed(client, record, said)
        outcomes.append((answer, left(client)))
    assert outcomes[0] == outcomes[1]
    assert answer == (0 if state == "held" else 1)
