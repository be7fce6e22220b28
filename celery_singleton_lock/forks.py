"""Locks, threads and work that start afresh in the child of a fork.

The child has only the forking thread. Everything else stays as the other threads left it: their locks are locked, and
whoever acquires one hangs. So every object with locks, threads or unfinished work starts afresh in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from celery.utils.log import get_logger

logger = get_logger(__name__)


class StartsAnew(Protocol):
    """An object with its own locks, threads or work."""

    def start_anew(self) -> None:
        """Become like a new object: no held lock, no thread, no work."""


#: All such objects in this process. Weak references, so that this does not keep them alive.
_all: weakref.WeakSet[StartsAnew] = weakref.WeakSet()


def start_anew_in_child(it: StartsAnew) -> None:
    """Start `it` anew in the child of each later fork, and only there."""
    _all.add(it)


def _start_all_anew() -> None:
    for it in list(_all):
        try:
            it.start_anew()
        except Exception:
            # Go on: the others must not keep the locks that the parent's threads held.
            logger.exception("fork: could not start %r again in the child", it)


#: Whether processes can be forked here: not on Windows.
CAN_FORK = hasattr(os, "register_at_fork")

if CAN_FORK:
    os.register_at_fork(after_in_child=_start_all_anew)


class Mutex:
    """Has a lock, a new one in the child of a fork: `with mutex.lock: ...`.

    Enter the plain lock: a context manager in Python could be interrupted (by a time limit, an abort) after it was
    acquired and before the block, and would stay locked.

    Args:
        make: `threading.RLock` if a signal handler or a finalizer may use it in the same thread.
    """

    __slots__ = ("__weakref__", "lock", "make")

    def __init__(self, make: Callable[[], AbstractContextManager[bool]] = threading.Lock) -> None:
        self.make = make
        self.start_anew()
        start_anew_in_child(self)

    def start_anew(self) -> None:
        self.lock = self.make()
