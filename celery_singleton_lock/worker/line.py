"""The copies that this process holds until they are due; they start earlier if their lock is free.

A copy that was put back for a conflict is a message with an ETA: the consumer has it in its timer, unacknowledged,
where it takes no slot. One thread waits for all of their locks, and the consumer's loop acts on what the thread hears,
since only that loop may touch the timer. Without any of this a copy would still begin in the end: the timer sees to it.

Protocol: `docs/protocol.md`, section 11.
"""

from __future__ import annotations

import heapq
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, islice
from typing import Any
from weakref import WeakKeyDictionary, ref

from celery.utils.log import get_logger

from celery_singleton_lock import chance
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.stores.store import Freed, Place, WakeUps
from celery_singleton_lock.task.reports import Pipe

logger = get_logger(__name__)

#: Seconds until the next try after the lock server has not answered: at first, and at most.
PAUSE, MAX_PAUSE = 0.05, 2.0

#: Seconds that a worker that ends gives the thread to leave its places.
LEAVING = 0.5

#: The line of each app's worker, while the worker runs.
line_of: WeakKeyDictionary[Any, Line] = WeakKeyDictionary()


class Line:
    """The copies in this process that wait for a lock, by lock.

    Args:
        wake_ups: wakes it.
        begin: begins, now, a request that waits in the consumer's timer; whether it was there.
        has_room: whether a slot is free.
        in_loop: whether there is an event loop in which to begin (see `register`); if not, the thread is a greenlet.
    """

    def __init__(
        self, wake_ups: WakeUps, begin: Callable[[Any], bool], has_room: Callable[[], bool], *, in_loop: bool
    ) -> None:
        self._wake_ups = wake_ups
        self._begin = begin
        self._has_room = has_room
        self._in_loop = in_loop
        self._mutex = Mutex(threading.RLock)  # A cold shutdown's handler may have interrupted `park`.
        self._copies: dict[str, _Copies] = {}
        self._order = count()
        self._called: deque[tuple[Freed, Any]] = deque()
        #: What to do about wake-ups that were not used here.
        self._unused: deque[Callable[[], None]] = deque()
        #: Locks whose wake-ups were left to a copy that has no slot yet, and how many may hold them.
        self._left: dict[str, int] = {}
        self._news, self._due = Pipe(), Pipe()
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._closed = False

    def park(self, request: Any, key: str, place: Place) -> bool:
        """Take in a request that is about to wait in the timer; whether it will be woken."""
        with self._mutex.lock:
            self._copies.setdefault(key, _Copies()).add(place, next(self._order), request)
            if self._thread is None and not self._closed:
                self._start()
            is_listening = self._thread is not None and not (self._failures or self._closed)
            is_woken = is_listening and len(self._copies) <= self._wake_ups.most
        self._news.give()
        return is_woken

    def give_back(self, key: str) -> None:
        """A copy that was woken has no use for the lock, but another copy may."""
        self._unused.append(partial(self._wake_ups.give_back, key))
        self._news.give()

    def give_back_if_free(self, key: str, limit: int) -> None:
        """The same, for copies that have no use for a wake-up while `limit` others hold the lock."""
        self._unused.append(partial(self._wake_ups.wake_if_free, key, limit))
        self._news.give()

    def has_begun(self, key: str, *, wakes: bool) -> None:
        """A copy that was woken has a slot: a wake-up that was left to it may be from its own end, reported later; or
        from its beginning. If it `wakes` another copy, whoever has the lock, that one may not need the lock.
        """
        with self._mutex.lock:
            limit = self._left.pop(key, None)
        if limit is not None and wakes:
            self.give_back(key)
        elif limit is not None:
            self.give_back_if_free(key, limit)

    def register(self, hub: Any) -> None:
        """Begin copies in this loop. At each new connection to the broker, the loop forgets this, and the broker
        forgets what it delivered over the old one.
        """
        with self._mutex.lock:
            self._copies.clear()
            self._left.clear()
        hub.add_reader(self._due.descriptor, self.begin_called)

    def begin_called(self) -> None:
        """In the consumer's loop: begin the copies that are called, or the next one if a copy has gone meanwhile and
        nobody else has waited longer.
        """
        self._due.take()
        while True:
            try:
                freed, request = self._called.popleft()
            except IndexError:  # The thread may pass some on as well.
                return
            while request is not None and not self._begins(freed.key, request):
                request = self._next(freed)
            if request is None:
                self._unused.append(partial(self._pass_on, freed))
                self._news.give()

    def close(self) -> None:
        """Leave the line: the worker is about to end. Also called in a signal's handler."""
        self._closed = True
        self._news.give()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(LEAVING)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="singleton-lock-line", daemon=True)
        with suppress(RuntimeError):  # No thread is available now: this copy waits until it is due.
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while not self._closed:
            try:
                self._listen()
                self._failures = 0
            except Exception as error:
                self._failures += 1
                if isinstance(error, LockUnavailable):
                    logger.debug("line: cannot be woken for now: %s", error)
                else:
                    logger.exception("line: unexpected error; going on")
                self._wait(chance.back_off(self._failures, PAUSE, MAX_PAUSE))
        self._wake_ups.leave()
        # The loop may have ended before it got to these.
        with suppress(IndexError):
            while True:
                self._wake_ups.give_back(self._called.popleft()[0].key)
        while self._unused:
            self._unused.popleft()()

    def _listen(self) -> None:
        """Wait once for locks that are free, and call a copy for each."""
        self._news.take()
        if self._closed:  # The nudge that was just taken may have said so.
            return
        while self._unused:
            self._unused.popleft()()
        if not (places := self._places()):
            self._wake_ups.leave()
            self._wait(None)
        else:
            for freed in self._wake_ups.wait(places, self._news.descriptor, self._waiting, self._place):
                self._answer(freed)

    def _answer(self, freed: Freed) -> None:
        has_room = self._has_room()
        if not has_room and self._wake_ups.pass_on(freed):
            return
        if self._is_left_to_another(freed.key, has_room=has_room):
            return
        self._called.append((freed, self._next(freed)))
        if self._in_loop:
            self._due.give()
        else:
            self.begin_called()

    def _places(self) -> dict[str, Place]:
        with self._mutex.lock:
            for key in [key for key, copies in self._copies.items() if not copies.first()]:
                del self._copies[key]
            return {key: copies.place for key, copies in islice(self._copies.items(), self._wake_ups.most)}

    def _place(self, key: str) -> Place | None:
        """The first place in the line of this lock here; None if no copy waits."""
        with self._mutex.lock:
            copies = self._copies.get(key)
            return None if copies is None or not copies.first() else copies.place

    def _waiting(self, key: str) -> int:
        """How many copies wait for this lock here."""
        with self._mutex.lock:
            copies = self._copies.get(key)
            return 0 if copies is None else copies.count()

    def _begins(self, key: str, request: Any) -> bool:
        request.is_woken = True  # Before it begins: it gives back a lock that it has no use for.
        if self._begin(request):
            return True
        with self._mutex.lock:
            copies = self._copies.get(key)
            if copies is not None and copies.called() is request:
                copies.called = _nobody  # It was lost with its connection, or begun by its time.
        return False

    def _is_left_to_another(self, key: str, *, has_room: bool) -> bool:
        """Whether the lock can be left to a copy that was called and has no slot yet: that copy finds the lock free, or
        the lock's holder wakes the next one.
        """
        with self._mutex.lock:
            copies = self._copies.get(key)
            called = None if copies is None else copies.called()
            one_will_do = copies is not None and (copies.limit == 1 or not has_room)
            is_left = one_will_do and called is not None and not called.has_begun
            if is_left and copies is not None:
                self._left[key] = copies.limit
            return is_left

    def _next(self, freed: Freed) -> Any:
        with self._mutex.lock:
            copies = self._copies.get(freed.key)
            return None if copies is None else copies.pop(freed.place)

    def _pass_on(self, freed: Freed) -> None:
        """No copy here can use the lock, or only one that has waited less than those it was compared with."""
        if self._place(freed.key) is None or not self._wake_ups.pass_on(freed):
            self._wake_ups.give_back(freed.key)

    def _wait(self, seconds: float | None) -> None:
        """Wait for news, for this many seconds at most."""
        poll = select.poll()
        poll.register(self._news.descriptor, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)


class _Copies:
    """The copies that wait for one lock, the first one first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, ref[Any]]] = []
        #: The last copy that was called, while it is there.
        self.called: Callable[[], Any] = _nobody
        self.limit = 1

    @property
    def place(self) -> Place:
        since, _, limit, _ = self._heap[0]
        return Place(since, limit)

    def add(self, place: Place, order: int, request: Any) -> None:
        # Weak: the timer has the request as long as it is still to begin.
        self.limit = place.limit
        heapq.heappush(self._heap, (place.since, order, place.limit, ref(request)))

    def count(self) -> int:
        """How many have not begun; the others are forgotten, wherever they are."""
        self._heap = [waiting for waiting in self._heap if _waits(waiting[-1]())]
        heapq.heapify(self._heap)
        return len(self._heap)

    def first(self) -> Any:
        """The first request that has not begun; None if none is left."""
        while self._heap:
            request = self._heap[0][-1]()
            if _waits(request):
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self, place: Place | None) -> Any:
        """The first request, unless it came after this place."""
        request = self.first()
        if request is None or (place is not None and self.place.since > place.since):
            return None
        self.called = heapq.heappop(self._heap)[-1]
        return request


def _nobody() -> None:
    """No copy was called."""


def _waits(request: Any) -> bool:
    """Whether the timer still has the request."""
    return request is not None and not request.has_begun
