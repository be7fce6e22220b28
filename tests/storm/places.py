"""Where the locks of a storm are: on servers that hosts reach through proxies, behind Sentinels, or in a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from celery_singleton_lock import clock
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.servers import Cluster, SentinelGroup

AT = "redis://127.0.0.1:{}/{}"


class Durable(RedisServer):
    """A server that writes each change to disk before it answers: killed and restarted, it has all its data."""

    def __init__(self) -> None:
        super().__init__(["--appendonly", "yes", "--appendfsync", "always"])

    def forget(self) -> None:
        """Die, and come back empty."""
        self.kill()
        self._remove()
        self.start()

    def go_back(self, seconds: float) -> None:
        """Die, and come back with the data from this many seconds ago."""
        older = self._directory.with_name(f"{self._directory.name}.older")
        shutil.copytree(self._directory, older, ignore=shutil.ignore_patterns("redis.sock", "log"))
        try:
            clock.sleep(seconds)
            self.kill()
            self._remove()
            shutil.copytree(older, self._directory, dirs_exist_ok=True)
        finally:
            shutil.rmtree(older)
        self.start()

    def _remove(self) -> None:
        for entry in self._directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


class Servers:
    """Independent servers: several are a Redlock. Each host has its own way to each server, which can be cut."""

    def __init__(self, count: int, exits: ExitStack) -> None:
        self.servers = [exits.enter_context(Durable()) for _ in range(count)]
        for server in self.servers:
            # New nodes have no vote for a while: these are to count as old.
            server.client().set("singleton_lock:memory", 1, px=100_000_000_000)

    @property
    def quorum(self) -> int:
        return len(self.servers) // 2 + 1

    @property
    def primaries(self) -> Sequence[RedisServer]:
        """The servers that have the locks."""
        return self.servers

    def ways(self, exits: ExitStack) -> list[LossyProxy]:
        """The ways of one host."""
        return [exits.enter_context(LossyProxy(server.port)) for server in self.servers]

    def conf(self, ways: Sequence[LossyProxy] = ()) -> Mapping[str, Any]:
        """Settings for programs that use these ways, or connect directly."""
        ports = [one.port for one in ways or self.servers]
        return {"singleton_lock_backend": ";".join(AT.format(port, 0) for port in ports)}


class _Group:
    """Servers that announce their own addresses, so that no proxy can be in between. They make up one lock server, on
    which a lock counts once a replica has it.
    """

    quorum = 1

    def __init__(self, group: Any, exits: ExitStack) -> None:
        self.group = exits.enter_context(group)
        self.servers = [self.group.servers[0]]

    @property
    def primaries(self) -> Sequence[RedisServer]:
        return [server for server in self.group.servers if _is_primary(server)]

    def ways(self, exits: ExitStack) -> list[LossyProxy]:
        return []

    def conf(self, ways: Sequence[LossyProxy] = ()) -> Mapping[str, Any]:
        return {"singleton_lock_backend": self.group.url}


class Sentinels(_Group):
    """A primary, two replicas, and three Sentinels."""

    def __init__(self, exits: ExitStack) -> None:
        super().__init__(SentinelGroup(), exits)

    def conf(self, ways: Sequence[LossyProxy] = ()) -> Mapping[str, Any]:
        return {**super().conf(ways), "singleton_lock_transport_options": self.group.options}


class Clustered(_Group):
    """Three primaries, each with a replica."""

    def __init__(self, exits: ExitStack) -> None:
        super().__init__(Cluster(), exits)


def _is_primary(server: RedisServer) -> bool:
    with suppress(RedisError), Redis(port=server.port, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
        return client.role()[0] == b"master"
    return False


Place = Servers | Sentinels | Clustered

PLACES: Mapping[str, Callable[[ExitStack], Place]] = {
    "server": lambda exits: Servers(1, exits),
    "redlock": lambda exits: Servers(5, exits),
    "sentinel": Sentinels,
    "cluster": Clustered,
}
