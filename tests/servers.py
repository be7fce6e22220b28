"""Groups of real servers: independent nodes, a master that Sentinels watch, and a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import ConnectionError, RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel

from celery_singleton_lock import clock
from tests import ports
from tests.patience import LIMIT, until  # noqa: F401 - many take it from here
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer

#: Seconds that a server of a group has to answer us; a paused server does not answer.
PATIENCE = 2.0

Some = TypeVar("Some", bound="Group")


class Group:
    """Servers that end together, at the end of `with` or when the setup fails."""

    servers: list[RedisServer]

    def __init__(self) -> None:
        self._exits = ExitStack()
        try:
            self._set_up()
        except BaseException:
            self._exits.close()
            raise

    def __enter__(self: Some) -> Some:  # noqa: PYI019 - Self is not in the library of Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _set_up(self) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def options(self) -> dict[str, Any]:
        """Transport options that go with the URL."""
        return {}

    def wait_until_ready(self) -> None:
        """Wait until the servers that run work together; independent ones always do."""

    def _at(self, port: int) -> RedisServer:
        return next(server for server in self.servers if server.port == port)

    def _start(self, count: int, make: Callable[[int], RedisServer]) -> list[RedisServer]:
        """Start servers at the same time; `make` gets the port."""
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(_on_free_port, make) for _ in range(count)]
        # All are noted before the first error is raised: every server that has started must end.
        for future in futures:
            if future.exception() is None:
                self._exits.enter_context(future.result())
        return [future.result() for future in futures]


class Nodes(Group):
    """Servers that do not know each other, for a Redlock.

    `servers[i].kill()` and `start()` make a node come back empty at its address, `pause()` and `resume()` silent.

    Args:
        count: number of them.
        proxied: reach them through proxies, which `slow` needs. A dead node then closes connections instead of
            refusing them.
        arguments: of each server.
    """

    def __init__(self, count: int = 5, *, proxied: bool = False, arguments: Sequence[str] = ()) -> None:
        self._count = count
        self._proxied = proxied
        self._arguments = arguments
        super().__init__()

    def _set_up(self) -> None:
        self.servers = self._start(self._count, lambda port: RedisServer(self._arguments, port=port))
        proxied = self.servers if self._proxied else []
        self.proxies = [self._exits.enter_context(LossyProxy(server.port)) for server in proxied]

    @property
    def ports(self) -> list[int]:
        """Where clients reach the nodes."""
        return [node.port for node in self.proxies or self.servers]

    @property
    def url(self) -> str:
        return ";".join(f"redis://127.0.0.1:{port}/0" for port in self.ports)

    def clients(self) -> list[Redis]:
        """A client of each, by the route in `url`; `servers[i].client()` bypasses the proxy."""
        return [Redis(port=port, decode_responses=True, retry=Retry(NoBackoff(), 0)) for port in self.ports]

    def slow(self, index: int, seconds: float) -> None:
        """Hold back each answer of a node for that long, also on open connections; 0 ends it."""
        if not self.proxies:
            raise RuntimeError("only Nodes(proxied=True) can be slow")
        self.proxies[index].delay(seconds)

    def holding(self, key: str) -> list[int]:
        """Indexes of the running nodes that have the key."""
        return [
            index for index, server in enumerate(self.servers) if server.pid is not None and server.client().exists(key)
        ]


class SentinelGroup(Group):
    """A master with replicas, and Sentinels: two of them together replace it when it dies.

    Args:
        name: by which the Sentinels know the master.
        replicas: number of them.
        sentinels: number of them.
        down_after: seconds of silence after which a Sentinel takes a server for dead. Sentinels connect once a second:
            with less than that they take the new master for dead as well, and replace it at once.
        failover_timeout: seconds that a failover may take; an election without a winner is repeated after twice that.
    """

    NAME = "locks"

    def __init__(
        self,
        name: str = NAME,
        *,
        replicas: int = 2,
        sentinels: int = 3,
        down_after: float = 1.5,
        failover_timeout: float = 1.0,
    ) -> None:
        self.name = name
        self._counts = replicas, sentinels
        self._timeouts = round(down_after * 1000), round(failover_timeout * 1000)
        super().__init__()

    def _set_up(self) -> None:
        replicas, sentinels = self._counts
        (first,) = self._start(1, lambda port: RedisServer(port=port))
        replica_of = ("--replicaof", "127.0.0.1", str(first.port))
        self.servers = [first, *self._start(replicas, lambda port: RedisServer(replica_of, port=port))]
        down_after, failover_timeout = self._timeouts
        watched = (
            f"sentinel monitor {self.name} 127.0.0.1 {first.port} 2\n"
            f"sentinel down-after-milliseconds {self.name} {down_after}\n"
            f"sentinel failover-timeout {self.name} {failover_timeout}\n"
            f"sentinel parallel-syncs {self.name} 1\n"
        )
        self.sentinels = self._start(sentinels, lambda port: _SentinelServer(watched, port))
        self.wait_until_ready()

    @property
    def url(self) -> str:
        return ";".join(f"sentinel://127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def options(self) -> dict[str, Any]:
        return {"master_name": self.name}

    def sentinel(self) -> Sentinel:
        once = {"socket_timeout": PATIENCE, "retry": Retry(NoBackoff(), 0)}
        return Sentinel([("127.0.0.1", sentinel.port) for sentinel in self.sentinels], sentinel_kwargs=once)

    def master(self) -> RedisServer:
        """The master according to the Sentinels."""
        _, port = self.sentinel().discover_master(self.name)
        return self._at(port)

    def replicas(self) -> list[RedisServer]:
        """All servers but the master, including dead ones."""
        master = self.master()
        return [server for server in self.servers if server is not master]

    def client(self) -> Redis:
        """A client of the present master; it does not follow a failover."""
        return self.master().client()

    def wait_until_ready(self) -> None:
        """Wait until the servers that run are a master and its replicas in sync, and all Sentinels know that.

        The Sentinels make an old master that was started again a replica after ten to twenty seconds.
        """
        _wait(self._missing, "the Sentinels know each other and all servers")

    def fail_over(self) -> RedisServer:
        """Kill the master, and wait until all Sentinels agree on another that accepts writes; returns the dead one."""
        dead = self.master()
        dead.kill()
        _wait(lambda: self._not_replaced(dead), "another one is master")
        return dead

    def hand_over(self) -> None:
        """Replace the master by a replica that has all its data: writes wait, and the old master then refuses them."""
        old = self.master()
        _ask(old, "CLIENT", "PAUSE", 1000 * LIMIT, "WRITE")
        try:
            _wait(lambda: _behind(old, self.replicas()), "the replicas have everything")
            _ask(self.sentinels[0], "SENTINEL", "FAILOVER", self.name)
            _wait(lambda: self._not_replaced(old), "another one is master")
            _ask(old, "REPLICAOF", "127.0.0.1", self.master().port)
        finally:
            _ask(old, "CLIENT", "UNPAUSE")

    def _not_replaced(self, old: RedisServer) -> str:
        """Who is master; empty if all Sentinels agree on another one that accepts writes."""
        ports = {int(_info(sentinel, self.name)["port"]) for sentinel in _running(self.sentinels)}
        if len(ports) != 1 or old.port in ports:
            return f"the master is at {ports} for the Sentinels"
        _ask(self._at(ports.pop()), "SET", "failed-over", 1, "PX", 1)
        return ""

    def _missing(self) -> str:
        """What is not as it should be."""
        master = self.master()
        replicas = [server for server in _running(self.servers) if server is not master]
        ports = {server.port for server in replicas}
        for sentinel in _running(self.sentinels):
            state = _info(sentinel, self.name)
            seen = int(state["port"]), state["flags"], int(state["num-other-sentinels"])
            if seen != (master.port, "master", len(self.sentinels) - 1):
                return f"a Sentinel sees {seen} as port, state of the master, and other Sentinels"
            if not ports <= _healthy_replicas(sentinel, self.name):
                return "a Sentinel does not see all replicas"
        # The servers themselves are asked: the Sentinels ask them only every ten seconds.
        for replica in replicas:
            link = _replication(replica)
            if (link.get("master_port"), link.get("master_link_status")) != (master.port, "up"):
                return f"the replica {replica.port} is not linked to {master.port}"
        online = {one["port"] for one in _replication(master).values() if isinstance(one, dict) and _is_online(one)}
        return "" if ports == online else f"the master has sent everything to {online}, not to {ports}"


class _SentinelServer(RedisServer):
    """A Sentinel."""

    def __init__(self, watched: str, port: int) -> None:
        self._watched = watched
        super().__init__(port=port)

    def _launch(self) -> None:
        self._placeholder.close()
        conf: Path = self._directory / "sentinel.conf"
        conf.write_text(f'port {self._port}\nbind 127.0.0.1\ndir "{self._directory}"\n{self._watched}')
        self._run([self._program, str(conf), "--sentinel"])


def _info(sentinel: RedisServer, name: str) -> dict[str, Any]:
    with _client(sentinel) as client:
        return client.sentinel_master(name)


def _healthy_replicas(sentinel: RedisServer, name: str) -> set[int]:
    """Ports of the replicas that a Sentinel considers alive."""
    with _client(sentinel) as client:
        return {int(one["port"]) for one in client.sentinel_slaves(name) if one["flags"] == "slave"}


def _replication(server: RedisServer) -> dict[str, Any]:
    with _client(server) as client:
        return client.info("replication")


def _behind(master: RedisServer, replicas: Sequence[RedisServer]) -> str:
    """What the replicas have, unless that is all."""
    offset = _replication(master)["master_repl_offset"]
    found = [_replication(replica)["slave_repl_offset"] for replica in replicas]
    return "" if found == [offset] * len(found) else f"{found} of {offset} bytes"


def _is_online(replica: dict[str, Any]) -> bool:
    return replica.get("state") == "online"


class Cluster(Group):
    """A Redis Cluster; the nodes that are alive go on without the rest.

    Args:
        masters: number of them; a dead master is replaced while most of them are alive.
        replicas: of each master.
        node_timeout: seconds of silence after which a node is taken for dead.
        arguments: of each server.
    """

    SLOTS = 16384

    def __init__(
        self, *, masters: int = 3, replicas: int = 1, node_timeout: float = 1.0, arguments: Sequence[str] = ()
    ) -> None:
        self._masters = masters
        self._arguments = arguments
        self._count = masters * (1 + replicas)
        self._node_timeout = str(round(node_timeout * 1000))
        super().__init__()

    def _set_up(self) -> None:
        arguments = (*self._arguments, "--cluster-enabled", "yes", "--cluster-node-timeout", self._node_timeout)
        arguments += ("--cluster-config-file", "nodes.conf", "--cluster-require-full-coverage", "no")
        self.servers = self._start(self._count, lambda port: RedisServer(arguments, port=port))
        share = self.SLOTS // self._masters + 1
        for index, server in enumerate(self.servers):
            _ask(server, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            if index < self._masters:
                slots = range(index * share, min((index + 1) * share, self.SLOTS))
                _ask(server, "CLUSTER", "ADDSLOTS", *slots)
            _ask(server, "CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        for index, server in enumerate(self.servers[self._masters :]):
            self._replicate(server, self.servers[index % self._masters])
        self.wait_until_ready()

    @property
    def startup(self) -> list[tuple[str, int]]:
        """Host and port of each node."""
        return [("127.0.0.1", server.port) for server in self.servers]

    @property
    def url(self) -> str:
        return ";".join(f"redis+cluster://127.0.0.1:{server.port}" for server in self.servers[:2])

    def client(self) -> RedisCluster:
        return RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", server.port) for server in _running(self.servers)])

    def master_of(self, key: str) -> RedisServer:
        """The owner of the key's slot, according to the first node that answers."""
        slot = key_slot(key.encode())
        for server in _running(self.servers):
            with suppress(RedisError):
                return self._at(_owner(server, slot))
        raise LookupError("no node answers")

    def wait_until_ready(self) -> None:
        """Wait until the nodes that run agree on the owners of the slots, and all replicas are linked."""
        _wait(self._missing, "the cluster is complete")

    def flush(self) -> None:
        """Delete all keys."""
        with self.client() as client:
            client.flushall()

    def migrate_slot(self, key: str, during: Callable[[], object] = lambda: None) -> RedisServer:
        """Move the slot of a key to another master, which is returned; afterwards all nodes know about it.

        `during` is called before any of its keys has moved: for a key that the old master does not have, it redirects
        requests to the new master with ASK.
        """
        slot, old = key_slot(key.encode()), self.master_of(key)
        masters = {entry[2][1] for entry in _ask(old, "CLUSTER", "SLOTS")}
        new = next(server for server in self.servers if server.port in masters and server is not old)
        old_id, new_id = _ask(old, "CLUSTER", "MYID"), _ask(new, "CLUSTER", "MYID")
        _ask(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
        _ask(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
        try:
            during()
        except BaseException:
            for server in (new, old):
                _ask(server, "CLUSTER", "SETSLOT", slot, "STABLE")
            raise
        while keys := _ask(old, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            _ask(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)
        for server in (new, old):
            _ask(server, "CLUSTER", "SETSLOT", slot, "NODE", new_id)
        _wait(lambda: self._not_owned(slot, {new.port}), "all nodes know the owner of the slot")
        return new

    def fail_over(self, key: str) -> RedisServer:
        """Kill the master that has the key, and wait until all know that its replica took over; return it."""
        slot, dead = key_slot(key.encode()), self.master_of(key)
        dead.kill()
        others = {server.port for server in self.servers if server is not dead}
        _wait(lambda: self._not_owned(slot, others) or self._not_ok(), "the replica has taken over")
        return dead

    def _replicate(self, replica: RedisServer, master: RedisServer) -> None:
        identity = _ask(master, "CLUSTER", "MYID")
        # Refused until the replica knows the master.
        _wait(lambda: "" if _ask(replica, "CLUSTER", "REPLICATE", identity) else "no", "a replica knows its master")

    def _not_owned(self, slot: int, ports: set[int]) -> str:
        """Which nodes have the slot; empty if all agree on one of these ports."""
        owners = {_owner(server, slot) for server in _running(self.servers)}
        return "" if len(owners) == 1 and owners <= ports else f"{owners} have the slot"

    def _not_ok(self) -> str:
        bad = [server.port for server in _running(self.servers) if _cluster_state(server) != "ok"]
        return f"the state of {bad} is not ok" if bad else ""

    def _missing(self) -> str:
        """What is not as it should be."""
        running = _running(self.servers)
        views = {_view(server) for server in running}
        if len(views) > 1:
            return f"the nodes see {views}"
        (view,) = views
        if sum(last - first + 1 for first, last, _ in view) != self.SLOTS:
            return f"nobody has some slots: {view}"
        masters = {ports[0] for *_, ports in view}
        if {port for *_, ports in view for port in ports} != {server.port for server in running}:
            return f"not all nodes take part: {view}"
        for server in running:
            if server.port not in masters and _replication(server).get("master_link_status") != "up":
                return f"the replica {server.port} is not linked"
        return self._not_ok()


View = tuple[tuple[int, int, tuple[int, ...]], ...]


def _view(server: RedisServer) -> View:
    """First slot, last slot, and ports of master and replicas, for each range that a node knows."""
    ranges = _ask(server, "CLUSTER", "SLOTS")
    return tuple(
        sorted(
            (first, last, (master[1], *sorted(replica[1] for replica in replicas)))
            for first, last, master, *replicas in ranges
        )
    )


def _owner(server: RedisServer, slot: int) -> int:
    """Port of the master that has the slot, according to a node."""
    for first, last, (master, *_) in _view(server):
        if first <= slot <= last:
            return master
    raise LookupError(f"nobody has slot {slot}")


def _cluster_state(server: RedisServer) -> str:
    with _client(server) as client:
        return client.execute_command("CLUSTER INFO")["cluster_state"]


def _running(servers: Sequence[RedisServer]) -> list[RedisServer]:
    return [server for server in servers if server.pid is not None]


def _client(server: RedisServer, again: int = 0) -> Redis:
    """A client that asks again when its connection ends, but never when a server is silent."""
    retry = Retry(NoBackoff(), again, supported_errors=(ConnectionError,))
    return Redis(port=server.port, decode_responses=True, socket_timeout=PATIENCE, retry=retry)


def _ask(server: RedisServer, *command: Any) -> Any:
    # A storm cuts off all clients, and means those of others. Commands of this client may be carried out twice.
    with _client(server, again=5) as client:
        return client.execute_command(*command)


def _on_free_port(make: Callable[[int], RedisServer]) -> RedisServer:
    """Make a server on a free port; on another port if somebody was faster."""
    for _ in range(4):
        with suppress(RuntimeError):
            return make(ports.with_bus())
    return make(ports.with_bus())


def _wait(missing: Callable[[], str], what: str) -> None:
    """Wait until nothing is missing; a server that does not answer counts as missing."""
    deadline = clock.now() + LIMIT
    while reason := _reason(missing):
        assert clock.now() < deadline, f"waited {LIMIT:g} s in vain until {what}: {reason}"
        clock.sleep(0.05)


def _reason(missing: Callable[[], str]) -> str:
    try:
        return missing()
    except (RedisError, LookupError) as error:
        return repr(error)
