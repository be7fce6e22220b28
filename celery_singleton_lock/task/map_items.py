"""The calls that `task.map`, `task.starmap` and `task.chunks` make: one message, and in it one call for each item.

Celery's own tasks of these names call the exclusive task as a function, within their own message. Each call takes the
lock of its arguments, as `apply` does: for that call only, and renewed while it runs. But a call has no message that
could be put back, skipped or remembered. So if the lock is held, the call waits in place: as long as `lock_wait` says,
or, with `on_conflict="retry"`, until the lock is free. A call that cannot get its lock fails, and the map with it: a
made-up result would be worse. In a group of signatures, each one has a message, a state and a policy.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery.app.task import Context

from celery_singleton_lock._celery import current_task, pop_task, push_task
from celery_singleton_lock.options.rules import WAITING_POLICIES
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.task import synchronous
from celery_singleton_lock.task.carry_out import carry_out
from celery_singleton_lock.task.message import HEADER, RequestLike, TaskLike
from celery_singleton_lock.task.turn import Execution, this_thread

#: Celery's own tasks that call another one for each item; chunks are sent as the second.
_SENDERS = ("celery.map", "celery.starmap")


def sender() -> TaskLike | None:
    """The task that calls another one for each item in this thread; None if there is none.

    If an item's function calls a task, the item is the caller: Celery keeps a stack of what runs.
    """
    task = current_task()
    return task if task is not None and task.name in _SENDERS else None


def call(task: TaskLike, sender: TaskLike, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the task's function for one item, under the lock of these arguments.

    Raises:
        LockConflict: the lock is held, and was for as long as this may wait.
        LockUnavailable: with `on_unavailable="raise"`.
        LockLost: the lease was lost and the function was stopped.
    """
    request = _request(sender.request, args, kwargs)
    lock = task.lock_of(request, args, kwargs)

    def body() -> Any:
        return synchronous.value_of(task.name, function(*args, **kwargs))

    push_task(task, request)
    try:
        if lock is None:
            return body()
        return carry_out(Execution.of(task, lock._replace(options=_for_item(lock.options))), body)
    finally:
        pop_task(task)


def _for_item(options: Options) -> Options:
    """A task's options, as they apply to an item."""
    waits = options.on_conflict in WAITING_POLICIES and options.conflict_retries is None
    # Within a task that holds a lock, the wait must end: the other task might wait for that lock.
    wait = math.inf if waits and not this_thread.owners else options.wait
    silence = "wait" if options.on_unavailable == "retry" else options.on_unavailable
    return replace(options, on_conflict="raise", wait=wait, on_unavailable=silence)


def _request(of_sender: RequestLike, args: Any, kwargs: Any) -> Context:
    """The request of one call: as `apply` makes it, with the id of the map and nothing else copied."""
    return Context(
        id=of_sender.id,
        hostname=of_sender.hostname,
        args=args,
        kwargs=kwargs,
        is_eager=True,
        **{HEADER: {"id": of_sender.id, "sent": secrets.token_hex(16)}},
    )
