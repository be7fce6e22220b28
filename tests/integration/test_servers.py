"""The groups of servers work as described: what other tests find on them is not caused by the groups."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from celery_singleton_lock import clock
from tests import ports, servers
from tests.integration.conftest import is_alive
from tests.redis_server import RedisServer
from tests.servers import Cluster, Nodes, SentinelGroup, until

KEY = "{job}:1"


class TestNodes:
    @pytest.fixture
    def nodes(self) -> Iterator[Nodes]:
        with Nodes(3, proxied=True) as nodes:
            yield nodes

    def test_are_independent(self, nodes: Nodes) -> None:
        for index, client in enumerate(nodes.clients()):
            client.set(f"mine:{index}", 1)
        assert [nodes.holding(f"mine:{index}") for index in range(3)] == [[0], [1], [2]]
        assert [Redis.from_url(url).exists("mine:1") for url in nodes.url.split(";")] == [0, 1, 0]

    def test_killed_node_comes_back_empty_at_its_address(self, nodes: Nodes) -> None:
        server, client = nodes.servers[0], nodes.clients()[0]
        port = server.port
        client.set("key", 1)
        server.kill()
        with pytest.raises(ConnectionError):
            client.get("key")
        server.start()
        assert server.port == port
        assert client.get("key") is None

    def test_dead_node_without_proxy_refuses(self) -> None:
        with Nodes(1) as nodes:
            nodes.servers[0].kill()
            with pytest.raises(ConnectionError, match="refused"):
                nodes.clients()[0].ping()

    def test_paused_node_is_silent(self, nodes: Nodes) -> None:
        silent = Redis.from_url(nodes.url.split(";")[0], socket_timeout=0.2)
        silent.ping()
        nodes.servers[0].pause()
        with pytest.raises(TimeoutError):
            silent.ping()
        nodes.servers[0].resume()
        assert silent.ping()

    def test_slow_node_is_slow_on_open_connections(self, nodes: Nodes) -> None:
        clients = nodes.clients()
        assert all(took(client) < 2.0 for client in clients)
        nodes.slow(1, 2.0)
        assert took(clients[1]) >= 2.0
        assert took(clients[0]) < 2.0
        nodes.slow(1, 0)
        assert took(clients[1]) < 2.0

    def test_cannot_be_slow_without_proxy(self) -> None:
        with Nodes(1) as nodes, pytest.raises(RuntimeError, match="proxied"):
            nodes.slow(0, 1.0)


def took(client: Redis) -> float:
    """The seconds that an answer takes."""
    start = clock.now()
    client.ping()
    return clock.now() - start


def sent_to(client: Redis, key: str) -> int:
    """The port of the server to which another one redirects requests for the key."""
    with pytest.raises(ResponseError) as error:
        client.get(key)
    return int(str(error.value).rpartition(":")[2])


class TestSentinelGroup:
    @pytest.fixture
    def group(self) -> Iterator[SentinelGroup]:
        with SentinelGroup("other") as group:
            yield group

    def test_replicas_have_what_the_master_has(self, group: SentinelGroup) -> None:
        assert group.options == {"master_name": "other"}
        with group.client() as client:
            client.set(KEY, "value")
            assert client.wait(2, 5000) == 2
        assert [replica.client().get(KEY) for replica in group.replicas()] == ["value"] * 2
        with pytest.raises(ResponseError, match="read only"):
            group.replicas()[0].client().set(KEY, "other")

    @pytest.mark.slow
    def test_killed_master_is_replaced_and_comes_back_as_a_replica(self, group: SentinelGroup) -> None:
        old, replicas = group.master(), group.replicas()
        with group.client() as client:
            client.set(KEY, "value")
            assert client.wait(2, 5000) == 2
        assert group.fail_over() is old
        assert old.pid is None
        new = group.master()
        assert new in replicas
        assert new.client().get(KEY) == "value"
        assert new.client().set(KEY, "new")
        group.wait_until_ready()
        group.bring_back(old)
        assert old.client().get(KEY) == "new"
        assert group.master() is new

    @pytest.mark.slow
    def test_new_master_is_not_replaced(self, group: SentinelGroup) -> None:
        """Sentinels would replace it if they considered it dead because they had no time to connect to it."""
        group.fail_over()
        new, end = group.master(), clock.now() + 4.0
        while clock.now() < end:
            assert group.master() is new
            clock.sleep(0.1)

    @pytest.mark.slow
    def test_sentinels_make_an_old_master_a_replica(self, group: SentinelGroup) -> None:
        old = group.fail_over()
        new = group.master()
        old.start()
        group.wait_until_ready()
        assert group.master() is new
        assert old.client().info("replication")["master_port"] == new.port


class TestCluster:
    def test_keys_are_spread_over_it(self, cluster: Cluster) -> None:
        keys = [f"key:{index}" for index in range(50)]
        with cluster.client() as client:
            for key in keys:
                client.set(key, key)
            assert [client.get(key).decode() for key in keys] == keys
        assert len({cluster.master_of(key).port for key in keys}) == 3
        assert all(cluster.master_of(key).client().get(key) == key for key in keys)
        assert {port for _, port in cluster.startup} == {server.port for server in cluster.servers}

    def test_slot_moves_with_its_keys_and_redirects_meanwhile(self, cluster: Cluster) -> None:
        old = cluster.master_of(KEY)
        old.client().set(KEY, "value")
        asked: list[int] = []

        def during() -> None:
            # Keys that have not moved yet are answered; keys that are not there might have moved.
            assert old.client().get(KEY) == "value"
            asked.append(sent_to(old.client(), "{job}:none"))
            with cluster.client() as client:
                assert client.get("{job}:none") is None

        new = cluster.migrate_slot(KEY, during)
        assert new is not old
        assert asked == [new.port]
        assert new.client().get(KEY) == "value"
        assert cluster.master_of(KEY) is new
        assert sent_to(old.client(), KEY) == new.port
        cluster.wait_until_ready()

    def test_slot_stays_when_the_callback_fails(self, cluster: Cluster) -> None:
        old = cluster.master_of(KEY)

        def during() -> None:
            raise KeyError("wanted")

        with pytest.raises(KeyError, match="wanted"):
            cluster.migrate_slot(KEY, during)
        assert cluster.master_of(KEY) is old
        assert old.client().get("{job}:none") is None

    def test_killed_master_is_replaced_and_comes_back_as_a_replica(self, cluster: Cluster) -> None:
        old = cluster.master_of(KEY)
        with old.client() as client:
            client.set(KEY, "value")
            assert client.wait(1, 5000) == 1
        assert cluster.kill_master_of(KEY) is old
        new = cluster.master_of(KEY)
        assert new is not old
        assert new.client().get(KEY) == "value"
        assert new.client().set(KEY, "new")
        cluster.wait_until_ready()
        old.start()
        cluster.wait_until_ready()
        assert cluster.master_of(KEY) is new
        assert old.client().info("replication")["role"] == "slave"


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of all servers that are started."""
    started: list[int] = []
    run = RedisServer._run

    def noting(self: RedisServer, command: list[str]) -> None:
        run(self, command)
        started.append(self.pid)

    monkeypatch.setattr(RedisServer, "_run", noting)
    return started


@pytest.mark.parametrize(
    "kind", [Nodes, pytest.param(SentinelGroup, marks=pytest.mark.slow), pytest.param(Cluster, marks=pytest.mark.slow)]
)
class TestEnd:
    def test_nothing_is_left_after_an_error(self, kind: type, pids: list[int]) -> None:
        with pytest.raises(KeyError), kind() as group:
            group.servers[0].pause()
            raise KeyError
        assert not any(map(is_alive, pids))
        assert not any(os.path.exists(server._directory) for server in group.servers)

    def test_nothing_is_left_of_a_group_that_could_not_start(
        self, kind: type, pids: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls, on_free_port = itertools.count(), servers._on_free_port

        def two_only(make: Callable[[int], RedisServer]) -> RedisServer:
            if next(calls) >= 2:
                raise OSError("wanted")
            return on_free_port(make)

        monkeypatch.setattr(servers, "_on_free_port", two_only)
        with pytest.raises(OSError, match="wanted"):
            kind(count=5) if kind is Nodes else kind()
        assert len(pids) >= 2
        assert not any(map(is_alive, pids))

    def test_taken_port_is_not_an_error(self, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
        with RedisServer() as other:
            free, taken = ports.with_bus, [other.port]
            monkeypatch.setattr(ports, "with_bus", lambda: taken.pop() if taken else free())
            with kind() as group:
                assert group.servers[0].client().ping()
                assert other.port not in [server.port for server in group.servers]
        assert taken == []


def test_taken_bus_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.with_bus
    taken = [free()]
    with socket.create_server(("127.0.0.1", taken[0] + 10_000)):
        monkeypatch.setattr(ports, "with_bus", lambda: taken.pop() if taken else free())
        with Cluster() as cluster:
            assert cluster.master_of(KEY).client().set(KEY, 1)


def test_missing_condition_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "LIMIT", 0.5)
    with pytest.raises(AssertionError, match=r"0\.5 s in vain until it comes: not yet"):
        servers._wait(lambda: "not yet", "it comes")
    with pytest.raises(AssertionError, match="it comes"):
        until(lambda: False, "it comes", seconds=0.1)
