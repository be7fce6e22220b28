"""Background work: a thread that exists while there is something to do.

A caller puts work where `work` finds it, and then calls `schedule`. A thread does the work a while later, with all that
came meanwhile. Work that comes while the thread works is done next.
"""

from __future__ import annotations

import math
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


#: The longest sleep of a thread in seconds: a sleep does not count the time during which the host is suspended.
MAX_SLEEP = 1.0


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
        # Reentrant: a signal handler may run at any line, and call `schedule` itself. Always entered itself: a
        # Condition's `with` is Python code, which could be interrupted with the lock taken.
        self._mutex = lock = threading.RLock()
        #: Notified when the thread must work sooner than it would.
        self._changed = threading.Condition(lock)
        #: When `work` is called next; infinite when it is not, and until the thread has looked for what to do.
        self._due_at = math.inf
        #: The thread that was started for the work, and the same one once it runs, as it says itself.
        self._thread: threading.Thread | None = None
        self._runs: threading.Thread | None = None

    def schedule(self, at: float | None = None) -> bool:
        """Say that there is work; False if no thread can be started for it.

        Args:
            at: when to do it at the latest; None: with the next call, or `after` seconds from now if there is none.
        """
        if self._due_at <= (sys.float_info.max if at is None else at) and self._runs is not None:
            return True  # The usual case in a series of calls: the thread has not looked yet.
        with self._mutex:
            if at is None:
                at = self._due_at if self._due_at < math.inf else clock.now() + self._after
            self._due_at = min(self._due_at, at)  # Before a thread starts, which would otherwise end.
            if sys.is_finalizing():
                return False  # Before Python 3.12, a thread's start would wait forever.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread = thread  # Before the start: if that is interrupted, there must not be two threads.
                try:
                    thread.start()
                except RuntimeError:
                    return False  # The next call tries again.
                except AssertionError:
                    pass  # It is started, and the hub of greenlets, which runs a signal's handler, cannot wait for it.
            self._changed.notify()
            return True

    def _run(self) -> None:
        self._runs = thread = threading.current_thread()
        try:
            while self._wait():
                try:
                    pause = self._work()
                except (Exception, SystemExit):
                    # Also if user code calls `sys.exit`, or a filter of the log fails: without this thread, no more
                    # work would be done.
                    with suppress(Exception):
                        logger.exception("%s: unexpected error; going on", self._name)
                    pause = RETRY_AFTER
                if pause is not None:
                    with self._mutex:
                        self._due_at = min(self._due_at, clock.now() + pause)
        finally:
            if self._thread is thread:  # It was killed: the next caller starts another one.
                self._thread = self._runs = None

    def _wait(self) -> bool:
        """Wait until work is due; False if there is none for a while, and the thread is to end."""
        with self._mutex:
            if self._due_at == math.inf:
                self._changed.wait(LINGER)
            while self._due_at != math.inf and (left := self._due_at - clock.now()) > 0:
                self._changed.wait(min(left, MAX_SLEEP))
            if self._thread is not threading.current_thread():
                return False
            if self._due_at == math.inf:
                # Under the mutex, so that the next caller finds no thread, and starts one.
                self._thread = self._runs = None
                return False
            self._due_at = math.inf  # Before it looks: it may not see work that comes from now on.
            return True


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
