"""What a process logs about its lock server: once when that does not answer, and once when it answers again."""

from __future__ import annotations

import logging

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.errors import LockUnavailable, NewNodes

logger = get_logger(__name__)

#: Seconds without a failure after which an answer ends an outage: in a cluster, only some servers may be silent.
QUIET = 1.0

#: Seconds after a failure in which nobody asks who need not.
MUTE = 5.0


class Outage:
    """An outage of one lock server, as far as this process knows. At worst, two of its threads log the same.

    Args:
        server: its name, for messages.
        begins: the first line, with `%s` for the error.
        level: of the first line.
    """

    def __init__(self, server: str, *, begins: str = "%s; trying again", level: int = logging.WARNING) -> None:
        self._server = server
        self._begins = begins
        self._level = level
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        self._grants = True

    @property
    def is_silent(self) -> bool:
        """Whether the server has not answered lately."""
        return self._began is not None and clock.now() < self._last + MUTE

    def failed(self, error: LockUnavailable, *, grants: bool = True) -> None:
        """Note that the server did not answer; `grants` is False if it was asked for a lock."""
        if isinstance(error, NewNodes):
            return  # That is no outage.
        self._last, self._grants = clock.now(), self._grants and grants
        if self._began is None:
            self._began = self._last
            logger.log(self._level, self._begins, str(error))  # Its traceback would keep the leases.

    def answered(self, *, grants: bool = False) -> None:
        """Note that the server has answered, which ends an outage if nothing has failed lately. If a lock could not be
        had, it takes an answer to a request for one (`grants`): a server without memory still renews leases.
        """
        began, now, self._grants = self._began, clock.now(), self._grants or grants
        if began is not None and self._grants and now >= self._last + QUIET:
            self.start_anew()
            logger.info("%s answers again, after an outage of %.1f s", self._server, now - began)
