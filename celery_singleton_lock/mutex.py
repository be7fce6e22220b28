"""A mutex that a fork cannot leave locked forever.

What these guard is changed by single steps (an entry of a dict, an attribute), which a fork finds done or not done; so
in the child each simply starts anew, unlocked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from celery_singleton_lock import forks


class Mutex:
    """Holds a lock, another one in the child of a fork: `with mutex.lock: ...`.

    The plain lock is what is entered: one that is made in Python could be interrupted (by a time limit, an abort)
    between having been acquired and the block, and would stay locked.

    Args:
        make: `threading.RLock` where a signal's handler, or a finalizer, may come by in the same thread.
    """

    __slots__ = ("__weakref__", "lock", "make")

    def __init__(self, make: Callable[[], AbstractContextManager[bool]] = threading.Lock) -> None:
        self.make = make
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self.lock = self.make()
