"""A mutex that a fork cannot leave locked for ever.

The child of a fork has the forking thread only. A lock that another thread held at that moment stays locked there, and
whoever asks for it hangs. What these mutexes guard is changed by single steps (an entry of a dict, an attribute), which
a fork finds done or not done; so in the child each simply begins anew, unlocked.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager


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
        self.lock = make()
        _mutexes.add(self)


#: All of this process.
_mutexes: weakref.WeakSet[Mutex] = weakref.WeakSet()


def _begin_anew() -> None:
    for mutex in _mutexes:
        mutex.lock = mutex.make()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
