"""A thread for background work: it exists while there is something to do.

A caller notes something to do where `work` finds it, and then says that there is some: a thread does it a while
later, with all that came meanwhile. What is noted while it works, it does next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks

logger = get_logger(__name__)

#: Seconds until a call that failed is tried again.
RETRY_AFTER = 1.0


class Later:
    """Calls `work` in a thread of its own.

    Args:
        name: of the thread.
        work: does what there is; returns None when nothing is left, else the seconds after which to call it again.
        after: seconds that what comes may wait for more.
        linger: seconds for which the thread stays when there is nothing left. To start one takes longer than what most
            callers do meanwhile.
    """

    def __init__(self, name: str, work: Callable[[], float | None], *, after: float = 0.0, linger: float = 0.0) -> None:
        self._name = name
        self._work = work
        self._after = after
        self._linger = linger
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        # Reentrant: a signal's handler may come at any line, and note something itself.
        self._mutex = lock = threading.RLock()
        #: The thread need not linger any more.
        self._changed = threading.Condition(lock)
        #: Whether a thread is going to look for something to do.
        self._is_wanted = False
        self._thread: threading.Thread | None = None

    def want(self) -> None:
        """There is something to do."""
        thread = self._thread
        if self._is_wanted and thread is not None and thread.is_alive():
            return  # As for most of what comes one after the other: it has not looked yet.
        with self._mutex:
            self._is_wanted = True  # Before a thread starts, which would look twice.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread = thread  # First: an interruption of the start must not lead to two.
                with suppress(RuntimeError):  # No thread is to be had: what comes next tries again.
                    thread.start()
            self._changed.notify()

    def _run(self) -> None:
        pause: float | None = self._after
        while pause is not None:
            clock.sleep(pause)
            self._is_wanted = False  # Before it looks: what is noted from now on, it may not see.
            try:
                pause = self._work()
            except (Exception, SystemExit):
                # Also where code of the user's calls `sys.exit`: without this thread nothing is done any more.
                logger.exception("%s: unexpected error; going on", self._name)
                pause = RETRY_AFTER
            with self._mutex:
                if self._linger > 0 and pause is None and not self._is_wanted:
                    self._changed.wait(self._linger)
                if pause is None and self._is_wanted:
                    pause = self._after
                if pause is None:
                    # Under the mutex: the next caller finds no thread, and starts one.
                    self._thread = None
