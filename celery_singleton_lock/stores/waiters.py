"""Waiting for a lock: a place in its queue, and a mailbox in which each process hears that it may ask.

A wake-up is a hint: it may be lost, or come for nothing. Who is woken asks for the lock like anybody else, and whoever
waits also asks by itself now and then. A place is kept until its waiter leaves.

Protocol: `docs/protocol.md`, section 7.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from celery_singleton_lock import clock
from celery_singleton_lock.forks import Mutex, start_anew_in_child
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record

#: Seconds after which a waiter asks by itself: what a wake-up costs that was lost, or went to a waiter that is gone.
LOOK = 1.0


class Mailbox:
    """Tells the waiters of this process that they are woken.

    Attributes:
        name: a name for this process.
    """

    def __init__(self) -> None:
        self._mutex = Mutex(threading.RLock)  # A signal's handler may have interrupted its caller.
        self.start_anew()
        start_anew_in_child(self)

    def start_anew(self) -> None:
        self.name = new_owner()
        self._waiters: dict[str, Callable[[], object]] = {}

    def enrol(self, request: LockRequest) -> None:
        """Note in a request that waits who waits, and since when."""
        if not request.member:
            request.name, request.since = request.owner, request.since or clock.wall()
            request.member = self.member(request.key, request.name)

    def member(self, key: str, name: str) -> str:
        """The name of a waiter of this process in the queue of a lock; it ends with its own."""
        return name

    def expect(self, key: str, name: str, hear: Callable[[], object]) -> None:
        """Call `hear`, in any thread, each time that this waiter is woken; it must return soon, and raise nothing.

        Args:
            key: the lock for which it waits.
            name: the waiter's name, 32 characters.
            hear: what to call.
        """
        with self._mutex.lock:
            self._waiters[name] = hear

    def forget(self, name: str) -> None:
        """That waiter has left."""
        with self._mutex.lock:
            self._waiters.pop(name, None)

    def deliver(self, name: str) -> None:
        """A waiter of this process is woken."""
        if (hear := self._waiters.get(name)) is not None:
            hear()


class Waiter:
    """A place in the queue of a lock; leave it (`with`) after the last question.

    Args:
        mailbox: wakes it.
        request: what it asks for; it waits.
        ask: acquires the lock, for as long as a waiter is patient.
        leave: gives up the place, so that the next waiter is woken if this one was; with True, also frees the lock,
            and voids what is left of the questions.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        request: LockRequest,
        ask: Callable[[], Lease | Held | Record],
        leave: Callable[[bool], None],
    ) -> None:
        request.waiting = True
        mailbox.enrol(request)
        self._mailbox = mailbox
        self._request = request
        self._ask = ask
        self._leave = leave
        self._woken = threading.Event()
        self._found: Lease | Held | Record | None = None

    def __enter__(self) -> Waiter:
        self._mailbox.expect(self._request.key, self._request.name, self._woken.set)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._mailbox.forget(self._request.name)
        if error is not None or not isinstance(self._found, Lease):
            # If it was interrupted between reading and returning, the lock may be held, and nobody knows.
            self._leave(error is not None or self._request.late)

    def ask(self) -> Lease | Held | Record:
        """What `acquire` finds now. Do not ask the store itself: `__exit__` would free a lock that it does not know of.

        Raises:
            LockUnavailable: as for `wait`.
        """
        self._found = None
        self._woken.clear()  # Before it asks: what comes from now on may be news.
        self._found = self._ask()
        return self._found

    def wait(self, timeout: float) -> Lease | Held | Record:
        """Wait until somebody frees the lock and wakes this waiter, for `timeout` seconds or `LOOK`; what `acquire`
        finds then.

        Raises:
            LockUnavailable: no answer, or an error, for as long as an acquire is patient.
        """
        self._woken.wait(min(timeout, LOOK))
        return self.ask()
