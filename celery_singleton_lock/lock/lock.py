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
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar

from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import ConnectionError, LockError, LockNotOwnedError

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock.errors import LockConflict, LockLost, LockUnavailable, SingletonLockError
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.lock.clients import (
    Keeper,
    address_of,
    kept_by,
    kept_by_each,
)
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.redis.keyspace import Name

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: Seconds that a lock without a `timeout` outlives its holder's process.
DEFAULT_TIMEOUT = 30.0

#: A shorter lease cannot be renewed in time.
MIN_TIMEOUT = 0.1

#: A longer one (ten years) is a mistake, and more than some servers can count.
MAX_TIMEOUT = 315_360_000.0

#: Seconds at least between two looks.
MIN_PAUSE = 0.01

_GONE = "it ended, was taken over, or was deleted"
_UNDER_WAY = "its release was not answered, and is said again"

#: Held while it is noted which hold an object has.
_noting = Mutex(threading.RLock)

#: Characters of an owner that come from the token; the rest is new for each hold.
_OF_TOKEN = 20


class NotHeld(SingletonLockError, LockError):
    """The lock is not held by this thread, or has been released already."""

    __repr__ = Exception.__repr__  # redis-py's needs what its own __init__ has set.


class NotOwned(LockLost, LockNotOwnedError):
    """The lock was held, and is no more: it was not renewed in time, taken over, or deleted."""

    __repr__ = Exception.__repr__  # redis-py's needs what its own __init__ has set.

    def __init__(self, key: str, reason: str = "") -> None:
        super().__init__(key, reason)
        self.lock_name = key


class NoTimeout(SingletonLockError, LockError):
    """The lock was made without a `timeout`, and so has none to extend."""

    __repr__ = Exception.__repr__  # redis-py's needs what its own __init__ has set.


class NotAcquired(LockConflict, LockError):
    """Somebody else holds the lock, and has held it for as long as this one was willing to wait."""

    __repr__ = Exception.__repr__  # redis-py's needs what its own __init__ has set.

    def __init__(self, key: str, task_id: str | None = None, remaining: float | None = 0.0) -> None:
        super().__init__(key, task_id, remaining)
        self.lock_name = key


class Unavailable(LockUnavailable, ConnectionError):
    """The lock server does not answer, or refuses to serve."""

    __repr__ = Exception.__repr__  # redis-py's needs what its own __init__ has set.


class Lock:
    """A lock in Redis; a drop-in for `redis.lock.Lock`: `client.lock(name, lock_class=Lock)`.

    Not reentrant. At the same key as redis-py's, so that both exclude each other, but with a value of its own.

    Args:
        redis: a client of one server, of a master that Sentinel knows, or of a Redis Cluster. The lock uses connections
            of its own, made in the same way.
        name: of the lock, and its key.
        timeout: seconds that the lock outlives its holder's process; None: 30, and `extend` and `reacquire` fail as
            redis-py's do. While it is held it is renewed.
        sleep: seconds between two looks while a lock of redis-py's own holds the key, which wakes nobody; else waiters
            are woken.
        blocking: whether `acquire` waits.
        blocking_timeout: seconds that it waits at most; None: without bound.
        thread_local: whether only the thread that acquired the lock may release it.
        raise_on_release_error: whether the end of a `with` block raises when the lock was lost. It never does where the
            block itself raises.
        renew: False: hold it for `timeout` seconds at most, as redis-py does.
        on_lost: called with the lock, in a thread of its own, when it is lost while it is held.
        replicas: how many replicas must have the lock before it counts as taken (`WAIT`).

    Raises:
        TypeError: the client is none of these, such as one of `redis.asyncio`.
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
        replicas: int = 0,
    ) -> None:
        if timeout is not None and not MIN_TIMEOUT <= _number(timeout) <= MAX_TIMEOUT:
            raise ValueError(
                f"timeout of lock {name!r} is {timeout!r}; allowed: {MIN_TIMEOUT:g} seconds or more (up to ten years), "
                f"or None for {DEFAULT_TIMEOUT:g} (a lock that never ends would be stuck after a crash)"
            )
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
            raise ValueError(f"replicas of lock {name!r} is {replicas!r}; allowed: a whole number from 0")
        self.redis = redis
        self.name = name.decode() if isinstance(name, bytes) else name
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.local: _Local = _LocalOfThread() if self.thread_local else _Local()
        self.raise_on_release_error = raise_on_release_error
        self._replicas = replicas
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
            sleep: as the constructor says when None.
            blocking: whether to wait for it; as the constructor says when None.
            blocking_timeout: seconds to wait at most; as the constructor says when None.
            token: the hold's `local.token`, random when None. Who knows it may release the lock, so it must be a
                secret: give it to another object by `other.local.token = token`. It lets nobody in: whoever acquires
                with a token under which the lock is held already is refused as everybody else.

        Raises:
            Unavailable: the server does not answer.
        """
        blocking = self.blocking if blocking is None else blocking
        patience = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        made = _encoded(token) or secrets.token_hex(16).encode()
        # New for each call: what is repeated within it gets its own hold again, and nobody else does.
        owner = _of(made) + new_owner()[_OF_TOKEN:]
        until = float("inf") if patience is None else clock.now() + patience
        pause = max(MIN_PAUSE, self.sleep if sleep is None else sleep)
        try:
            found = _translated(lambda: self._ask(owner, until if blocking else 0.0, pause))
            if not isinstance(found, Lease):
                return False
            self._hold(found, made)
            return True
        except Unavailable:
            raise  # The store has given up what it asked for.
        except BaseException:
            # Interrupted (Ctrl-C, a time limit) between the answer and noting it: it may be ours, and nobody knows.
            self._forget(owner)
            raise

    def _forget(self, owner: str) -> None:
        """Give up what this owner may have got, unless that is noted as held."""
        held = self.local.held
        if held is None or held.lease.owner != owner:
            self._keeper.store.abandon(Hold(self._key, owner, ttl=self._ttl, limit=self._limit))

    def release(self) -> None:
        """Give the lock back. After `Unavailable` this can be repeated; else the lock ends by itself.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: it was lost meanwhile.
            Unavailable: the server does not answer.
        """
        token, begun = self._token("release"), self.local.releasing
        again = begun is not None and begun.token == token
        held, lease = self.local.held, self._lease()
        released = False
        if lease is not None:
            if not again:
                begun = self.local.releasing = _Releasing(token, lease.held)
            self._keeper.heartbeat.stop(lease)
            try:
                released = _translated(lambda: self._keeper.store.free(lease))
            except Unavailable:
                lease.lose(_UNDER_WAY)
                raise
        self.local.forget(held, token)
        # What is gone when a release is repeated was released, and only the answer was lost; unless it was lost before.
        if not (begun is not None and begun.was_held if again else released):
            raise NotOwned(self.name, (lease and lease.reason) or _GONE)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Have the lock outlive this process by `additional_time` seconds more, or (`replace_ttl`) by just that.

        An object that was only given the token of a hold can make its time longer, not shorter.

        Raises:
            NotHeld, NotOwned, Unavailable: as `release`.
            NoTimeout: the lock was made without one.
            ValueError: that is no number, or what comes out of it is too short to be renewed, or too long.
        """
        self._reset("extend", additional_time, 0.0 if replace_ttl else 1.0)
        return True

    def reacquire(self) -> Literal[True]:
        """Give the lock its whole timeout again.

        Raises:
            NotHeld, NotOwned, Unavailable: as `release`.
            NoTimeout: the lock was made without one.
        """
        self._reset("reacquire", self._ttl, 0.0)
        return True

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        return bool(self._look())

    def owned(self) -> bool:
        """Whether this thread holds the lock, as the server sees it. False in the child of a fork: its parent does."""
        token = self.local.token
        return token is not None and any(found.owner.startswith(self._owner(token)) for found in self._look())

    @property
    def fence(self) -> int:
        """A number that is higher for every later holder; 0 while the lock is not held. See `Lease.fence`."""
        held = self.local.held
        return 0 if held is None else int(held.lease.fence)

    @property
    def lost(self) -> bool:
        """Whether the lock was held by this thread, and cannot be believed to be any more. Costs no round trip."""
        held = self.local.held
        return held is not None and not held.lease.held

    def check(self) -> None:
        """Say so if the lock is lost; costs no round trip while it is not. See `Lease.check`.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: it was lost.
        """
        held = self.local.held
        if held is None:
            self._token("check")
            raise NotHeld(
                f"cannot check lock {self.name!r}: this object knows the token of the hold, and not its lease"
            )
        try:
            held.lease.check()
        except LockLost as lost:
            raise NotOwned(self.name, lost.reason) from None

    @property
    def _ttl(self) -> float:
        return DEFAULT_TIMEOUT if self.timeout is None else float(self.timeout)

    def _kept(self, redis: Redis | RedisCluster) -> Keeper:
        return kept_by(redis, self._replicas)

    def _ask(self, owner: str, until: float, pause: float) -> Lease | Held | Record:
        """Ask for the lock, and wait for it until then; what was found last."""
        holder = Holder(None, 0, _node(), os.getpid(), clock.wall(), process=process_identity.own())
        store, began = self._keeper.store, clock.now()
        request = LockRequest(self._key, owner, ttl=self._ttl, holder=holder, waiting=until > 0, limit=self._limit)
        found = store.acquire(request)
        if isinstance(found, Lease) or until <= began:
            return found
        with store.waiter(request) as waiter:
            while isinstance(found, Held) and (left := until - clock.now()) > 0:
                # A value that is not of this package is redis-py's, say, whose release wakes nobody.
                soon = pause if found.holder is None else float("inf")
                found = waiter.wait(min(left, trust.seconds_until_over(found.remaining), soon))
        return found

    def _hold(self, lease: Lease, token: bytes) -> None:
        held = _Holding(self, lease)
        if self._renews:
            self._keeper.heartbeat.start(lease, held.when_lost)
        self.local.hold(held, token)

    def _token(self, verb: str) -> bytes:
        """The token of this thread's hold."""
        if (token := self.local.token) is not None:
            return token
        if (parent := self.local.parent) is not None:
            raise NotHeld(f"cannot {verb} lock {self.name!r}: it is held by process {parent}, the parent's")
        raise NotHeld(f"cannot {verb} lock {self.name!r}: this thread does not hold it")

    def _owner(self, token: bytes) -> str:
        """What the owner of this thread's hold is, or begins with."""
        held = self.local.held
        return _of(token) if held is None else held.lease.owner

    def _lease(self) -> Lease | None:
        """Of this thread's hold, or of the one whose token it was given; None if that is gone."""
        if (held := self.local.held) is not None:
            return held.lease
        owner = _of(self._token("use"))
        found = next((found for found in self._look() if found.owner.startswith(owner)), None)
        if found is None:
            return None
        # A key without an end is not as we left it: it is treated as one of ours.
        ttl = self._ttl if math.isinf(found.remaining) else max(found.remaining, MIN_TIMEOUT)
        return Lease(self._key, found.owner, ttl=ttl, fence=0, sent_at=clock.now(), limit=self._limit, slot=found.slot)

    def _reset(self, verb: str, seconds: float, keeping: float) -> None:
        """Renew the hold for so many seconds more than its remaining time, times `keeping`."""
        self._token(verb)
        if self.timeout is None:
            raise NoTimeout(
                f"cannot {verb} lock {self.name!r}: it was made without a timeout; give it one, or leave that to the "
                "renewals"
            )
        lease = self._lease()
        if lease is None:
            raise NotOwned(self.name, _GONE)
        if self.local.releasing is not None:
            raise NotOwned(self.name, _UNDER_WAY)
        ttl = _number(seconds) + keeping * max(lease.remaining, 0.0)
        if not MIN_TIMEOUT <= ttl <= MAX_TIMEOUT:
            raise ValueError(
                f"cannot {verb} lock {self.name!r} by {seconds!r} seconds; allowed: a number after which it lasts for "
                f"{MIN_TIMEOUT:g} seconds or more (up to ten years); to end it, release it"
            )
        if self.local.held is None:
            # Whoever holds it trusts the time that it has.
            ttl = max(ttl, lease.remaining)
        heartbeat = self._keeper.heartbeat
        if not _translated(lambda: heartbeat.renew(lease, ttl)):
            raise NotOwned(self.name, lease.reason or _GONE)

    def _look(self) -> list[Held]:
        return _translated(lambda: self._keeper.store.held(self._key, limit=self._limit))

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
        ValueError: the number of clients is even or too small, two of them are of one server, or see `Lock`.
    """

    def __init__(
        self, redis: Sequence[Redis], name: str | bytes, *arguments: Any, restart_delay: bool = True, **options: Any
    ) -> None:
        if len(redis) % 2 == 0 or len(redis) < 3:
            raise ValueError(f"lock {name!r} has {len(redis)} clients; allowed: an odd number of at least 3 (Redlock)")
        addresses = [address_of(client) for client in redis]
        if twice := [address for address in addresses if addresses.count(address) > 1]:
            raise ValueError(
                f"lock {name!r} has {len(twice)} clients of {twice[0]}; allowed: each of another server, or one that "
                "fails takes the majority with it (Redlock)"
            )
        if options.get("replicas"):
            raise ValueError(f"lock {name!r} has replicas={options['replicas']!r}; a Redlock has a majority instead")
        self._restart_delay = restart_delay
        super().__init__(redis, name, *arguments, **options)

    def _kept(self, redis: Any) -> Keeper:
        return kept_by_each(redis, self._restart_delay)


class Semaphore(Lock):
    """A lock that up to `limit` may hold at once, each with an object of its own (or a thread of its own); see `Lock`.

    Args:
        limit: how many; the same for all who use the name.

    Raises:
        ValueError: the limit is less than one, or the timeout is too short.
    """

    def __init__(self, redis: Redis | RedisCluster, name: str | bytes, limit: int, **options: Any) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit of semaphore {name!r} is {limit!r}; allowed: a whole number from 1")
        super().__init__(redis, name, **options)
        self._limit = limit


class _Holding:
    """One hold of a lock; the heartbeat forgets it with the thread or the lock that it belongs to."""

    def __init__(self, lock: Lock, lease: Lease) -> None:
        self._lock = lock
        self.lease = lease
        self._told = False

    def when_lost(self) -> None:
        """In the heartbeat's thread, now and then from when the lease is lost."""
        if not self._told:
            # What is called may take its time; other leases need the heartbeat's thread meanwhile.
            threading.Thread(
                target=self._lock._tell, args=(self.lease,), name="singleton-lock-lost", daemon=True
            ).start()
            self._told = True

    def end(self) -> None:
        """Believe in it no more, and do not renew it."""
        self._lock._keeper.heartbeat.stop(self.lease)


class _Releasing(NamedTuple):
    token: bytes
    was_held: bool


class _Local:
    """What a lock object knows of its hold; redis-py's has the token only."""

    _token: bytes | None = None
    _held: _Holding | None = None
    #: A release that was begun and not answered.
    releasing: _Releasing | None = None

    @property
    def token(self) -> bytes | None:
        """What the hold is known by; None while there is none. To be given to another object, or None to forget it."""
        return None if self.parent is not None else self._token

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        given, held = _encoded(token), self._held
        if held is not None and (given != self._token or self.parent is not None):
            self._held = None
            held.end()
        self._token = given

    @property
    def held(self) -> _Holding | None:
        """This process's own hold."""
        return None if self.parent is not None else self._held

    @property
    def parent(self) -> int | None:
        """The process that has the hold, if this is a child that was forked meanwhile."""
        held = self._held
        return None if held is None or held.lease.pid == os.getpid() else held.lease.pid

    def hold(self, held: _Holding, token: bytes) -> None:
        """Have got the lock."""
        with _noting.lock:
            self._token, self._held, self.releasing = token, held, None

    def forget(self, held: _Holding | None, token: bytes) -> None:
        """Have released this hold; where threads share the object, another one may have got the lock since."""
        with _noting.lock:
            if self._held is held and self._token == token:
                self._token = self._held = self.releasing = None


class _LocalOfThread(_Local, threading.local):
    """Another one in each thread."""


@cache
def _node() -> str:
    return socket.gethostname()


def _encoded(token: str | bytes | None) -> bytes | None:
    """A token as bytes, which is what `local.token` is."""
    if token is None or isinstance(token, bytes):
        return token
    if isinstance(token, str):
        return token.encode()
    raise TypeError(f"a lock's token is {token!r}; allowed: text or bytes")


def _of(token: bytes) -> str:
    """What the owner of a hold with this token begins with; of one length, so that none begins like another."""
    return hashlib.sha256(token).hexdigest()[:_OF_TOKEN]


def _number(seconds: object) -> float:
    """A number of seconds; NaN, which is not allowed anywhere, for what is none."""
    if isinstance(seconds, (bool, str, bytes)):
        return math.nan
    try:
        return float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _translated(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except LockUnavailable as error:
        raise Unavailable(error.server, error.reason) from error.__cause__
