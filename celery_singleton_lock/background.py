"""Background work: a thread that exists while there is something to do.

A caller puts work where `work` finds it, and then calls `schedule`. A thread does the work a while later, with all that
came meanwhile. Work that comes while the thread works is done next.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks

logger = get_logger(__name__)

#: Seconds until a call that failed is tried again.
RETRY_AFTER = 1.0

#: Seconds for which a thread stays when nothing is left. Starting one takes longer than most callers take for their own
#: part.
LINGER = 1.0


class BackgroundJob:
    """Calls `work` in a separate thread.

    Args:
        name: the name of the thread.
        work: does all work; returns None when nothing is left, otherwise the seconds until the next call.
        after: seconds that work waits for more work.
    """

    def __init__(self, name: str, work: Callable[[], float | None], *, after: float = 0.0) -> None:
        self._name = name
        self._work = work
        self._after = after
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        # Reentrant: a signal handler may run at any line, and call `schedule` itself.
        self._mutex = lock = threading.RLock()
        #: Notified when the thread need not linger any more.
        self._changed = threading.Condition(lock)
        #: Whether a thread is going to look for something to do.
        self._is_scheduled = False
        self._thread: threading.Thread | None = None

    def schedule(self) -> None:
        """Say that there is work."""
        thread = self._thread
        if self._is_scheduled and thread is not None and thread.is_alive():
            return  # The usual case in a series of calls: the thread has not looked yet.
        with self._mutex:
            self._is_scheduled = True  # Before a thread starts, which would otherwise look twice.
            if sys.is_finalizing():
                return  # Before Python 3.12, a thread's start would wait forever.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread = thread  # Before the start: if that is interrupted, there must not be two threads.
                # No thread can be started: the next call tries again. Or it is started, and the hub of greenlets, which
                # runs a signal's handler, cannot wait for its beginning.
                with suppress(RuntimeError, AssertionError):
                    thread.start()
            self._changed.notify()

    def _run(self) -> None:
        pause: float | None = self._after
        while pause is not None:
            clock.sleep(pause)
            self._is_scheduled = False  # Before it looks: it may not see work that comes from now on.
            try:
                pause = self._work()
            except (Exception, SystemExit):
                # Also if user code calls `sys.exit`: without this thread, no more work would be done.
                logger.exception("%s: unexpected error; going on", self._name)
                pause = RETRY_AFTER
            with self._mutex:
                if pause is None and not self._is_scheduled:
                    self._changed.wait(LINGER)
                if pause is None and self._is_scheduled:
                    pause = self._after
                if pause is None:
                    # Under the mutex, so that the next caller finds no thread, and starts one.
                    self._thread = None


#: The most pieces of work that may wait; if there are more, one hangs, and the rest is better forgotten.
MAX_WAITING = 10_000


class Aside:
    """Does one piece of work after another, in a thread of this name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._job = BackgroundJob(name, self._do_all)
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self._work: deque[Callable[[], object]] = deque()

    def do(self, work: Callable[[], object]) -> None:
        """Do it later, unless too much waits already."""
        if len(self._work) >= MAX_WAITING:
            logger.warning("%s: %d pieces of work wait already; another one is dropped", self._name, MAX_WAITING)
            return
        self._work.append(work)
        self._job.schedule()

    def _do_all(self) -> None:
        while self._work:
            work = self._work.popleft()
            try:
                work()
            except Exception:
                logger.exception("%s: unexpected error; going on", self._name)
