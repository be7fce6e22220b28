"""What a process logs about a lock server that does not answer: at the beginning, at half time, and at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from celery.utils.log import get_logger

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable

logger = get_logger(__name__)

#: Seconds without a failure after which an answer ends an outage: in a cluster, only some servers may be silent.
QUIET = 1.0


class AtRisk(Protocol):
    """A lease that ends unless the server answers."""

    @property
    def give_up_at(self) -> float:
        """When its task is stopped, on `clock.now()`."""

    def in_words(self) -> str:
        """Whose lease it is, for people."""


class Outage:
    """An outage of one lock server. Several threads write to it; at worst, two of them log the same.

    Args:
        leases: finds the leases that depend on the server.
        begins: the first line, with `%s` for the error and what else is known.
        level: of the lines; the end is good news, and a warning at most.
    """

    def __init__(
        self,
        leases: Callable[[], Sequence[AtRisk]] = lambda: (),
        *,
        begins: str = "%s; trying again%s",
        level: int = logging.WARNING,
    ) -> None:
        self._leases = leases
        self._begins = begins
        self._level = level
        self._began: float | None = None
        self._last = 0.0
        #: When the first answer since the last failure came.
        self._answered_at: float | None = None
        #: When half of the time that the first lease had left is over; None: no lease was at risk yet.
        self._half_time: float | None = None

    @property
    def is_under_way(self) -> bool:
        return self._began is not None

    def failed(self, error: LockUnavailable) -> None:
        """Note that the server did not answer."""
        now, began, half_time = clock.now(), self._began, self._half_time
        self._last, self._answered_at = now, None
        if began is None:
            self._began, self._half_time = now, None
            logger.log(self._level, self._begins, error, _in_words(self._leases(), now))
        elif half_time is not None and now >= half_time:
            self._half_time = math.inf
            at_risk = _in_words(self._leases(), now)
            logger.log(self._level, "%s, for %.1f s now; trying again%s", error, now - began, at_risk)
        if self._half_time is None and (leases := self._leases()):
            self._half_time = (now + _first(leases).give_up_at) / 2

    def answered(self, server: str) -> None:
        """Note that the server has answered, as it nearly always does; the outage ends if nothing has failed lately."""
        began = self._began
        if began is None:
            return
        answered_at = self.heard()
        if clock.now() >= self._last + QUIET:
            self._began = None
            level = min(self._level, logging.WARNING)
            logger.log(level, "%s answers again, after an outage of %.1f s", server, answered_at - began)

    def heard(self) -> float:
        """Note an answer that may or may not be the end of the outage; when the first since the last failure came."""
        if self._answered_at is None:
            self._answered_at = clock.now()
        return self._answered_at


def _first(leases: Sequence[AtRisk]) -> AtRisk:
    """The lease whose task is stopped first."""
    return min(leases, key=lambda lease: lease.give_up_at)


def _in_words(leases: Sequence[AtRisk], now: float) -> str:
    """How many leases end unless the server answers, and which of them is the first."""
    if not leases:
        return ""
    first = _first(leases)
    seconds = max(first.give_up_at - now, 0.0)
    if len(leases) == 1:
        return f"; 1 lease is given up in {seconds:.1f} s unless it is renewed: {first.in_words()}"
    many = f"{len(leases)} leases are given up unless they are renewed"
    return f"; {many}, the first in {seconds:.1f} s: {first.in_words()}"
