"""The only module that asks the time.

Leases are measured on a clock that cannot be set and that continues while the host is suspended (`CLOCK_BOOTTIME` on
Linux), so that a laptop or VM that slept for an hour does not trust a lease of thirty seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)

#: Seconds on the steady clock of this host; comparable between its processes, but not between hosts. Not wrapped in a
#: Python function, since each task asks a dozen times.
now: Callable[[], float] = time.monotonic if _BOOTTIME is None else partial(time.clock_gettime, _BOOTTIME)

#: Seconds since the epoch; for people, and for numbering things, but never for decisions.
wall: Callable[[], float] = time.time


def sleep(seconds: float) -> None:
    time.sleep(seconds)
