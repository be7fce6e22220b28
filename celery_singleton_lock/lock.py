"""The lease as a lock outside of tasks: `Lock`, `Redlock` and `Semaphore`, with the interface of `redis.lock.Lock`.

    client = Redis()
    with Lock(client, "nightly-report", timeout=30) as lock:
        write_report(fence=lock.fence)

They do not need Celery. They differ from redis-py's lock: the lock is renewed while it is held, so `timeout` is how
long it outlives a crash, not how long the work may take; waiters are woken instead of polling; a lost reply locks
nobody out; there is a fencing token; and a release that failed can be repeated.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from socket import gethostname
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from redis import Redis
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.exceptions import ConnectionError, LockError, LockNotOwnedError
from redis.sentinel import SentinelConnectionPool

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock.errors import LockConflict, LockLost, LockUnavailable, SingletonLockError
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record
from celery_singleton_lock.stores.redis._redis_py import nodes_of, sentinels_of
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.keyspace import plain_key
from celery_singleton_lock.stores.redis.redlock import RedlockStore
from celery_singleton_lock.stores.redis.server import Server
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.store import Store

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds that a lock without a `timeout` outlives its holder's process.
DEFAULT_TIMEOUT = 30.0

#: A shorter lease cannot be renewed in time.
MIN_TIMEOUT = 0.1

#: A longer one (ten years) is a mistake, and more than some servers can count.
MAX_TIMEOUT = 315_360_000.0

#: The least seconds between two questions.
MIN_PAUSE = 0.01

#: The key that says since when a node of a Redlock remembers.
_MEMORY = "singleton_lock:memory"

_GONE = "it ended, was taken over, or was deleted"
_UNDER_WAY = "its release was not answered, and is sent again"


class _Plain(Exception):
    """Redis-py's `__repr__` needs what its own `__init__` has set."""

    __repr__ = Exception.__repr__


class NotHeld(_Plain, SingletonLockError, LockError):
    """The lock is not held by this thread, or has been released already."""


class NotOwned(_Plain, LockLost, LockNotOwnedError):
    """The lock was held, and is held no longer: it was not renewed in time, taken over, or deleted."""

    def __init__(self, key: str, reason: str = "") -> None:
        super().__init__(key, reason)
        self.lock_name = key


class NoTimeout(_Plain, SingletonLockError, LockError):
    """The lock was made without a `timeout`, and so has none to extend."""


class NotAcquired(_Plain, LockConflict, LockError):
    """Somebody else holds the lock, and held it for as long as this caller was willing to wait."""

    _nameless = "another holder"  # A program has no task's id, and redis-py's lock is welcome under the same key.

    def __init__(self, key: str, task_id: str | None = None, remaining: float | None = 0.0) -> None:
        super().__init__(key, task_id, remaining)
        self.lock_name = key


class Unavailable(_Plain, LockUnavailable, ConnectionError):
    """The lock server does not answer, or refuses to serve."""


class _Local:
    """The lease of a lock object, in all threads; it is no longer renewed once that object, or the thread, is gone."""

    lease: Lease | None = None

    @property
    def own(self) -> Lease | None:
        """The lease of this process: the child of a fork has none of its parent's."""
        lease = self.lease
        return lease if lease is not None and lease.pid == os.getpid() else None

    @property
    def token(self) -> bytes | None:
        """Names the hold, as redis-py's token does; None if there is none."""
        return None if (own := self.own) is None else own.owner.encode()


class _LocalOfThread(_Local, threading.local):
    """The lease of a lock object in one thread."""


def _as_redis_py_raises(method: Callable[P, T]) -> Callable[P, T]:
    """The same method, which raises an error that is redis-py's, too, if there is no answer."""

    @wraps(method)
    def translated(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return method(*arguments, **options)
        except LockUnavailable as error:
            raise Unavailable(error.server, error.reason) from error.__cause__

    return translated


class Lock:
    """A lock in Redis; a drop-in for `redis.lock.Lock`: `client.lock(name, lock_class=Lock)`.

    It is not reentrant. It uses the same key as redis-py's lock, so that the two exclude each other, but another value.

    Args:
        redis: a client of one server, of a master that Sentinel knows, or of a Redis Cluster. The lock opens its own
            connections in the same way.
        name: the name of the lock, and its key.
        timeout: seconds that the lock outlives its holder's process; None: 30, and `extend` and `reacquire` fail as
            redis-py's do. While the lock is held it is renewed.
        sleep: seconds between two looks while a lock of redis-py, which wakes nobody, holds the key; otherwise waiters
            are woken.
        blocking: whether `acquire` waits.
        blocking_timeout: the most seconds that it waits; None: without a limit.
        thread_local: whether only the thread that acquired the lock may release it.
        raise_on_release_error: whether the end of a `with` block raises if the lock was lost. It never does if the
            block itself raises.
        renew: False: hold it for at most `timeout` seconds, as redis-py does.
        on_lost: called with the lock, in a separate thread, if the lock is lost while it is held.

    Raises:
        TypeError: the client is of another kind, such as one of `redis.asyncio`.
        ValueError: the timeout is too short to be renewed, or too long.
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
        if timeout is not None and not MIN_TIMEOUT <= _number(timeout) <= MAX_TIMEOUT:
            raise ValueError(
                f"timeout of lock {name!r} is {timeout!r}; allowed: {MIN_TIMEOUT:g} seconds or more (up to ten years), "
                f"or None for {DEFAULT_TIMEOUT:g} (a lock that never ends would be stuck after a crash)"
            )
        self.redis = redis
        self.name = name.decode() if isinstance(name, bytes) else name
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.local = _LocalOfThread() if self.thread_local else _Local()
        self.raise_on_release_error = raise_on_release_error
        self._heartbeat = self._heartbeat_of(redis)
        self._key = plain_key(self.name)
        self._limit = 1
        self._renews = renew
        self._on_lost = on_lost

    def __enter__(self) -> Lock:
        if self.acquire():
            return self
        found = self._holds()
        task_id = found[0].holder.task_id if found and found[0].holder else None
        raise NotAcquired(self.name, task_id, found[0].remaining if found else 0.0)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.release()
        except (LockError, Unavailable) as failed:
            # The block's own error matters more than this one.
            if error is None and (self.raise_on_release_error or isinstance(failed, Unavailable)):
                raise
            logger.warning("lock %s could not be freed at the end of its with block: %s", self.name, failed)

    @_as_redis_py_raises
    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """Take the lock; True if it is held now, False if it was not free in time.

        Args:
            sleep: seconds between two looks, as for the constructor; None: as the constructor says.
            blocking: whether to wait; None: as the constructor says.
            blocking_timeout: the most seconds to wait; None: as the constructor says.
            token: not allowed: a hold belongs to the object that acquired it.

        Raises:
            Unavailable: the server does not answer.
            ValueError: a token was given.
        """
        if token is not None:
            raise ValueError(
                f"the token of lock {self.name!r} is {token!r}; allowed: None, since no other object can release the "
                "hold; pass on the lock object itself (thread_local=False)"
            )
        blocking = self.blocking if blocking is None else blocking
        patience = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        is_waiting = blocking and (patience is None or patience > 0)
        # The owner is new for each call: a repeat within the call gets the same hold again, and nobody else does.
        holder = Holder(None, 0, gethostname(), os.getpid(), clock.wall(), 0, process_identity.own())
        request = LockRequest(self._key, new_owner(), self._ttl, holder, is_waiting, limit=self._limit)
        until = math.inf if patience is None else clock.now() + patience
        pause = max(MIN_PAUSE, self.sleep if sleep is None else sleep)
        try:
            found = self._ask(request, until, pause)
            if isinstance(found, Lease):
                self._hold(found)
            return isinstance(found, Lease)
        except LockUnavailable:  # The store has given up what it asked for.
            raise
        except BaseException:
            # Interrupted (Ctrl-C, a time limit) between the answer and the end of this call: the lock may be held, and
            # nobody would release it.
            self._forget(request)
            raise

    @_as_redis_py_raises
    def release(self) -> None:
        """Give the lock back. You can repeat this after `Unavailable`; otherwise the lock expires by itself.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: the lock was gone, and somebody else may have had it.
            Unavailable: the server does not answer.
        """
        lease = self._held_here("release")
        was_held = lease.held or lease.reason == _UNDER_WAY
        self._heartbeat.stop(lease)
        try:
            self.local.lease = None  # Before it is free: another thread may acquire it with this object from then on.
            freed = self._heartbeat.store.free(lease)
        except BaseException:
            lease.lose(_UNDER_WAY if was_held else lease.reason or _GONE)
            self.local.lease = self.local.lease or lease
            raise
        if not freed or (freed == Freeing.UNCLEAR and not was_held):
            raise NotOwned(self.name, lease.reason or _GONE)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Let the lock outlive this process by `additional_time` more seconds, or (`replace_ttl`) by that many.

        A shorter time counts from the next renewals on: what the server has granted is not taken back.

        Raises:
            NotHeld, NotOwned, Unavailable: as `release`.
            NoTimeout: the lock was made without a timeout.
            ValueError: the time is not a number, or the result is too short to be renewed, or too long.
        """
        self._reset("extend", additional_time, 0.0 if replace_ttl else 1.0)
        return True

    def reacquire(self) -> Literal[True]:
        """Give the lock its whole timeout again.

        Raises:
            NotHeld, NotOwned, Unavailable: as `release`.
            NoTimeout: the lock was made without a timeout.
        """
        self._reset("reacquire", self._ttl, 0.0)
        return True

    def locked(self) -> bool:
        """Whether the lock is held, by this or any other holder."""
        return bool(self._holds())

    def owned(self) -> bool:
        """Whether this thread holds the lock, as the server sees it. False in a forked child: its parent holds it."""
        lease = self.local.own
        return lease is not None and any(found.owner == lease.owner for found in self._holds())

    @property
    def fence(self) -> int:
        """A number that is higher for every later holder; 0 while the lock is not held. See `Lease.fence`."""
        lease = self.local.own
        return 0 if lease is None else int(lease.fence)

    @property
    def lost(self) -> bool:
        """Whether this thread held the lock and can no longer trust that it does. Costs no round trip."""
        lease = self.local.own
        return lease is not None and not lease.held

    def check(self) -> None:
        """Raise an error if the lock is lost; costs no round trip while it is not. See `Lease.check`.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: it was lost.
        """
        try:
            self._held_here("check").check()
        except LockLost as lost:
            raise NotOwned(self.name, lost.reason) from None

    @property
    def _ttl(self) -> float:
        return DEFAULT_TIMEOUT if self.timeout is None else float(self.timeout)

    def _heartbeat_of(self, redis: Any) -> Heartbeat:
        if isinstance(redis, RedisCluster):
            return _shared([redis], None, lambda: RedisStore(_cluster(redis), "the cluster"))
        pool = _pool_of(redis)
        return _shared([pool], None, lambda: RedisStore(Server(pool), _address(pool)))

    def _ask(self, request: LockRequest, until: float, pause: float) -> Lease | Held | Record:
        """Ask for the lock, and wait for it until that time; what was found last."""
        store = self._heartbeat.store
        found = store.acquire(request)
        if isinstance(found, Lease) or not request.waiting:
            return found
        with store.waiter(request) as waiter:
            while isinstance(found, Held) and (left := until - clock.now()) > 0:
                # A value that this package did not write is redis-py's, say, whose release wakes nobody.
                soon = pause if found.holder is None and found.owner else float("inf")
                found = waiter.wait(min(left, trust.seconds_until_over(found.remaining), soon))
        return found

    def _hold(self, lease: Lease) -> None:
        lease.only_longer = True  # A late renewal must not shorten what `extend` has made longer.
        if self._renews:
            self._heartbeat.start(lease, self._say_lost)
        self.local.lease = lease

    def _forget(self, request: LockRequest) -> None:
        """Give up the hold that this request may have got."""
        lease = self.local.lease
        if lease is not None and lease.owner == request.owner:
            self._heartbeat.stop(lease)
            self.local.lease = None
        self._heartbeat.store.abandon(request.hold())

    def _held_here(self, verb: str) -> Lease:
        """This thread's lease."""
        if (lease := self.local.own) is None:
            whose = "" if self.local.lease is None else f": the parent process, {self.local.lease.pid}, does"
            raise NotHeld(f"cannot {verb} lock {self.name!r}: this thread does not hold it{whose}")
        return lease

    @_as_redis_py_raises
    def _reset(self, verb: str, seconds: float, keeping: float) -> None:
        """Renew the hold for `seconds`, plus its remaining time multiplied by `keeping`."""
        lease = self._held_here(verb)
        if self.timeout is None:
            raise NoTimeout(
                f"cannot {verb} lock {self.name!r}: it was made without a timeout; give it one, or rely on its renewals"
            )
        ttl = _number(seconds) + keeping * max(lease.remaining, 0.0)
        if not MIN_TIMEOUT <= ttl <= MAX_TIMEOUT:
            raise ValueError(
                f"cannot {verb} lock {self.name!r} by {seconds!r} seconds; allowed: a number after which it lasts for "
                f"{MIN_TIMEOUT:g} seconds or more (up to ten years); to end it, release it"
            )
        if not self._heartbeat.renew(lease, ttl):
            raise NotOwned(self.name, lease.reason or _GONE)

    @_as_redis_py_raises
    def _holds(self) -> list[Held]:
        return self._heartbeat.store.held(self._key)

    def _say_lost(self, lease: Lease) -> None:
        logger.error("lock %s was lost while it was held: %s", self.name, lease.reason)
        if self._on_lost is not None:
            self._on_lost(self)


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

    def _heartbeat_of(self, redis: Any) -> Heartbeat:
        pools = [_pool_of(client) for client in redis]

        def open_store() -> Store:
            addresses = [_address(pool) for pool in pools]
            if twice := [address for address in addresses if addresses.count(address) > 1]:
                raise ValueError(
                    f"lock {self.name!r} has {len(twice)} clients of {twice[0]}; allowed: each of a different "
                    "server, or one that fails takes the majority with it (Redlock)"
                )
            memory = _MEMORY if self._restart_delay else None
            return RedlockStore([*map(Server, pools)], ";".join(addresses), memory=memory)

        return _shared(pools, self._restart_delay, open_store)


class Semaphore(Lock):
    """A lock that up to `limit` holders share, each with its own object (or thread); see `Lock`.

    Args:
        limit: how many holders; the same for all users of the name.

    Raises:
        ValueError: the limit is less than one, or the timeout is too short.
    """

    def __init__(self, redis: Redis | RedisCluster, name: str | bytes, limit: int, **options: Any) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit of semaphore {name!r} is {limit!r}; allowed: a whole number, 1 or more")
        super().__init__(redis, name, **options)
        self._limit = limit


#: What the locks of a client share: the renewals of a store's leases. They are found by the client's pool (a cluster's
#: by the client itself), those of a Redlock by all pools, one after the other; and go with any of them.
_by_pool: WeakKeyDictionary[object, Any] = WeakKeyDictionary()


def _shared(pools: Sequence[object], way: object, open_store: Callable[[], Store]) -> Heartbeat:
    """What the locks with these pools share if they use them in this way."""
    level, found = _by_pool, {}
    for pool in pools:
        found, level = level.setdefault(pool, ({}, WeakKeyDictionary()))
    heartbeat: Heartbeat | None = found.get(way)
    if heartbeat is None:
        store = open_store()
        heartbeat = found.setdefault(way, Heartbeat(store))
        # Not when the process ends: it closes everything.
        weakref.finalize(heartbeat, store.close).atexit = False
    return heartbeat


def _pool_of(client: Any) -> ConnectionPool:
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, ConnectionPool):
        return pool
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    asynchronous = (
        "; for one of redis.asyncio, make a client of redis.Redis and a lock with thread_local=False, and call it in "
        "threads (asyncio.to_thread)"
        if kind.startswith("redis.asyncio.")
        else ""
    )
    # That of a cluster comes here from a Redlock only.
    allowed = "redis.Redis" if isinstance(client, RedisCluster) else "redis.Redis or redis.RedisCluster"
    raise TypeError(f"a lock's client is {kind}; allowed: {allowed}{asynchronous}")


def _cluster(client: RedisCluster) -> Cluster:
    start, options = nodes_of(client)
    return Cluster(start, lambda host, port: ConnectionPool(host=host, port=port, **options))


def _address(pool: ConnectionPool) -> str:
    """The server of a pool, for people, whatever the database."""
    if isinstance(pool, SentinelConnectionPool):
        return f"{pool.service_name} of {','.join(_address(one.connection_pool) for one in sentinels_of(pool))}"
    at = pool.connection_kwargs
    return str(at.get("path") or f"{at.get('host', 'localhost')}:{at.get('port', 6379)}")


def _number(seconds: object) -> float:
    """A number of seconds; NaN, which is not allowed anywhere, for anything that is not a number."""
    if isinstance(seconds, (bool, str, bytes)):
        return math.nan
    try:
        return float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
