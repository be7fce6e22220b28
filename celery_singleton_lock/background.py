"""A thread for code that may be slow or hang, and must not be waited for: the user's, or a result backend's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from celery.utils.log import get_logger

from celery_singleton_lock import forks
from celery_singleton_lock.later import Later

logger = get_logger(__name__)

#: The most pieces of work that may wait; if there are more, one hangs, and the rest is better forgotten.
MAX_WAITING = 10_000


class Aside:
    """Does one piece of work after another, in a thread of this name, which stays for `linger` seconds after that."""

    def __init__(self, name: str, *, linger: float = 0.0) -> None:
        self._name = name
        self._later = Later(name, self._do_all, linger=linger)
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
        self._later.want()

    def _do_all(self) -> None:
        while self._work:
            work = self._work.popleft()
            try:
                work()
            except Exception:
                logger.exception("%s: unexpected error; going on", self._name)
