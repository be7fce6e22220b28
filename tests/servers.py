"""Groups of real servers: independent ones, a master that Sentinels watch, and a cluster."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from celery_singleton_lock import clock
from celery_singleton_lock.testing import RedisServer

SECONDS = 30.0


class Group:
    """Servers that end together."""

    def __init__(self) -> None:
        self._exits = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _start(self, *makers: Callable[[], RedisServer]) -> list[RedisServer]:
        """Start servers beside each other."""
        started: list[RedisServer | None] = [None] * len(makers)

        def start(index: int) -> None:
            started[index] = makers[index]()

        threads = [threading.Thread(target=start, args=(index,)) for index in range(len(makers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        servers = [self._exits.enter_context(server) for server in started if server is not None]
        assert len(servers) == len(makers)
        return servers


class Nodes(Group):
    """Servers that do not know each other, for Redlock."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.servers = self._start(*[RedisServer] * count)

    @property
    def url(self) -> str:
        return ";".join(server.url for server in self.servers)

    def holding(self, key: str) -> list[int]:
        """Indexes of those that have the key, among the ones that run."""
        return [
            index for index, server in enumerate(self.servers) if server.pid is not None and server.client().exists(key)
        ]


class SentinelGroup(Group):
    """A master with replicas, and Sentinels that replace it when it dies."""

    NAME = "locks"

    def __init__(self, *, replicas: int = 2, sentinels: int = 3) -> None:
        super().__init__()
        (first,) = self._start(RedisServer)
        replica_of = ("--replicaof", "127.0.0.1", str(first.port))
        self.servers = [first, *self._start(*[lambda: RedisServer(replica_of)] * replicas)]
        self.sentinels = self._start(*[lambda: _SentinelServer(self.NAME, first.port)] * sentinels)
        until(lambda: self._knows_all(replicas, sentinels), "the Sentinels know each other")

    @property
    def url(self) -> str:
        return ";".join(f"sentinel://127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def options(self) -> dict[str, Any]:
        return {"master_name": self.NAME}

    def sentinel(self) -> Sentinel:
        once = {"socket_timeout": 1.0, "retry": Retry(NoBackoff(), 0)}
        return Sentinel([("127.0.0.1", sentinel.port) for sentinel in self.sentinels], sentinel_kwargs=once)

    def master(self) -> RedisServer:
        """The master by what the Sentinels say."""
        _, port = self.sentinel().discover_master(self.NAME)
        return next(server for server in self.servers if server.port == port)

    def replicas(self) -> list[RedisServer]:
        return [server for server in self.servers if server is not self.master()]

    def fail_over(self) -> RedisServer:
        """Kill the master, and wait until another one is; the dead one."""
        dead = self.master()
        dead.kill()

        def is_replaced() -> bool:
            with suppress(MasterNotFoundError, RedisError):
                return self.master() is not dead and bool(self.master().client().set("failed-over", 1, px=1))
            return False

        until(is_replaced, "another one is master")
        return dead

    def _knows_all(self, replicas: int, sentinels: int) -> bool:
        with suppress(RedisError, KeyError):
            for sentinel in self.sentinels:
                state = sentinel.client().sentinel_master(self.NAME)
                others, followers = int(state["num-other-sentinels"]), int(state["num-slaves"])
                if (others, followers) != (sentinels - 1, replicas):
                    return False
            info = self.servers[0].client().info("replication")
            return all(info[f"slave{index}"]["state"] == "online" for index in range(replicas))
        return False


class _SentinelServer(RedisServer):
    """A Sentinel."""

    def __init__(self, name: str, port: int) -> None:
        self._watched = (
            f"sentinel monitor {name} 127.0.0.1 {port} 2\nsentinel down-after-milliseconds {name} 700\n"
            f"sentinel failover-timeout {name} 1000\nsentinel parallel-syncs {name} 1\n"
        )
        super().__init__()

    def _launch(self, port: int) -> None:
        conf: Path = self._directory / "sentinel.conf"
        conf.write_text(f'port {port}\nbind 127.0.0.1\ndir "{self._directory}"\n{self._watched}')
        self._run([self._program, str(conf), "--sentinel"])


class Cluster(Group):
    """A Redis Cluster."""

    SLOTS = 16384

    def __init__(self, *, masters: int = 3, replicas: int = 1, node_timeout: float = 1.0) -> None:
        super().__init__()
        arguments = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(round(node_timeout * 1000)))
        ports = [_port_with_bus() for _ in range(masters * (1 + replicas))]
        self.servers = self._start(*[lambda port=port: RedisServer(arguments, port=port) for port in ports])
        share = self.SLOTS // masters + 1
        for index, server in enumerate(self.servers):
            client = server.client()
            client.execute_command("CONFIG", "SET", "cluster-require-full-coverage", "no")
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            if index < masters:
                slots = range(index * share, min((index + 1) * share, self.SLOTS))
                client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        ids = [server.client().execute_command("CLUSTER", "MYID") for server in self.servers]
        for index in range(masters, len(self.servers)):
            replicate = ("CLUSTER", "REPLICATE", ids[index % masters])
            until(lambda index=index, replicate=replicate: self._ask(index, *replicate), "a replica knows its master")
        until(lambda: self._is_complete(masters), "the cluster is complete")

    @property
    def url(self) -> str:
        return ";".join(f"redis+cluster://127.0.0.1:{server.port}" for server in self.servers[:2])

    def client(self) -> RedisCluster:
        return RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", server.port) for server in self._running()])

    def master_of(self, key: str) -> RedisServer:
        """Who has the key's slot, by what the nodes say that run."""
        slot = key_slot(key.encode())
        for first, last, master, *_ in self._running()[0].client().execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(server for server in self.servers if server.port == master[1])
        raise LookupError(f"nobody has slot {slot}")

    def migrate_slot(self, key: str, during: Callable[[], object] = lambda: None) -> RedisServer:
        """Move the slot of a key to another master, and call `during` when none of its keys has moved yet."""
        slot, old = key_slot(key.encode()), self.master_of(key)
        masters = {entry[2][1] for entry in old.client().execute_command("CLUSTER", "SLOTS")}
        new = next(server for server in self.servers if server.port in masters and server is not old)
        ids = {server: server.client().execute_command("CLUSTER", "MYID") for server in (old, new)}
        new.client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[old])
        old.client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[new])
        try:
            during()
        except BaseException:
            for server in (new, old):
                server.client().execute_command("CLUSTER", "SETSLOT", slot, "STABLE")
            raise
        while keys := old.client().execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            old.client().execute_command("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)
        for server in (new, old):
            server.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[new])
        return new

    def fail_over(self, key: str) -> RedisServer:
        """Kill the master that has the key, and wait until its replica has taken over; the dead one."""
        dead = self.master_of(key)
        dead.kill()

        def is_replaced() -> bool:
            with suppress(RedisError, LookupError):
                return self.master_of(key) is not dead and all(
                    server.client().execute_command("CLUSTER INFO")["cluster_state"] == "ok"
                    for server in self._running()
                )
            return False

        until(is_replaced, "the replica has taken over")
        return dead

    def _running(self) -> Sequence[RedisServer]:
        return [server for server in self.servers if server.pid is not None]

    def _ask(self, index: int, *command: object) -> bool:
        with suppress(ResponseError):
            return bool(self.servers[index].client().execute_command(*command))
        return False

    def _is_complete(self, masters: int) -> bool:
        for server in self.servers:
            info = server.client().execute_command("CLUSTER INFO")
            slots = server.client().execute_command("CLUSTER", "SLOTS")
            known = sum(len(entry) - 2 for entry in slots)
            if info["cluster_state"] != "ok" or len(slots) != masters or known != len(self.servers):
                return False
        replicas = [server.client().info("replication") for server in self.servers[masters:]]
        return all(info["role"] == "slave" and info["master_link_status"] == "up" for info in replicas)


def _port_with_bus() -> int:
    """A free port whose bus, 10000 higher, is free as well; from a source that no test seeds."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 10_000)),
        ):
            return port


def until(true: Callable[[], object], what: str) -> None:
    """Wait for what no event tells."""
    deadline = clock.now() + SECONDS
    while not true():
        assert clock.now() < deadline, f"waited {SECONDS:g} s in vain until {what}"
        clock.sleep(0.05)
