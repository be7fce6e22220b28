"""What a process logs about a lock server that does not answer: at the beginning, at half time, and at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celery.utils.log import get_logger

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease

logger = get_logger(__name__)

#: Seconds without a failure after which an answer ends an outage: in a cluster, only some servers may be silent.
QUIET = 1.0


class Outage:
    """An outage of one lock server. Several threads write to it; at worst, two of them log the same."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last = 0.0
        #: When half of the time that the first lease had left is over; None: no lease was at risk yet.
        self._half_time: float | None = None

    def failed(self, error: LockUnavailable, leases: Sequence[Lease] = ()) -> None:
        """Note that the server did not answer; `leases`: the leases that it should have renewed."""
        now, began = clock.now(), self._began
        self._last = now
        if began is None:
            self._began, self._half_time = now, None
            logger.warning("%s; trying again%s", error, _at_risk(leases))
        elif self._half_time is not None and now >= self._half_time:
            self._half_time = math.inf
            logger.warning("%s, for %.1f s now; trying again%s", error, now - began, _at_risk(leases))
        if self._half_time is None and leases:
            self._half_time = (now + _first(leases).give_up_at) / 2

    def answered(self, server: str) -> None:
        """Note that the server has answered, as it nearly always does."""
        began = self._began
        if began is not None and clock.now() >= self._last + QUIET:
            self._began = None
            logger.warning("%s answers again, after an outage of %.1f s", server, self._last - began)


def _first(leases: Sequence[Lease]) -> Lease:
    """The lease whose task is stopped first."""
    return min(leases, key=lambda lease: lease.give_up_at)


def _at_risk(leases: Sequence[Lease]) -> str:
    """How many leases end unless the server answers, and which of them is the first."""
    if not leases:
        return ""
    first = _first(leases)
    number = "1 lease is" if len(leases) == 1 else f"{len(leases)} leases are"
    left = max(first.give_up_at - clock.now(), 0.0)
    return f"; {number} not renewed, and {first.key} is given up in {left:.1f} s"
