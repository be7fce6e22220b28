"""The path of one message: acquire → run → free.

Whatever happens between two of these steps, the lock is freed: by the `finally` of `run`; by `refusal`, before `run` is
reached; or, if these are cut short as well, by the worker's main process, or by the end of the lease, since the
heartbeat forgets a lease that nobody refers to any more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import following, joining, refusal
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.ends import End
from celery_singleton_lock.task.queued import Queued
from celery_singleton_lock.task.run import Run
from celery_singleton_lock.task.turn import Execution, record_started


def carry_out(execution: Execution, body: Callable[[], Any], brought: Queued | None = None) -> Any:
    """Run `body` under the lock, or end as this message must; `brought`: the lock that it has, or gets, while it waits.

    Raises:
        Ignore, Reject, LockConflict: as `on_conflict` says, of this message or of a newer one.
        LockUnavailable: with `on_unavailable="raise"`.
        LockLost: the lease was lost and the body was stopped.
    """
    acquisition = Acquisition(execution)
    is_plain = execution.message.is_plain
    run: Run | None = None
    found: Lease | Held | Record | End | None

    def begin() -> Any:
        following.wake_followers(acquisition, brought)
        return body()

    try:
        if is_plain:
            found = acquisition.acquire()
        else:
            found = following.end_of_leader(acquisition, brought) or joining.acquire(acquisition)
        if isinstance(found, Lease):
            if not is_plain:
                refusal.drop_if_expired(execution, found)
                refusal.reject_if_returned_too_often(execution, found)
            run = Run(execution, found)
            return run.carry_out(body if is_plain else begin)
        if _is_known(execution, found):
            following.wake_followers(acquisition, brought)
    except Exception as error:
        if run is None or not run.is_under_way:  # A soft time limit, say, before the first line that cleans up.
            return refusal.fail(acquisition, error)
        if (newer := run.superseded) is not None or run.was_lost:
            end = refusal.fail_lost if newer is None else partial(refusal.end_stopped, why=newer)
            return end(acquisition, error)
        raise
    if found is None:
        record_started(execution.task)
        return body()
    return refusal.end(acquisition, found)


def _is_known(execution: Execution, found: object) -> bool:
    """Whether the lock server knows of the message: how it ended, or that a copy of it runs."""
    return isinstance(found, Record) or (isinstance(found, Held) and execution.is_copy_of(found))
