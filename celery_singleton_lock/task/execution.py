"""One message in one process: what is known of it from the start, and stays the same."""

from __future__ import annotations

import os
from dataclasses import dataclass

from celery import states

from celery_singleton_lock import cleaned, clock, process_identity
from celery_singleton_lock.errors import with_label
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import message_identity
from celery_singleton_lock.task.celery_types import RequestLike, TaskLike, TaskLock
from celery_singleton_lock.task.outcome import REPLACED, Outcome, ignores_result
from celery_singleton_lock.task.running import Progress, progress_of


# Nobody changes an execution once it is made, as for `Holder`.
@dataclass(slots=True, eq=False)
class Execution:
    """A message, or an eager call.

    Attributes:
        holder: itself, as the lock's holder.
        is_remembered: whether other copies of this message may come.
        began: when it came here, by `clock.now()`.
    """

    task: TaskLike
    request: RequestLike
    runtime: Runtime
    options: Options
    key: str
    holder: Holder
    progress: Progress
    is_remembered: bool
    began: float

    @classmethod
    def of(cls, task: TaskLike, lock: TaskLock) -> Execution:
        """The execution of the request that this thread carries out."""
        request = task.request
        runtime = Runtime.of(task.app)
        return cls(
            task,
            request,
            runtime,
            lock.options,
            lock.key,
            holder_of(task, request, lock.label),
            progress_of(request),
            is_remembered=runtime.settings.done_ttl > 0 and request.id is not None and not request.is_eager,
            began=clock.now(),
        )

    def __str__(self) -> str:
        return with_label(f"task {self.task.name}[{cleaned.text(self.request.id)}]", self.holder.label)

    def is_copy_of(self, found: Held) -> bool:
        """Whether another copy of this message, or another attempt, has the lock."""
        return found.holder is not None and found.holder.is_copy_of(self.holder)

    def hold_of(self, found: Held) -> Hold:
        """Somebody else's hold, to be freed."""
        return found.hold(self.key, ttl=self.options.ttl, limit=self.options.limit)

    def record(self, outcome: Outcome | None) -> Record | None:
        """The record to keep if `outcome` is the message's end."""
        if outcome is None or not self.is_remembered:
            return None
        if self.progress.goes_on:
            # However it ended, a late copy is to find that the message goes on, with the lock that it brought.
            outcome = Outcome(states.IGNORED, REPLACED) if self.progress.is_replaced else Outcome(states.RETRY)
        elif not outcome.needs_settling(self.task, self.request):
            outcome = outcome._replace(settled=True)
        return outcome.record_of(self.holder, self.runtime.settings.done_ttl)


def holder_of(task: TaskLike, request: RequestLike, label: str = "") -> Holder:
    """This process, as the lock's holder for an execution of this request."""
    sending = message_identity.sending_of(request)
    return Holder(
        cleaned.text_or_none(request.id),
        cleaned.count(request.retries),
        cleaned.text_or_none(request.hostname),
        os.getpid(),
        clock.wall(),
        message_identity.replaced(request),
        process_identity.own(),
        sending=sending,
        record=message_identity.record_name(task.name, request.id, sending),
        label=label,
    )


def named(task: TaskLike) -> str:
    """A task and its message, as a log may show them."""
    return f"task {task.name}[{cleaned.text(task.request.id)}]"


def record_started(task: TaskLike) -> None:
    """Store STARTED if the task wants that; Celery itself would do it before the lock is asked for."""
    if not task.tracks_started:
        return
    request = task.request
    if request.is_eager or request.id is None or ignores_result(task, request):
        return
    meta = {"pid": os.getpid(), "hostname": request.hostname}
    task.backend.store_result(request.id, meta, states.STARTED, request=request)
