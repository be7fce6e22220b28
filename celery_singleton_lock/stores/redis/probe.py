"""Facts that the lock servers report about themselves, as far as their user may ask; nothing here judges them.

Everything here uses separate connections, and nothing blocks a server or writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from celery_singleton_lock import clock
from celery_singleton_lock.backend import Kind
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.stores.redis import urls
from celery_singleton_lock.stores.redis._redis_py import sentinels_of
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.server import OF_A_CLUSTER, Server, words_of

#: What is raised if a server does not answer, or answers with an error.
NO_ANSWER = (RedisError, OSError)


@dataclass(frozen=True, slots=True)
class Probe:
    """One server. What its user may not ask is None.

    Attributes:
        name: where it is.
        error: why it could not be asked at all; nothing else is known then.
        info: what INFO says.
        ahead: seconds by which its clock is ahead of this host's.
        uncertain: seconds by which `ahead` may be wrong: half of a round trip.
        cluster: what CLUSTER INFO says, for a node of a cluster.
    """

    name: str
    error: str | None = None
    info: Mapping[str, str] | None = None
    ahead: float | None = None
    uncertain: float = 0.0
    cluster: Mapping[str, str] | None = None

    @property
    def version(self) -> tuple[int, ...] | None:
        """The version of Redis that it is compatible with; None if it may not be asked."""
        digits = (self.info or {}).get("redis_version", "").split(".")
        return tuple(int(digit) for digit in digits if digit.isdigit()) or None

    def number(self, name: str) -> int:
        """A number from INFO; 0 if INFO does not have it."""
        text = (self.info or {}).get(name, "")
        return int(text) if text.isdigit() else 0


@dataclass(frozen=True, slots=True)
class SentinelProbe:
    """A Sentinel: where it is, and which server it takes for the master, or why it could not be asked."""

    name: str
    master: str | None = None
    error: str | None = None


class Servers:
    """The servers that an app's settings name, other than `memory://`.

    Raises:
        RedisError, OSError: no node of the cluster answers to say which nodes are masters.
    """

    def __init__(self, settings: Settings) -> None:
        self._master: str | None = None
        self._sentinels: Sequence[Any] = ()
        options = settings.transport_options
        if settings.backend.kind is Kind.SENTINEL:
            pool: Any = urls.of_sentinels(settings.backend, options)
            self._master, self._sentinels = options["master_name"], sentinels_of(pool)
        servers = urls.opened(settings.backend, options)
        self._cluster = servers if isinstance(servers, Cluster) else None  # Its nodes do not keep it.
        each = servers.servers() if isinstance(servers, Cluster) else servers
        self._each = [(f"the master {self._master}" if self._master else str(it), it) for it in each]

    def probes(self) -> list[Probe]:
        return [self._probed(name, server) for name, server in self._each]

    def sentinels(self) -> list[SentinelProbe]:
        """The Sentinels, if they know the master."""
        return [_probe_of_sentinel(client, str(self._master)) for client in self._sentinels]

    def close(self) -> None:
        for _, server in self._each:
            server.close()

    def of_a_cluster(self) -> list[str]:
        """Those that are taken for single servers, and are nodes of a cluster, as far as they say."""
        return [name for name, server in self._each if self._cluster is None and server.is_of_a_cluster]

    def _probed(self, name: str, server: Server) -> Probe:
        try:
            if self._cluster is None and server.is_of_a_cluster:
                return Probe(name, error=f"HELLO: {OF_A_CLUSTER}")
            ahead, uncertain = _clock(server)
            return Probe(
                name,
                info=_fields_of(server, "INFO"),
                ahead=ahead,
                uncertain=uncertain,
                cluster=_fields_of(server, "CLUSTER", "INFO") if self._cluster else None,
            )
        except (RedisError, OSError) as error:
            return Probe(name, error=words_of(error))


def _fields_of(server: Server, *command: str) -> Mapping[str, str] | None:
    """An answer that has a name and a value in each line; None if the user may not ask."""
    answer = _if_allowed(server, *command)
    lines = answer.decode(errors="replace").splitlines() if answer else []
    return dict(line.split(":", 1) for line in lines if ":" in line) or None


def _clock(server: Server) -> tuple[float | None, float]:
    """Seconds by which the server's clock is ahead, and by which that may be wrong; None if it may not be asked."""
    before = clock.wall()
    answer = _if_allowed(server, "TIME")
    after = clock.wall()
    if answer is None:
        return None, 0.0
    seconds, microseconds = map(int, answer)
    return seconds + microseconds / 1_000_000 - (before + after) / 2, (after - before) / 2


def _if_allowed(server: Server, *command: object) -> Any:
    try:
        return server.command(*command)
    except NoPermissionError:
        return None


def _probe_of_sentinel(client: Any, master: str) -> SentinelProbe:
    at = client.connection_pool.connection_kwargs
    name = f"{at.get('host')}:{at.get('port')}"
    try:
        found = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", master)
    except (RedisError, OSError) as error:
        return SentinelProbe(name, error=words_of(error))
    parts = [part.decode() if isinstance(part, bytes) else str(part) for part in found or ()]
    return SentinelProbe(name, master=":".join(parts) or None)
