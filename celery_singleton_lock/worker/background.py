"""A thread for what must not be waited for: it runs code of the user's, which may take its time or hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from celery.utils.log import get_logger

from celery_singleton_lock import forks

logger = get_logger(__name__)

#: Seconds without work after which the thread ends.
IDLE = 5.0

#: Pieces of work that wait at most; beyond that, one hangs, and the rest is better forgotten.
MAX_WAITING = 10_000


class Aside:
    """Does one piece of work after another, in a thread that is there while there is some.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """Start with nothing: at first, and in the child of a fork, whose work and thread are the parent's."""
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Do it later, unless too much waits already."""
        with self._mutex:
            if self._work.qsize() >= MAX_WAITING:
                logger.warning("%s: %d wait already; one more is dropped", self._name, MAX_WAITING)
                return
            self._work.put(work)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception:
                logger.exception("%s: unexpected error; going on", self._name)

    def _next(self) -> Callable[[], None] | None:
        """The next piece of work; None when there is none for a while, and the thread ends."""
        try:
            return self._work.get(timeout=IDLE)
        except Empty:
            with self._mutex:
                if self._work.empty():
                    self._thread = None
                    return None
        return self._next()
