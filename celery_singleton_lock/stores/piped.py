"""How a waiter gets its turn on one server: its question is sent behind the command that waits, on the same connection.

The server carries it out as it wakes the waiter, so that a hand-over takes no round trip of its own. All that is known
of when that was is that the last look before had found the lock held: the lease is trusted from then. A waiter that
leaves says so first (`:over:<place>`), or what it has left behind would take the lock for nobody; who is killed closes
the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from redis.exceptions import RedisError

from celery_singleton_lock import clock
from celery_singleton_lock.lease import Done, Held, Lease
from celery_singleton_lock.stores import calls
from celery_singleton_lock.stores.bell import RedisBell
from celery_singleton_lock.stores.turn import Ask


class PipedTurn:
    """A `Turn` whose question stands behind its bell.

    Args:
        bell: wakes it.
        ask: acquires the lock, where the bell brought no answer.
        granted: the lease with this fence and slot, trusted from this moment on.
        since: when the look was begun that found the lock held.
        leave: sees to it that the question is not answered any more; and frees the lock, if told to.
    """

    def __init__(
        self,
        bell: RedisBell,
        ask: Ask,
        granted: Callable[[int, int, float], Lease],
        *,
        since: float,
        leave: Callable[[bool], None],
    ) -> None:
        self._bell = bell
        self._ask = ask
        self._granted = granted
        self._since = since
        self._leave = leave
        self._found: Lease | Held | Done | None = None

    def __enter__(self) -> PipedTurn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None or self._bell.is_open:
            # Interrupted between reading and returning, the lock may be ours, and nobody knows.
            with suppress(RedisError, OSError):
                self._leave(error is not None or not isinstance(self._found, Lease))
        self._bell.__exit__(kind, error, tb)

    def wait(self, timeout: float) -> Lease | Held | Done:
        """See `Turn.wait`."""
        answer = self._bell.wait(timeout)
        self._found = None if answer is None else calls.queued(answer, self._lease)
        if self._found is None:
            since = clock.now()
            self._found = self._ask()
            self._since = since
        return self._found

    def _lease(self, fence: int, slot: int) -> Lease | None:
        lease = self._granted(fence, slot, self._since)
        # What is left of its trust is too little to start work on: ask again, which gives the same hold.
        return None if clock.now() - self._since > lease.ttl / 3 else lease
