"""The copies that this process holds until they are due; they start earlier if their lock is free.

A copy that was put back for a conflict is a message with an ETA: the consumer has it in its timer, unacknowledged,
where it takes no slot. One thread keeps the places of them all in the lines of their locks, and looks at each lock now
and then; it begins the first copy then, or when it is woken: in the consumer's loop, since only that loop may touch the
timer. Without any of this a copy would still begin in the end: the timer sees to it.

Protocol: `docs/protocol.md`, section 11.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, ref

from celery.utils.log import get_logger

from celery_singleton_lock import clock
from celery_singleton_lock.background import BackgroundJob
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.stores.store import Place, Store
from celery_singleton_lock.task.reports import Pipe

logger = get_logger(__name__)

#: Seconds after which each lock is looked at: what a wake-up costs that was lost, or that a holder did not send because
#: it died. And the same if the lock is free, and left to somebody who has waited for longer, and may be gone.
LOOK, LOOK_AGAIN = 2.0, 1.0

#: The most locks that are looked at at once, and seconds by which one is looked at sooner so that several are.
MOST, TOGETHER = 500, 0.5

#: How often, and every how many seconds, it looks for a free slot: the lock server knows of the end of a task sooner
#: than this process.
TRIES, TRY = 5, 0.005

#: Seconds until the next try after the lock server has not answered: at first, and at most.
PAUSE, MAX_PAUSE = 0.05, 2.0

#: Seconds that a worker that ends gives the thread to leave its places.
LEAVING = 0.5

#: The line of each app's worker, while the worker runs.
line_of: WeakKeyDictionary[Any, Line] = WeakKeyDictionary()


class Line:
    """The copies in this process that wait for a lock, by lock.

    Args:
        store: has the locks.
        begin: begins, now, a request that waits in the consumer's timer; whether it was there, and is not revoked.
        has_room: whether a slot is free.
        in_loop: whether there is an event loop in which to begin (see `register`); if not, the thread is a greenlet.
    """

    def __init__(
        self, store: Store, begin: Callable[[Any], bool], has_room: Callable[[], bool], *, in_loop: bool
    ) -> None:
        self._store = store
        self._begin = begin
        self._has_room = has_room
        self._in_loop = in_loop
        self._mutex = Mutex(threading.RLock)  # A cold shutdown's handler may have interrupted `park`.
        self._copies: dict[str, _Copies] = {}
        self._order = count()
        #: Locks that were freed; and requests that are to begin, each with its lock.
        self._freed: deque[str] = deque()
        self._called: deque[tuple[str, Any]] = deque()
        #: Locks for which a copy was called that had gone: somebody else is to be woken.
        self._unused: deque[str] = deque()
        self._due = Pipe()
        self._failures = 0
        self._closed, self._has_left = False, threading.Event()
        self._job = BackgroundJob("singleton-lock-line", self._work)

    def park(self, request: Any, key: str, since: float, limit: int) -> bool:
        """Take in a request that is about to wait in the timer; whether it will be woken.

        Args:
            request: the request.
            key: the lock that it waits for.
            since: when its message first met a conflict.
            limit: how many may hold the lock at once.
        """
        with self._mutex.lock:
            if (copies := self._copies.get(key)) is None:
                copies = self._copies[key] = _Copies()
                self._store.mailbox.expect(key, copies.name, partial(self._hear, key))
            copies.add(since, next(self._order), limit, request)
            if copies.since == since:
                copies.look_at = 0.0
        return self._job.schedule(clock.now()) and not (self._failures or self._closed)

    def register(self, hub: Any) -> None:
        """Begin copies in this loop. At each new connection to the broker, the loop forgets this, and the broker
        forgets what it delivered over the old one.
        """
        with self._mutex.lock:
            for copies in self._copies.values():
                copies.forget()
        hub.add_reader(self._due.descriptor, self.begin_called)

    def begin_called(self) -> None:
        """In the consumer's loop: begin the copies that are called; if one has gone, somebody is woken in its place."""
        self._due.take()
        while self._called:
            try:
                key, request = self._called.popleft()
            except IndexError:
                return
            if not self._begin(request):
                self._unused.append(key)
                self._job.schedule(clock.now())

    def close(self) -> None:
        """Leave the line: the worker is about to end. Also called in a signal's handler."""
        self._closed = True
        self._job.schedule(clock.now())

    def join(self) -> None:
        self._has_left.wait(LEAVING)

    def _hear(self, key: str) -> None:
        """A lock was freed, and this process has the first place in its line."""
        self._freed.append(key)
        self._job.schedule(clock.now())

    def _work(self) -> float | None:
        """Look at the locks that are due, or leave all lines; the seconds until the next look; None if that was all."""
        if self._closed:
            for key in [*self._copies]:
                self._leave(key)
            self._has_left.set()
            return None
        try:
            pause = self._listen()
            self._failures = 0
        except LockUnavailable as error:
            self._failures += 1
            self._look_soon([*self._copies], 0.0)
            logger.debug("line: cannot look for now: %s", error)
            pause = clock.back_off(self._failures, PAUSE, MAX_PAUSE)
        return pause

    def _listen(self) -> float | None:
        while self._freed:
            self._answer(self._freed.popleft())
        while self._unused:
            self._store.wake(self._unused.popleft())
        now = clock.now()
        with self._mutex.lock:
            due = [key for key, copies in self._copies.items() if copies.look_at <= now + TOGETHER][:MOST]
            for key in due:  # Before it looks: what it hears meanwhile is news.
                self._copies[key].look_at = now + LOOK
        self._look(due)
        with self._mutex.lock:
            next_look = min((copies.look_at for copies in self._copies.values()), default=None)
        return None if next_look is None else max(next_look - clock.now(), 0.0)

    def _look(self, keys: Collection[str]) -> None:
        places = [place for key in keys if (place := self._place(key)) is not None]
        for place, may_begin in zip(places, self._store.look(places) if places else (), strict=True):
            if may_begin < 0:
                self._look_soon([place.key], clock.now() + LOOK_AGAIN)
            for _ in range(min(may_begin, place.copies)):
                self._answer(place.key)

    def _look_soon(self, keys: Collection[str], at: float) -> None:
        """Look at these locks then at the latest."""
        with self._mutex.lock:
            for key in keys:
                if (copies := self._copies.get(key)) is not None:
                    copies.look_at = min(copies.look_at, at)

    def _answer(self, key: str) -> None:
        """Begin the first copy that waits for this lock, which may be free; or leave the lock to another process."""
        with self._mutex.lock:
            copies = self._copies.get(key)
            called = None if copies is None else copies.called()
        if copies is None:
            return
        tries = count()
        while not self._has_room() and next(tries) < TRIES:
            clock.sleep(TRY)
        # If nobody else is there, it waits for a slot in the pool; but not several of them.
        is_called = called is not None and not called.has_begun
        if not self._has_room() and (self._store.wake(key, leaves=copies.name) or is_called):
            copies.look_at = clock.now() + LOOK  # Until then it has no place.
            return
        with self._mutex.lock:
            request = copies.pop()
        if request is None:
            self._leave(key)
            return
        # Before it begins: others are to find out whether they have waited for longer than the next one here.
        if (place := self._place(key)) is not None:
            self._store.look([place])
        self._called.append((key, request))
        if self._in_loop:
            self._due.give()
        else:
            self.begin_called()

    def _place(self, key: str) -> Place | None:
        """The place in the line of this lock; None if no copy waits: then the line is left."""
        with self._mutex.lock:
            copies = self._copies[key]
            if waiting := copies.count():
                return Place(key, copies.name, copies.since, waiting, copies.limit)
        self._leave(key)
        return None

    def _leave(self, key: str) -> None:
        """Leave the line of a lock, for which no copy waits, or is to."""
        with self._mutex.lock:
            copies = self._copies[key]
            if copies.count() and not self._closed:
                return  # One has come just now.
            del self._copies[key]
            self._store.mailbox.forget(copies.name)
        self._store.leave(key, copies.name)


class _Copies:
    """The copies that wait for one lock, the first one first.

    Attributes:
        name: of their place in the line of the lock.
        look_at: when to look at the lock next.
        called: the last copy that was called, while it is there.
        limit: how many may hold the lock at once.
    """

    def __init__(self) -> None:
        self.name = new_owner()
        self.look_at = 0.0
        self.called: Callable[[], Any] = _nobody
        self.limit = 1
        self._heap: list[tuple[float, int, ref[Any]]] = []

    @property
    def since(self) -> float:
        return self._heap[0][0]

    def add(self, since: float, order: int, limit: int, request: Any) -> None:
        # Weak: the timer has the request as long as it is still to begin.
        self.limit = limit
        heapq.heappush(self._heap, (since, order, ref(request)))

    def forget(self) -> None:
        self._heap.clear()
        self.called = _nobody

    def count(self) -> int:
        """How many have not begun; the others are forgotten, wherever they are."""
        self._heap = [waiting for waiting in self._heap if _waits(waiting[-1]())]
        heapq.heapify(self._heap)
        return len(self._heap)

    def pop(self) -> Any:
        """The first request that has not begun, which is called; None if none is left."""
        if not self.count():
            return None
        self.called = heapq.heappop(self._heap)[-1]
        return self.called()


def _nobody() -> None:
    """No copy was called."""


def _waits(request: Any) -> bool:
    """Whether the timer still has the request."""
    return request is not None and not request.has_begun
