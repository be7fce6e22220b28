"""Fenced writes to a real Redis and a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from redis.cluster import RedisCluster
from redis.crc import key_slot

from celery_singleton_lock import StaleFence
from celery_singleton_lock.contrib.fencing import check_fence
from celery_singleton_lock.contrib.fencing.redis import FENCE_TTL, fence_key, fenced_command
from tests.redis_server import RedisServer
from tests.servers import Cluster

#: Like real fences: microseconds since the epoch.
OLD, NEW = 1_795_000_000_000_001, 1_795_000_000_000_002


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Redis]:
    with redis_server.client(4) as client:
        yield client
        client.flushdb()


def test_stale_holder_is_refused(client: Redis) -> None:
    fenced_command(client, NEW, "SET", "total", "new")
    with pytest.raises(StaleFence) as refused:
        fenced_command(client, OLD, "SET", "total", "old")
    assert (refused.value.target, refused.value.fence, refused.value.seen) == ("total", OLD, NEW)
    assert client.get("total") == "new"


def test_holder_may_write_often_and_the_next_one_after_it(client: Redis) -> None:
    assert fenced_command(client, OLD, "HSET", "report", "total", 3) == 1
    assert fenced_command(client, OLD, "HINCRBY", "report", "total", 4) == 7
    assert fenced_command(client, NEW, "HINCRBY", "report", "total", 1) == 8
    assert client.hgetall("report") == {"total": "8"}


def test_fence_outlives_the_key_that_it_guards(client: Redis) -> None:
    fenced_command(client, NEW, "SET", "total", "new")
    assert client.ttl(fence_key("total")) == -1
    fenced_command(client, NEW, "EXPIRE", "total", 100)
    assert 100 < client.ttl(fence_key("total")) <= 100 + FENCE_TTL
    fenced_command(client, NEW, "PERSIST", "total")
    assert client.ttl(fence_key("total")) == -1


def test_key_that_a_later_holder_deleted_is_not_brought_back(client: Redis) -> None:
    fenced_command(client, OLD, "SET", "total", "old")
    fenced_command(client, NEW, "DEL", "total")
    with pytest.raises(StaleFence):
        fenced_command(client, OLD, "SET", "total", "old")
    assert not client.exists("total")
    assert 0 < client.ttl(fence_key("total")) <= FENCE_TTL


def test_execution_without_a_lock_is_refused(client: Redis) -> None:
    with pytest.raises(StaleFence, match="no lock is held"):
        fenced_command(client, 0, "SET", "total", "new")
    assert client.keys() == []


@pytest.mark.parametrize("fence", [True, None, "7", 7.0])
def test_fence_of_another_type_is_a_type_error(fence: object) -> None:
    with pytest.raises(TypeError, match=r"self\.lock\.fence"):
        check_fence("total", fence)  # type: ignore[arg-type]


@given(st.text(alphabet="ab{}:", min_size=1))
def test_fence_is_in_the_slot_of_its_key(key: str) -> None:
    try:
        beside = fence_key(key)
    except ValueError as error:
        assert "brace" in str(error)  # noqa: PT017 - most keys do not raise
        return
    assert key_slot(beside.encode()) == key_slot(key.encode())
    assert beside != key


def test_fences_work_on_a_cluster() -> None:
    with Cluster(replicas=0) as cluster, _client_of(cluster) as client:
        for key in ("total", "report:{7}", "a", "b", "c"):
            fenced_command(client, NEW, "SET", key, "new")
            with pytest.raises(StaleFence):
                fenced_command(client, OLD, "SET", key, "old")
            assert client.get(key) == "new"


def _client_of(cluster: Cluster) -> RedisCluster:
    host, port = cluster.startup[0]
    return RedisCluster(host=host, port=port, decode_responses=True)
