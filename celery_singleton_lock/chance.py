"""Random numbers, separate from those of your code.

The package's threads run beside your code, which may have seeded Python's own generator to get the same numbers each
time: they must not use up these numbers. Nor may a seed, or a fork, make many processes try again at the same moment.
"""

from __future__ import annotations

from random import SystemRandom

_chance = SystemRandom()


def back_off(failures: int, first: float, most: float) -> float:
    """Seconds to wait after this many failures: doubled each time, with jitter so that a crowd spreads out."""
    return spread(min(first * 2.0 ** min(failures, 16), most))


def spread(seconds: float, *, least: float = 0.5) -> float:
    """A random time between the share `least` of these seconds and all of them, so that not all come at once."""
    return seconds * _chance.uniform(least, 1.0)
