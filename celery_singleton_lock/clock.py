"""The only module that asks the time, and for random pauses.

Leases are measured on a clock that cannot be set and that continues while the host is suspended (`CLOCK_BOOTTIME` on
Linux), so that a laptop or VM that slept for an hour does not trust a lease of thirty seconds.

Random numbers are separate from those of your code, which may have seeded Python's own generator to get the same ones
each time: the package's threads must not use them up. Nor may a seed, or a fork, make many processes try again at the
same moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from random import SystemRandom

_random = SystemRandom()

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)

#: Seconds on the steady clock of this host; comparable between its processes, but not between hosts. Not wrapped in a
#: Python function, since each task asks a dozen times.
now: Callable[[], float] = time.monotonic if _BOOTTIME is None else partial(time.clock_gettime, _BOOTTIME)

#: Seconds since the epoch; for people, and for numbering things, but never for decisions.
wall: Callable[[], float] = time.time


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def back_off(failures: int, first: float, most: float) -> float:
    """Seconds to wait after this many failures: doubled each time, with jitter so that a crowd spreads out."""
    return spread(min(first * 2.0 ** min(failures, 16), most))


def spread(seconds: float, *, least: float = 0.5) -> float:
    """A random time between the share `least` of these seconds and all of them, so that not all come at once."""
    return seconds * _random.uniform(least, 1.0)
