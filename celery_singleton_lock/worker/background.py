"""A thread for what must not be waited for: it runs code of the user's, which may take its time or hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from celery.utils.log import get_logger

from celery_singleton_lock import forks

logger = get_logger(__name__)

#: Pieces of work that wait at most; beyond that, one hangs, and the rest is better forgotten.
MAX_WAITING = 10_000


class Aside:
    """Does one piece of work after another, in a thread that is there from the first piece on.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
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
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:
                logger.exception("%s: unexpected error; going on", self._name)
