"""For a guard of your own: the store refuses a write by a holder whose lease has ended. docs/fencing.md has recipes."""

from __future__ import annotations

from celery_singleton_lock.errors import StaleFence

__all__ = ["StaleFence", "check_fence"]


def check_fence(target: str, fence: int) -> int:
    """The token, if a holder can have it. This asks no server.

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
