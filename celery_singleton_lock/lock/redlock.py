"""A lock outside of tasks on a majority of servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import Redis

from celery_singleton_lock.lock.clients import SharedStore, address_of, shared_by_each
from celery_singleton_lock.lock.lock import Lock


class Redlock(Lock):
    """A lock on a majority of independent servers; see `Lock`.

    Args:
        redis: clients of an odd number of servers, at least three, that are not replicas of each other.
        restart_delay: False: trust nodes that came back without their data, at the risk of two holders.

    Raises:
        ValueError: the number of clients is even or too small, or two of them belong to one server; see also `Lock`.
    """

    def __init__(
        self, redis: Sequence[Redis], name: str | bytes, *arguments: Any, restart_delay: bool = True, **options: Any
    ) -> None:
        if len(redis) % 2 == 0 or len(redis) < 3:
            raise ValueError(f"lock {name!r} has {len(redis)} clients; allowed: an odd number of at least 3 (Redlock)")
        self._restart_delay = restart_delay
        super().__init__(redis, name, *arguments, **options)

    def _shared_by(self, redis: Any) -> SharedStore:
        return shared_by_each(redis, self._restart_delay, self._check_servers)

    def _check_servers(self) -> None:
        addresses = [address_of(client) for client in self.redis]
        if twice := [address for address in addresses if addresses.count(address) > 1]:
            raise ValueError(
                f"lock {self.name!r} has {len(twice)} clients of {twice[0]}; allowed: each of a different "
                "server, or one that fails takes the majority with it (Redlock)"
            )
