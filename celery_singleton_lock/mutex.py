"""A mutex that a fork cannot leave locked forever.

The state that these guard changes in single steps (an entry of a dict, an attribute), which a fork finds done or not
done. So in the child, each mutex simply starts anew, unlocked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from celery_singleton_lock import forks


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
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self.lock = self.make()
