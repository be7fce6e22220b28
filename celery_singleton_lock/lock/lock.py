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
import socket
from collections.abc import Callable
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal, TypeVar

from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import LockError

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock.errors import LockLost, LockUnavailable
from celery_singleton_lock.holder import Holder, stem
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.lock.clients import SharedStore, shared_by
from celery_singleton_lock.lock.errors import NotAcquired, NotHeld, NoTimeout, NotOwned, Unavailable
from celery_singleton_lock.lock.holding import (
    Holding,
    Local,
    LocalOfAll,
    LocalOfThread,
    Releasing,
    encoded,
    new_hold,
    owner_of,
)
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record
from celery_singleton_lock.stores.redis.keyspace import plain_key

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

_GONE = "it ended, was taken over, or was deleted"
_UNDER_WAY = "its release was not answered, and is sent again"


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
        self.local: Local = LocalOfThread() if self.thread_local else LocalOfAll()
        self.raise_on_release_error = raise_on_release_error
        self._shared = self._shared_by(redis)
        self._key = plain_key(self.name)
        self._limit = 1
        self._renews = renew
        self._on_lost = on_lost

    def __enter__(self) -> Lock:
        if self.acquire():
            return self
        found = self._held()
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
            token: the hold's `local.token`, random if None. Anybody with the token may release the lock, so it must be
                a secret. Give it to another object by `other.local.token = token`. It lets nobody in: an acquire with
                the token of a lock that is held is refused like any other.

        Raises:
            Unavailable: the server does not answer.
        """
        blocking = self.blocking if blocking is None else blocking
        patience = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        # The owner is new for each call: a repeat within the call gets the same hold again, and nobody else does.
        made, owner = new_hold(encoded(token))
        until = math.inf if patience is None else clock.now() + patience
        pause = max(MIN_PAUSE, self.sleep if sleep is None else sleep)
        try:
            found = self._ask(owner, until if blocking else 0.0, pause)
            if not isinstance(found, Lease):
                return False
            self._hold(found, made)
            return True
        except LockUnavailable as error:  # The store has given up what it asked for.
            raise _unavailable(error) from error.__cause__
        except BaseException:
            # Interrupted (Ctrl-C, a time limit) between the answer and the end of this call: the lock may be held, and
            # nobody would release it.
            self._forget(owner)
            raise

    def _forget(self, owner: str) -> None:
        """Give up the hold that this owner may have got."""
        held = self.local.held
        if held is not None and stem(held.lease.owner) == stem(owner):
            self.local.token = None
        self._shared.store.abandon(Hold(self._key, owner, ttl=self._ttl, limit=self._limit))

    def release(self) -> None:
        """Give the lock back. You can repeat this after `Unavailable`; otherwise the lock expires by itself.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: the lock was gone, and somebody else may have had it.
            Unavailable: the server does not answer.
        """
        local, shared = self.local, self._shared
        token, held = local.known
        token, begun = token or self._token("release"), local.releasing
        again = begun is not None and begun.token == token
        lease = self._lease() if held is None else held.lease
        freed: Freeing | bool = Freeing.NOT_OURS
        if lease is not None:
            if not again:
                begun = local.releasing = Releasing(token, lease.held)
            shared.heartbeat.stop(lease)
            try:
                freed = shared.store.free(lease)
            except LockUnavailable as error:
                lease.lose(_UNDER_WAY)
                raise _unavailable(error) from error.__cause__
        local.forget(held, token)
        # If a lock is gone when its release is repeated, here or by the store, it was released, and only the answer was
        # lost; unless the lock was lost before.
        was_held = begun is not None and begun.was_held
        if freed != Freeing.NOW and not (was_held and (again or freed)):
            raise NotOwned(self.name, (lease and lease.reason) or _GONE)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """Let the lock outlive this process by `additional_time` more seconds, or (`replace_ttl`) by exactly that.

        An object that was only given the token of a hold can extend the time, but not shorten it.

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
        return bool(self._held())

    def owned(self) -> bool:
        """Whether this thread holds the lock, as the server sees it. False in a forked child: its parent holds it."""
        token = self.local.token
        return token is not None and any(found.owner.startswith(self._owner(token)) for found in self._held())

    @property
    def fence(self) -> int:
        """A number that is higher for every later holder; 0 while the lock is not held. See `Lease.fence`."""
        held = self.local.held
        return 0 if held is None else int(held.lease.fence)

    @property
    def lost(self) -> bool:
        """Whether this thread held the lock and can no longer trust that it does. Costs no round trip."""
        held = self.local.held
        return held is not None and not held.lease.held

    def check(self) -> None:
        """Raise an error if the lock is lost; costs no round trip while it is not. See `Lease.check`.

        Raises:
            NotHeld: this thread does not hold it.
            NotOwned: it was lost.
        """
        held = self.local.held
        if held is None:
            self._token("check")
            raise NotHeld(
                f"cannot check lock {self.name!r}: this object knows the token of the hold, but not its lease"
            )
        try:
            held.lease.check()
        except LockLost as lost:
            raise NotOwned(self.name, lost.reason) from None

    @property
    def _ttl(self) -> float:
        return DEFAULT_TIMEOUT if self.timeout is None else float(self.timeout)

    def _shared_by(self, redis: Redis | RedisCluster) -> SharedStore:
        return shared_by(redis)

    def _ask(self, owner: str, until: float, pause: float) -> Lease | Held | Record:
        """Ask for the lock, and wait for it until that time; what was found last."""
        holder, store, began = _holder(), self._shared.store, clock.now()
        request = LockRequest(self._key, owner, self._ttl, holder, until > 0, limit=self._limit)
        found = store.acquire(request)
        if isinstance(found, Lease) or until <= began:
            return found
        with store.waiter(request) as waiter:
            while isinstance(found, Held) and (left := until - clock.now()) > 0:
                # A value that this package did not write is redis-py's, say, whose release wakes nobody.
                soon = pause if found.holder is None else float("inf")
                found = waiter.wait(min(left, trust.seconds_until_over(found.remaining), soon))
        return found

    def _hold(self, lease: Lease, token: bytes) -> None:
        held = Holding(lease, self._shared.heartbeat, self._say_lost)
        if self._renews:
            self._shared.heartbeat.start(lease, held.when_lost)
        self.local.hold(held, token)

    def _token(self, verb: str) -> bytes:
        """The token of this thread's hold."""
        if (token := self.local.token) is not None:
            return token
        if (parent := self.local.parent) is not None:
            raise NotHeld(f"cannot {verb} lock {self.name!r}: the parent process, {parent}, holds it")
        raise NotHeld(f"cannot {verb} lock {self.name!r}: this thread does not hold it")

    def _owner(self, token: bytes) -> str:
        """The owner of this thread's hold, or how it begins."""
        held = self.local.held
        return owner_of(token) if held is None else held.lease.owner

    def _lease(self) -> Lease | None:
        """The lease of this thread's hold, or of the hold whose token it was given; None if that is gone."""
        if (held := self.local.held) is not None:
            return held.lease
        owner = owner_of(self._token("use"))
        found = next((found for found in self._held() if found.owner.startswith(owner)), None)
        if found is None:
            return None
        # Somebody removed the key's expiry: it is treated as if it had the lock's own.
        ttl = self._ttl if math.isinf(found.remaining) else max(found.remaining, MIN_TIMEOUT)
        return Lease(self._key, found.owner, ttl=ttl, fence=0, sent_at=clock.now(), limit=self._limit, slot=found.slot)

    def _reset(self, verb: str, seconds: float, keeping: float) -> None:
        """Renew the hold for `seconds`, plus its remaining time multiplied by `keeping`."""
        self._token(verb)
        if self.timeout is None:
            raise NoTimeout(
                f"cannot {verb} lock {self.name!r}: it was made without a timeout; give it one, or rely on its renewals"
            )
        lease = self._lease()
        if lease is None:
            raise NotOwned(self.name, _GONE)
        if self.local.releasing is not None:
            raise NotOwned(self.name, _UNDER_WAY)
        # With the token alone, all that the server has left counts: its holder trusts nearly all of it.
        left = lease.ttl if self.local.held is None else max(lease.remaining, 0.0)
        ttl = _number(seconds) + keeping * left
        if not MIN_TIMEOUT <= ttl <= MAX_TIMEOUT:
            raise ValueError(
                f"cannot {verb} lock {self.name!r} by {seconds!r} seconds; allowed: a number after which it lasts for "
                f"{MIN_TIMEOUT:g} seconds or more (up to ten years); to end it, release it"
            )
        if self.local.held is None:
            ttl = max(ttl, left)
        heartbeat = self._shared.heartbeat
        if not _translated(lambda: heartbeat.renew(lease, ttl)):
            raise NotOwned(self.name, lease.reason or _GONE)

    def _held(self) -> list[Held]:
        return _translated(lambda: self._shared.store.held(self._key, limit=self._limit))

    def _say_lost(self, lease: Lease) -> None:
        logger.error("lock %s was lost while it was held: %s", self.name, lease.reason)
        if self._on_lost is not None:
            self._on_lost(self)


def _holder() -> Holder:
    """This process, now."""
    pid = os.getpid()
    node, process = _names(pid)
    return Holder(None, 0, node, pid, clock.wall(), 0, process)


@lru_cache(maxsize=1)
def _names(pid: int) -> tuple[str, str]:
    """The names of the host, and of this process, whose id this is."""
    return socket.gethostname(), process_identity.own()


def _number(seconds: object) -> float:
    """A number of seconds; NaN, which is not allowed anywhere, for anything that is not a number."""
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
        raise _unavailable(error) from error.__cause__


def _unavailable(error: LockUnavailable) -> Unavailable:
    """The error that a lock outside of tasks raises instead."""
    return Unavailable(error.server, error.reason)
