"""Locks, threads and work that start anew in the child of a fork.

The child has the forking thread only. What the other threads were about stays as they left it: their locks locked, and
a request for one hangs. So whatever has a lock or a thread here, or owes something, starts with nothing there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from celery.utils.log import get_logger

logger = get_logger(__name__)


class StartsAnew(Protocol):
    """Has locks, threads or work of its own."""

    def start_anew(self) -> None:
        """Have what a new one has: no lock that is held, no thread, no work."""


#: All of this process. Weak: to start anew is no reason to stay.
_all: weakref.WeakSet[StartsAnew] = weakref.WeakSet()


def start_anew_in_child(it: StartsAnew) -> None:
    """Have `it` start anew in the child of each later fork, and only there."""
    _all.add(it)


def _start_all_anew() -> None:
    for it in list(_all):
        try:
            it.start_anew()
        except Exception:
            # The others are not to keep what their parent's threads have locked.
            logger.exception("fork: could not start %r again in the child", it)


os.register_at_fork(after_in_child=_start_all_anew)
