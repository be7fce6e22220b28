"""Guards for what a task writes: the place that is written to refuses a holder whose time is over.

A process can be paused between two instructions, past the end of its lease, and go on to write as if it still held
the lock. No lock can prevent that, but what is written to can notice: each holder of a key has a higher fencing token
than all before it (`self.lock.fence`). A guard stores the token beside the data, in the same atomic step, and refuses a
token that is lower than the stored one by `StaleFence`. An equal one is the same holder, which may write often.

Everybody who writes has to pass the guard: a writer without a token is not noticed. A guard compares the tokens of one
lock; data that is written under two different keys needs two fences.

Modules: `redis`, `django`, `sqlalchemy`, `s3`, each for the library of that name.
"""

from __future__ import annotations

from celery_singleton_lock.errors import StaleFence

__all__ = ["StaleFence", "check_fence"]


def check_fence(target: str, fence: int) -> int:
    """The token, if it is one that a holder can have; asks nobody. For guards of your own.

    Args:
        target: what is to be written, in words; for the error.
        fence: the token of the lock, `self.lock.fence` in a task.

    Raises:
        StaleFence: it is 0, as that of an execution without a lock: nothing would tell it from a stale one.
        TypeError: it is no whole number.
    """
    if not isinstance(fence, int) or isinstance(fence, bool):
        raise TypeError(f"fence for {target} is {fence!r}; allowed: a whole number, such as self.lock.fence")
    if fence <= 0:
        raise StaleFence(target, 0)
    return fence
