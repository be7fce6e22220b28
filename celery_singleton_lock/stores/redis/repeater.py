"""A thread that exists while a lock server has not answered the end of a hold, of an attempt, or of a message.

What was given up must not stay behind as a hold that nobody knows of: the process that gave it up may ask for nothing
more, and then nobody else would end it when the server answers again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from celery.utils.log import get_logger

from celery_singleton_lock import clock

logger = get_logger(__name__)

#: Seconds between two tries: at first, and at most, so that all is sent within a second after the server answers again.
PAUSE, MAX_PAUSE = 0.05, 0.5


class Repeater:
    """Calls `settle` again and again while there is something left to do.

    No mutex: a fork may come at any time, and in the child nobody would unlock it. Should two threads run for a moment,
    they do no harm.

    Args:
        settle: does what can be done now; whether something is left.
    """

    def __init__(self, settle: Callable[[], bool]) -> None:
        self._settle = settle
        self._wanted = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Repeat what is pending from now on."""
        # Set before looking at the thread, which reads this last: so one of the two goes on.
        self._wanted = True
        thread = self._thread
        if sys.is_finalizing():
            return  # Before Python 3.12, a thread's start would wait forever.
        if thread is None or not thread.is_alive():
            thread = self._thread = threading.Thread(target=self._run, name="singleton-lock-repeater", daemon=True)
            with suppress(RuntimeError):  # No thread is available, or the interpreter is about to end.
                thread.start()

    def _run(self) -> None:
        pause = PAUSE
        while self._wanted:
            clock.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)
            self._wanted = False
            try:
                # Not `|=`, which would read the old value first, and lose what is asked for meanwhile.
                if self._settle():
                    self._wanted = True
            except Exception:
                logger.exception("could not repeat what a lock server has not answered; trying again")
                self._wanted = True
            if not self._wanted:
                self._thread = None
