"""The lease as a lock outside of tasks: `Lock`, `Redlock` and `Semaphore`, with the interface of `redis.lock.Lock`.

    client = Redis()
    with Lock(client, "nightly-report", timeout=30) as lock:
        write_report(fence=lock.fence)

Nobody has to know Celery for that. What is different to redis-py's: the lock is renewed while it is held, so `timeout`
is how long it outlives a crash, not how long the work may take; waiters are woken instead of polling; a lost reply
locks nobody out; there is a fencing token; and a release that failed can be repeated.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from redis import Redis
from redis.cluster import NodesManager, RedisCluster
from redis.connection import ConnectionPool
from redis.exceptions import ConnectionError, LockError, LockNotOwnedError

from celery_singleton_lock import clock, process
from celery_singleton_lock.errors import LockConflict, LockLost, LockUnavailable, SingletonLockError
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.lease import OWNER_LENGTH, Done, Held, Holder, Lease, Name, new_owner
from celery_singleton_lock.stores import Store
from celery_singleton_lock.stores.cluster import Cluster
from celery_singleton_lock.stores.redis import RedisStore
from celery_singleton_lock.stores.redlock import RedlockStore
from celery_singleton_lock.stores.server import Server

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds that a lock without a `timeout` outlives its holder's process.
DEFAULT_TIMEOUT = 30.0

#: A shorter lease cannot be renewed in time.
MIN_TIMEOUT = 0.1

#: The key by which a node of a Redlock knows since when it remembers.
_MEMORY = "singleton_lock:memory"


class NotHeld(SingletonLockError, LockError):
    """The lock is not held by this thread, or has been released already."""


class NotOwned(LockLost, LockNotOwnedError):
    """The lock was held, and is no more: it was not renewed in time, taken over, or deleted."""

    def __init__(self, key: str, reason: str = "") -> None:
        super().__init__(key, reason)
        self.lock_name = key


class NotAcquired(LockConflict, LockError):
    """Somebody else holds the lock, and has held it for as long as this one was willing to wait."""

    def __init__(self, key: str, task_id: str | None = None, remaining: float = 0.0) -> None:
        super().__init__(key, task_id, remaining)
        self.lock_name = key


class Unavailable(LockUnavailable, ConnectionError):
    """The lock server does not answer, or refuses to serve."""


class Lock:
    """A lock in Redis; a drop-in for `redis.lock.Lock`: `client.lock(name, lock_class=Lock)`.

    Not reentrant. At the same key as redis-py's, so that both exclude each other, but with a value of its own.

    Args:
        redis: a client of one server, of a master that Sentinel knows, or of a Redis Cluster. The lock uses connections
            of its own, made in the same way.
        name: of the lock, and its key.
        timeout: seconds that the lock outlives its holder's process; None: 30. While it is held it is renewed.
        sleep: there for redis-py's sake; waiters are woken.
        blocking: whether `acquire` waits.
        blocking_timeout: seconds that it waits at most; None: without bound.
        thread_local: whether only the thread that acquired the lock may release it.
        raise_on_release_error: whether the end of a `with` block raises when the lock was lost. It never does where the
            block itself raises.
        renew: False: hold it for `timeout` seconds at most, as redis-py does.
        on_lost: called with the lock, in a thread of ours, when it is lost while it is held; must be quick.

    Raises:
        ValueError: the timeout is too short to be renewed.
    """

    def __init__(
        self,
        redis: Any,
        name: str | bytes,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        renew: bool = True,
        on_lost: Callable[[Lock], object] | None = None,
    ) -> None:
        if timeout is not None and not timeout >= MIN_TIMEOUT:
            raise ValueError(
                f"timeout of lock {name!r} is {timeout!r}; allowed: {MIN_TIMEOUT:g} seconds or more, or None for "
                f"{DEFAULT_TIMEOUT:g} (a lock that never ends would be stuck after a crash)"
            )
        self.redis = redis
        self.name = name.decode() if isinstance(name, bytes) else name
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.local: Any = threading.local() if self.thread_local else SimpleNamespace()
        self.local.token = None
        self.raise_on_release_error = raise_on_release_error
        self._keeper = self._kept(redis)
        self._key = Name(self.name)
        self._limit = 1
        self._renews = renew
        self._on_lost = on_lost

    def __enter__(self) -> Lock:
        if self.acquire():
            return self
        found = self._look()
        task_id = found[0].holder.task_id if found and found[0].holder else None
        raise NotAcquired(self.name, task_id, found[0].remaining if found else 0.0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.release()
        except (LockError, Unavailable) as failed:
            # What the block raised is told rather than this.
            if error is None and (self.raise_on_release_error or isinstance(failed, Unavailable)):
                raise
            logger.warning("lock %s could not be freed at the end of its with block: %s", self.name, failed)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Take the lock; True when it is ours, False when it could not be had in time.

        Args:
            sleep: there for redis-py's sake.
            blocking: whether to wait for it; as the constructor says when None.
            blocking_timeout: seconds to wait at most; as the constructor says when None.
            token: makes this hold the same as another one with this token, which must be a secret; random when None.

        Raises:
            Unavailable: the server does not answer.
        """
        blocking = self.blocking if blocking is None else blocking
        patience = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        owner = new_owner() if token is None else _owner_of(token)
        until = float("inf") if patience is None else clock.now() + patience
        found = _translated(lambda: self._ask(owner, until if blocking else 0.0))
        if isinstance(found, Lease):
            self._hold(found, token or owner)
            return True
        return False

    def release(self) -> None:
        """Give the lock back. After `Unavailable` this can be repeated; else the lock ends by itself.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: it was lost meanwhile.
            Unavailable: the server does not answer.
        """
        lease = self._lease("release")
        self._keeper.heartbeat.stop(lease)
        released = _translated(lambda: self._keeper.store.release(lease))
        self.local.token = self.local.held = None
        if not released:
            raise NotOwned(self.name, lease.reason or "it ended, was taken over, or was deleted")

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Have the lock outlive this process by `additional_time` seconds more, or (`replace_ttl`) by just that.

        Raises:
            NotHeld, NotOwned, Unavailable: as `release`.
        """
        lease = self._lease("extend")
        self._reset(lease, additional_time if replace_ttl else max(lease.remaining, 0.0) + additional_time)
        return True

    def reacquire(self) -> Literal[True]:
        """Give the lock its whole timeout again.

        Raises:
            NotHeld, NotOwned, Unavailable: as `release`.
        """
        self._reset(self._lease("reacquire"), self._ttl)
        return True

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return bool(self._look())

    def owned(self) -> bool:
        """Whether this thread holds the lock, as the server sees it."""
        held = getattr(self.local, "held", None)
        return held is not None and any(found.owner == held.lease.owner for found in self._look())

    @property
    def fence(self) -> int:
        """A number that is higher for every later holder; 0 while the lock is not held. See `Lease.fence`."""
        held = getattr(self.local, "held", None)
        return 0 if held is None else int(held.lease.fence)

    @property
    def lost(self) -> bool:
        """Whether the lock was held by this thread, and cannot be believed to be any more. Costs no round trip."""
        held = getattr(self.local, "held", None)
        return held is not None and not held.lease.held

    def check(self) -> None:
        """Say so if the lock is lost; costs no round trip while it is not. See `Lease.check`.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: it was lost.
        """
        try:
            self._lease("check").check()
        except LockLost as lost:
            raise NotOwned(self.name, lost.reason) from None

    @property
    def _ttl(self) -> float:
        return DEFAULT_TIMEOUT if self.timeout is None else float(self.timeout)

    def _kept(self, redis: Redis | RedisCluster) -> _Keeper:
        return _kept_by(redis)

    def _ask(self, owner: str, until: float) -> Lease | Held | Done:
        """Ask for the lock, and wait for it until then; what was found last."""
        holder = Holder(None, 0, _node(), os.getpid(), clock.wall(), process=process.identity())
        store, began = self._keeper.store, clock.now()
        found = store.acquire(self._key, owner, ttl=self._ttl, holder=holder, waiting=until > 0, limit=self._limit)
        if isinstance(found, Lease) or until <= began:
            return found
        with store.turn(self._key, owner, ttl=self._ttl, holder=holder, limit=self._limit) as turn:
            while isinstance(found, Held) and (left := until - clock.now()) > 0:
                found = turn.wait(min(left, found.remaining + 0.002))
        return found

    def _hold(self, lease: Lease, token: str | bytes) -> None:
        self.local.token = token.encode() if isinstance(token, str) else token
        self.local.held = _Holding(self, lease)
        if self._renews:
            self._keeper.heartbeat.start(lease, self.local.held.when_lost)

    def _lease(self, verb: str) -> Lease:
        held: _Holding | None = getattr(self.local, "held", None)
        if held is None:
            raise NotHeld(f"cannot {verb} lock {self.name!r}: this thread does not hold it")
        if held.lease.pid != os.getpid():
            raise NotHeld(f"cannot {verb} lock {self.name!r}: it is held by process {held.lease.pid}, the parent's")
        return held.lease

    def _reset(self, lease: Lease, ttl: float) -> None:
        lease.ttl = ttl
        (ours,) = _translated(lambda: self._keeper.store.renew([lease], timeout=self._ttl))
        if not ours:
            lease.lose("it ended, was taken over, or was deleted")
            raise NotOwned(self.name, lease.reason or "")

    def _look(self) -> list[Held]:
        return _translated(lambda: self._keeper.store.look(self._key, limit=self._limit))

    def _tell(self, lease: Lease) -> None:
        logger.error("lock %s was lost while it was held: %s", self.name, lease.reason)
        if self._on_lost is not None:
            self._on_lost(self)


class Redlock(Lock):
    """A lock on a majority of independent servers; see `Lock`.

    Args:
        redis: clients of an odd number of servers, at least three, that are no replicas of each other.
        restart_delay: False: believe nodes that came back without their data, at the risk of two holders.

    Raises:
        ValueError: the number of clients is even or too small, or the timeout is too short.
    """

    def __init__(
        self, redis: Sequence[Redis], name: str | bytes, *arguments: Any, restart_delay: bool = True, **options: Any
    ) -> None:
        if len(redis) % 2 == 0 or len(redis) < 3:
            raise ValueError(f"lock {name!r} has {len(redis)} clients; allowed: an odd number of at least 3 (Redlock)")
        self._restart_delay = restart_delay
        super().__init__(redis, name, *arguments, **options)

    def _kept(self, redis: Any) -> _Keeper:
        return _kept_by_each(redis, self._restart_delay)


class Semaphore(Lock):
    """A lock that up to `limit` may hold at once, each with an object of its own (or a thread of its own); see `Lock`.

    Args:
        limit: how many; the same for all who use the name.

    Raises:
        ValueError: the limit is less than one, or the timeout is too short.
    """

    def __init__(self, redis: Redis | RedisCluster, name: str | bytes, limit: int, **options: Any) -> None:
        if limit < 1:
            raise ValueError(f"limit of semaphore {name!r} is {limit!r}; allowed: a whole number from 1")
        super().__init__(redis, name, **options)
        self._limit = limit


class _Keeper:
    """What the locks of one client share."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.heartbeat = Heartbeat(store)


class _Holding:
    """One hold of a lock; the heartbeat forgets it with the thread or the lock that it belongs to."""

    def __init__(self, lock: Lock, lease: Lease) -> None:
        self._lock = lock
        self.lease = lease
        self._told = False

    def when_lost(self) -> None:
        if not self._told:
            self._told = True
            self._lock._tell(self.lease)


#: By the first connection pool (or cluster), and then by the others and how they are used.
_keepers: WeakKeyDictionary[Any, dict[object, _Keeper]] = WeakKeyDictionary()
_making = threading.Lock()


def _kept_by(client: Redis | RedisCluster) -> _Keeper:
    """What the locks of this client, and of others with its connection pool, share."""
    if isinstance(client, RedisCluster):
        nodes = client.nodes_manager
        return _keeper(nodes, None, lambda: RedisStore(_cluster(nodes), "the cluster"))
    pool = client.connection_pool
    return _keeper(pool, None, lambda: RedisStore(server := Server(pool), str(server)))


def _kept_by_each(clients: Sequence[Redis], restart_delay: bool) -> _Keeper:
    pools = [client.connection_pool for client in clients]

    def open_store() -> Store:
        servers = [Server(pool) for pool in pools]
        return RedlockStore(servers, ";".join(map(str, servers)), memory=_MEMORY if restart_delay else None)

    return _keeper(pools[0], (restart_delay, *map(weakref.ref, pools[1:])), open_store)


def _keeper(of: object, variant: object, open_store: Callable[[], Store]) -> _Keeper:
    with _making:
        variants = _keepers.get(of)
        if variants is None:
            variants = _keepers[of] = {}
        if variant not in variants:
            variants[variant] = _Keeper(open_store())
        return variants[variant]


def _cluster(nodes: NodesManager) -> Cluster:
    options = {name: value for name, value in nodes.connection_kwargs.items() if name not in ("host", "port")}

    def pool_of(host: str, port: int) -> ConnectionPool:
        return ConnectionPool(host=host, port=port, **options)

    return Cluster([(node.host, node.port) for node in nodes.startup_nodes.values()], pool_of)


@cache
def _node() -> str:
    return socket.gethostname()


def _owner_of(token: str | bytes) -> str:
    """An owner for a token of the caller's; of the same length as all others, so that none begins like another."""
    return hashlib.sha256(token.encode() if isinstance(token, str) else token).hexdigest()[:OWNER_LENGTH]


def _translated(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except LockUnavailable as error:
        raise Unavailable(error.server, error.reason) from error.__cause__
