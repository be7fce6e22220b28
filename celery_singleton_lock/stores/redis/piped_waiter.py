"""How a waiter gets its turn on one server: its question is sent behind the command that waits, on the same connection.

The server carries it out as it wakes the waiter, so that nobody else can take the lock in between. It is the waiter's
for a second (`lock_commands.PROVISIONAL`), and for its ttl when the waiter has said that it is there: one that is
frozen, or cannot be reached, is passed over. A waiter that leaves says so first (`:over:<place>`), or what it has left
behind would take the lock for nobody; who is killed closes the connection.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.asking_waiter import Ask, Breaks
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.redis import lock_answers
from celery_singleton_lock.stores.redis.bell import RedisBell


class PipedWaiter:
    """A `Waiter` whose question stands behind its bell.

    Args:
        bell: wakes it.
        ask: acquires the lock, where the bell brought no answer.
        request: what it asks for.
        confirm: gives it its whole ttl; whether it is still ours.
        leave: sees to it that nothing is left of the questions; and frees the lock, if told to.
    """

    def __init__(
        self,
        bell: RedisBell,
        ask: Ask,
        request: LockRequest,
        *,
        confirm: Callable[[Lease], bool],
        leave: Callable[[bool], None],
    ) -> None:
        self._bell = bell
        self._ask = ask
        self._request = request
        self._confirm = confirm
        self._leave = leave
        self._found: Lease | Held | Record | None = None
        self._breaks = Breaks()

    def __enter__(self) -> PipedWaiter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None or self._bell.is_open or self._breaks.seen:
            # Interrupted between reading and returning, the lock may be ours, and nobody knows.
            self._leave(error is not None or not isinstance(self._found, Lease))
        self._bell.__exit__(kind, error, tb)

    def wait(self, timeout: float) -> Lease | Held | Record:
        """See `Waiter.wait`."""
        self._found = None
        with self._breaks.survived(timeout):
            self._found = self._heard(timeout)
        return self.ask() if self._found is None else self._found

    def ask(self) -> Lease | Held | Record:
        """See `Waiter.ask`."""
        self._found = None
        self._found = self._ask()
        return self._found

    def _heard(self, timeout: float) -> Lease | Held | Record | None:
        """What the bell brings; None if it is nothing, or not any more."""
        answer = self._bell.wait(timeout)
        if answer is None:
            return None
        found = lock_answers.handed_over(answer, self._granted, self._request.holder.message)
        return None if isinstance(found, Lease) and not self._confirm(found) else found

    def _granted(self, fence: int, slot: int) -> Lease:
        """The lease that was given to it, to be confirmed: nobody knows when that was sent."""
        return self._request.lease(fence=fence, sent_at=0.0, slot=slot)
