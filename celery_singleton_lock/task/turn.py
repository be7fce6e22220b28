"""One message in one process: what stays the same, and how far this process has got with it.

Each header of a message becomes an attribute of its request, whatever its name. So what only this process may say about
a request is kept beside the request, and not in it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from celery import states
from celery.signals import task_postrun

from celery_singleton_lock import cleaned, clock, process_identity
from celery_singleton_lock.errors import with_label
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal.writer import crash
from celery_singleton_lock.journal_entry import LOST, STOPPED, SUPERSEDED, Entry, Kind
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.options.rules import JOIN, REPLACE
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, Record, order_of
from celery_singleton_lock.task import ends
from celery_singleton_lock.task.ends import REPLACED, Outcome
from celery_singleton_lock.task.interrupt import Body
from celery_singleton_lock.task.message import Message, RequestLike, TaskLike, TaskLock, record_name

if TYPE_CHECKING:
    from celery_singleton_lock.task.queue_lock import Queued


@dataclass(slots=True, eq=False)
class Turn:
    """How far this process has got with a request. Nothing in here refers to the request: it would then stay forever.

    Attributes:
        message: see `delivered`.
        lease: the lease under which the body runs, or ran; None without a lock.
        body: the body that runs under the lease.
        in_body: whether the body runs; afterwards, what is sent follows from the message. None if that is not known, as
            of a plain task.
        gives_up: the owner that a copy of the message names as given up: it has asked for the lock without an answer,
            or in a queue, where the request may still be carried out for a moment.
        queue_lock_ended: whether this process need not free the message's queue lock any more: it was freed, or the
            retry or the replacement has it.
        is_replaced: whether another task has its id now.
        is_retried: whether its retry was sent with that lock.
        passes_on: that lock, as what was sent under the message's id has it: its next attempt, or its replacement.
    """

    message: Message | None = None
    lease: Lease | None = None
    body: Body | None = None
    in_body: bool | None = None
    gives_up: str | None = None
    queue_lock_ended: bool = False
    is_replaced: bool = False
    is_retried: bool = False
    passes_on: Hold | None = None

    def delivered(self, request: RequestLike) -> Message:
        """The message of its request, parsed when it is first asked for."""
        if self.message is None:
            self.message = Message.of(request)
        return self.message


#: What makes the record of a request's message say that all was sent.
unsettled: WeakKeyDictionary[RequestLike, Callable[[], None]] = WeakKeyDictionary()

_of_request: WeakKeyDictionary[RequestLike, Turn] = WeakKeyDictionary()


def turn_of(request: RequestLike) -> Turn:
    """How far this process has got with `request`."""
    turn = _of_request.get(request)
    if turn is None:
        turn = _of_request[request] = Turn()
    return turn


def message_of(request: RequestLike) -> Message:
    """The message of a request."""
    return turn_of(request).delivered(request)


def share(turn: Turn, copy: RequestLike) -> None:
    """Have a copy of a request be as far as that is."""
    _of_request[copy] = turn


class _ThisThread(threading.local):
    """This thread.

    Attributes:
        owners: the owners under which it runs bodies, one inside the other: waiting for them would never end.
    """

    def __init__(self) -> None:
        self.owners: list[str] = []


this_thread = _ThisThread()


# Nobody changes an execution once it is made, as for `Holder`.
@dataclass(slots=True, eq=False)
class Execution:
    """A message, or an eager call, that takes a lock.

    Attributes:
        holder: itself, as the lock's holder, with its order if newer messages of its key stop it.
        is_remembered: whether other copies of this message may come.
        is_awaited: whether anybody learns how it ends.
        brought: the lock that the message has, or gets, while it waits; None if it has none.
        began: when it came here, by `clock.now()`.
    """

    task: TaskLike
    request: RequestLike
    message: Message
    turn: Turn
    runtime: Runtime
    options: Options
    key: str
    holder: Holder
    is_remembered: bool
    is_awaited: bool
    began: float
    brought: Queued | None = None

    @classmethod
    def of(
        cls,
        task: TaskLike,
        request: RequestLike,
        turn: Turn,
        message: Message,
        runtime: Runtime,
        lock: TaskLock,
        brought: Queued | None = None,
    ) -> Execution:
        """The execution of the request, which this thread carries out."""
        is_stopped = lock.options.on_conflict == REPLACE and not request.is_eager and request.id is not None
        return cls(
            task,
            request,
            message,
            turn,
            runtime,
            lock.options,
            lock.key,
            _holder(task, request, message, lock.label, order_of(task.name) if is_stopped else ""),
            is_remembered=runtime.settings.done_ttl > 0 and request.id is not None and not request.is_eager,
            is_awaited=ends.is_awaited(task, request),
            began=clock.now(),
            brought=brought,
        )

    def __str__(self) -> str:
        return with_label(f"task {self.task.name}[{cleaned.text(self.request.id)}]", self.holder.label)

    def is_copy_of(self, found: Held) -> bool:
        """Whether another copy of this message, or another attempt, has the lock."""
        return found.holder is not None and found.holder.is_copy_of(self.holder)

    def hold_of(self, found: Held) -> Hold:
        """Somebody else's hold, to be freed."""
        return found.hold(self.key, ttl=self.options.ttl, limit=self.options.limit)

    def needs_settling(self, outcome: Outcome) -> bool:
        """Whether a later copy of the message has to know that what follows from it was sent."""
        return self.is_awaited and outcome.state in states.READY_STATES

    def record(self, outcome: Outcome | None) -> Record | None:
        """The record to keep if `outcome` is the message's end."""
        if outcome is None or not self.is_remembered:
            return None
        turn = self.turn
        if turn.is_retried or (turn.is_replaced and turn.passes_on is not None):
            # However it ended, a late copy is to find that the message goes on, with the lock that it brought.
            outcome = Outcome(states.IGNORED, REPLACED) if self.turn.is_replaced else Outcome(states.RETRY)
        elif not (outcome.settled or self.needs_settling(outcome)):
            outcome = outcome._replace(settled=True)
        return outcome.record_of(self.holder, self.runtime.settings.done_ttl)


def holder_of(task: TaskLike, request: RequestLike) -> Holder:
    """This process, as the lock's holder for an execution of this request."""
    return _holder(task, request, message_of(request))


def named(task: TaskLike) -> str:
    """A task and its message, as a log may show them."""
    return f"task {task.name}[{cleaned.text(task.request.id)}]"


def record_started(task: TaskLike) -> None:
    """Store STARTED if the task wants that; Celery itself would do it before the lock is asked for."""
    if not task.tracks_started:
        return
    request = task.request
    if request.is_eager or request.id is None or ends.ignores_result(task, request):
        return
    meta = {"pid": os.getpid(), "hostname": request.hostname}
    task.backend.store_result(request.id, meta, states.STARTED, request=request)


def journal_run(
    execution: Execution, lease: Lease, outcome: Outcome | None, *, waited: float, began: float, ended: float
) -> None:
    """Its body ran. Only the body is timed: the lock is asked for before it, and freed after it."""
    state = LOST if lease.reason else STOPPED if outcome is None else outcome.state
    if lease.superseded_by is not None and state == states.REVOKED:
        state = SUPERSEDED
    _journal(execution, "run", began, ended, waited, outcome=state, fence=lease.fence, renewals=lease.renewals)


def journal_end(execution: Execution, kind: Kind, holder: Holder | None) -> None:
    """Its body did not run; `holder` has the lock."""
    scheduled, now = execution.message.carried.get("entry"), clock.now()
    of_copy: dict[str, Any] = {"scheduled": cleaned.text(scheduled) if scheduled else ""}
    if holder is not None:
        of_copy |= {"holder": holder.task_id, "holder_node": holder.node, "holder_since": holder.since}
    _journal(execution, kind, execution.began, now, now - execution.began, **of_copy)


def journal_crash(execution: Execution, found: Held) -> None:
    """Another run's process died, and this execution has freed its lock."""
    it, fence = execution, found.fence or 0
    entry = crash(it.task.name, it.key, found.holder, limit=it.options.limit, fence=fence)
    it.runtime.journal.add(entry, at_once=it.request.is_eager)


def settle_after(execution: Execution, ended: Outcome) -> None:
    """Have the record say that all was sent, once it was."""
    task, request, records = execution.task, execution.request, execution.runtime.records
    if not execution.needs_settling(ended):
        return
    # A copy that has joined this one may look later: when its result is forgotten, or Celery has stored RETRY over it.
    policy = execution.options.on_conflict
    content = ended.content if policy == JOIN or callable(policy) else None
    if (record := execution.record(Outcome(ended.state, content, settled=True))) is None:
        return
    # At once if there is no result backend to ask instead.
    settle = records.replace if ends.backend_knows(task, request) else records.replace_now
    unsettled[request] = partial(settle, execution.key, record)


# As this is imported: the tracer of a task asks the list of receivers that there is as it is made.
@task_postrun.connect
def _settle(sender: Any = None, state: str | None = None, **_: Any) -> None:
    if not unsettled or sender is None:  # As after most messages.
        return
    settle = unsettled.get(sender.request)
    # Celery sends the signal from a `finally`: an error that is on its way means that not all was sent.
    is_sent = sys.exc_info()[1] is None and state in (*states.READY_STATES, states.IGNORED)
    if settle is not None and is_sent:
        settle()


def _journal(execution: Execution, kind: Kind, began: float, ended: float, waited: float, **of_kind: Any) -> None:
    own = execution.holder
    entry = Entry(
        kind,
        execution.task.name,
        execution.key,
        own.task_id,
        own.node,
        own.pid,
        began,
        ended,
        waited,
        limit=execution.options.limit,
        label=own.label,
        **of_kind,
    )
    execution.runtime.journal.add(entry, at_once=execution.request.is_eager)


def _holder(task: TaskLike, request: RequestLike, message: Message, label: str = "", order: str = "") -> Holder:
    return Holder(
        cleaned.text_or_none(request.id),
        message.retries,
        request.hostname,
        os.getpid(),
        clock.wall(),
        message.replaced,
        process_identity.own(),
        sending=message.sending,
        record=record_name(task.name, message.id, message.sending),
        label=label,
        order=order,
    )
