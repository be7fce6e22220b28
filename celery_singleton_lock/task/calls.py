"""A call of a task: acquire → run → free. Of one message, or of an item of a map.

Whatever happens between two of these steps, the lock is freed: by the `finally` of `run`; by `conclude`, before `run`
is reached; or, if these are cut short as well, by the worker's main process, or by the end of the lease, since the
heartbeat forgets a lease that nobody refers to any more.

`task.map`, `task.starmap` and `task.chunks` make one message, and in it one call for each item: Celery's own tasks of
these names call the exclusive task as a function, within their own message. Each call takes the lock of its arguments,
as `apply` does: for that call only, and renewed while it runs. But a call has no message that could be put back,
skipped or remembered. So if the lock is held, the call waits in place: as long as `lock_wait` says, or, with
`on_conflict="retry"`, until the lock is free. A call that cannot get its lock fails, and the map with it: a made-up
result would be worse. In a group of signatures, each one has a message, a state and a policy.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery.app.task import Context

from celery_singleton_lock._celery import pop_task, push_task
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import WAITING_POLICIES
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import conclude, following, joining
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.ends import End
from celery_singleton_lock.task.entrance import value_of
from celery_singleton_lock.task.message import HEADER, RequestLike, TaskLike
from celery_singleton_lock.task.run import Run
from celery_singleton_lock.task.turn import Execution, record_started, this_thread, turn_of


def run_under_lock(execution: Execution, body: Callable[[], Any]) -> Any:
    """Run `body` under the lock, or end as this message must.

    Raises:
        Concluded, Reject, LockConflict: as `on_conflict` says, of this message or of a newer one.
        LockUnavailable: with `on_unavailable="raise"`.
        LockLost: the lease was lost and the body was stopped.
    """
    acquisition = Acquisition(execution)
    is_plain = execution.message.is_plain
    run: Run | None = None
    found: Lease | Held | Record | End | None

    def begin() -> Any:
        following.wake_followers(acquisition)
        return body()

    try:
        if is_plain:
            found = acquisition.acquire()
        else:
            found = following.end_of_leader(acquisition) or joining.acquire(acquisition)
        if isinstance(found, Lease):
            if not is_plain:
                conclude.with_lease(acquisition, found)
            run = Run(execution, found)
            return run.execute(body if is_plain else begin)
        if _is_known(execution, found):
            following.wake_followers(acquisition)
    except Exception as error:
        if run is None or not run.is_under_way:  # A soft time limit, say, before the first line that cleans up.
            return conclude.fail(acquisition, error)
        if run.superseded is not None:
            return conclude.stopped(acquisition, error, run.superseded)
        if run.was_lost:
            return conclude.lost(acquisition, error)
        raise
    if found is None:
        record_started(execution.task)
        return body()
    return conclude.end(acquisition, found)


def call_item(task: TaskLike, sender: TaskLike, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the task's function for one item, under the lock of these arguments.

    Raises:
        LockConflict: the lock is held, and was for as long as this may wait.
        LockUnavailable: with `on_unavailable="raise"`.
        LockLost: the lease was lost and the function was stopped.
    """
    request = _request_of_item(sender.request, args, kwargs)
    lock = task.lock_of(request, args, kwargs)

    def body() -> Any:
        return value_of(task.name, function(*args, **kwargs))

    push_task(task, request)
    try:
        if lock is None:
            return body()
        own = lock._replace(options=_options_of_item(lock.options))
        return run_under_lock(Execution.of(task, request, turn_of(request), own), body)
    finally:
        pop_task(task)


def _is_known(execution: Execution, found: object) -> bool:
    """Whether the lock server knows of the message: how it ended, or that a copy of it runs."""
    return isinstance(found, Record) or (isinstance(found, Held) and execution.is_copy_of(found))


def _options_of_item(options: Options) -> Options:
    """A task's options, as they apply to an item."""
    waits = options.on_conflict in WAITING_POLICIES and options.conflict_retries is None
    # Within a task that holds a lock, the wait must end: the other task might wait for that lock.
    wait = math.inf if waits and not this_thread.owners else options.wait
    silence = "wait" if options.on_unavailable == "retry" else options.on_unavailable
    return replace(options, on_conflict="raise", wait=wait, on_unavailable=silence)


def _request_of_item(of_sender: RequestLike, args: Any, kwargs: Any) -> Context:
    """The request of one call: as `apply` makes it, with the id of the map and nothing else copied."""
    return Context(
        id=of_sender.id,
        hostname=of_sender.hostname,
        args=args,
        kwargs=kwargs,
        is_eager=True,
        **{HEADER: {"id": of_sender.id, "sent": secrets.token_hex(16)}},
    )
