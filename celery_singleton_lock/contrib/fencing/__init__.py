"""Guards for what a task writes: the store refuses a write by a holder whose lease has ended.

A process can be paused between two instructions, past the end of its lease, and then write as if it still held the
lock. No lock can prevent that, but the store can notice: each holder of a key has a higher fencing token than all
before it (`self.lock.fence`). A guard keeps the token beside the data. In the same atomic step, it refuses a write with
a lower token (`StaleFence`). An equal token means the same holder, which may write several times.

Every writer must use the guard: it does not notice a writer without a token. A guard compares the tokens of one lock;
data that is written under two different keys needs two fences.

Modules: `redis`, `django`, `sqlalchemy`, each for the library of that name.
"""

from __future__ import annotations

from celery_singleton_lock.errors import StaleFence

__all__ = ["StaleFence", "check_fence"]


def check_fence(target: str, fence: int) -> int:
    """The token, if a holder can have it; for your own guards. This asks no server.

    Args:
        target: the target of the write, in words, for the error.
        fence: the token of the lock, `self.lock.fence` in a task.

    Raises:
        StaleFence: the token is 0: an execution without a lock could be stale.
        TypeError: the token is not an integer.
    """
    if not isinstance(fence, int) or isinstance(fence, bool):
        raise TypeError(f"fence for {target} is {fence!r}; allowed: a whole number, such as self.lock.fence")
    if fence <= 0:
        raise StaleFence(target, 0)
    return fence
