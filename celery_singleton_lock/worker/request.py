"""One delivery of a message in the worker's main process.

The request mints the owner under which its delivery takes the lock, and learns the key from the child (`reports`),
so that the main process can renew and free the lock. It also frees what a child left behind before the message is given
back to the broker, or its end is recorded, so that nobody is refused because of a dead holder.

This code runs in the consumer's loop, so it does not make keys: that would run the user's code. If the child has not
reported its key, the key is made in another thread (`aside`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from celery import states
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.signals import task_rejected, task_revoked, task_unknown
from celery.utils.log import get_logger

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock._celery import (
    WorkerRequest,
    counts_part_once,
    give_token_back,
    is_active,
    raised,
    reported,
)
from celery_singleton_lock.background import Aside
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.options.app import longest_delay
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task import delivery, ends, header, reports
from celery_singleton_lock.task.ends import Concluded, Kind, Outcome
from celery_singleton_lock.task.message import carried_in
from celery_singleton_lock.task.queue_lock import QueueLock, lock_in
from celery_singleton_lock.task.turn import holder_of, message_of
from celery_singleton_lock.worker.children import Children, RunHold, free
from celery_singleton_lock.worker.line import line_of

logger = get_logger(__name__)

#: The children of each app's worker, if it has a pool of processes.
children_of: WeakKeyDictionary[Any, Children] = WeakKeyDictionary()

#: Each app's worker, while it runs.
worker_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

#: Makes the keys that no child has reported.
aside = Aside("singleton-lock-aside")

#: Seconds after which a copy begins if nobody has woken it.
HELD = 60.0

#: Seconds that a killed child may take to be gone.
DEATH = 1.0

#: How long after it has expired a waiting copy is ended: Celery checks the time once more.
EXPIRED = timedelta(seconds=0.1)

#: How the pool reports a child that is gone, or is going.
_LOST = (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt)

#: How a body may end that Celery stores nothing for: its message was retried, or replaced, or wants no result.
_NO_RESULT = (states.RETRY, states.IGNORED)


def end_brought(app: Any, brought: QueueLock | None) -> None:
    """The message has ended, and no process has it that would free the lock that it brought."""
    if brought is not None and brought.ends_at_end:
        aside.do(partial(Runtime.of(app).store.abandon, brought.hold()))


class SingletonRequest(WorkerRequest):
    """Celery's request for an exclusive task. If a task has a request class of its own, derive that from this one."""

    #: What `audit` looks for in a user's request class.
    looks_after_its_lock: ClassVar[bool] = True

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        if not isinstance(self.request_dict.get("headers"), Mapping):
            # Celery would take it for the message's headers, and could not send the message again.
            self.request_dict.pop("headers", None)
        carried = carried_in(self.request_dict)
        if not carried:
            header.report_if_stripped(self.request_dict)
        self._owner = new_owner()
        self._reported = reports.expect(self._owner)
        #: Whether the message, or a retry, is still to be carried out.
        self._goes_on = False
        self._is_cancelled = False
        #: Whether the pool has it.
        self.has_begun = False
        #: When it begins at the latest, if it can be woken, or expires before the message is due.
        self._held_until: datetime | None = None
        delivery.give(message, self.request_dict, self._owner)
        #: The lock that the message brought with it.
        self._brought = self._confirmed() if "queue" in carried else None
        # Making the context takes as long as everything else here.
        if self.delivery_info["redelivered"] or ("put_back" in carried and message_of(self.context).may_have_begun):
            # It may be running: recording that it has expired would overwrite its state. The child asks first.
            self.expires = None
        if self.eta is not None and "put_back" in carried and message_of(self.context).was_put_back:
            self._wait()

    @property
    def eta(self) -> Any:
        """When it is due: later than the message says if it can be woken, since each try takes a slot; sooner if it is
        a copy that expires before.
        """
        return self._held_until or super().eta

    @property
    def is_running(self) -> bool:
        return is_active(self)

    def hold(self) -> RunHold | None:
        """The hold that its execution may have; None if the execution has not begun to ask for a lock."""
        reports.receive()  # It may ask under another owner by now.
        report = self._reported.report
        if report is None:
            return None
        holder = Holder(
            cleaned.text_or_none(self.id),
            node=self.hostname,
            pid=(self.worker_pid or 0) if self.app in children_of else os.getpid(),
            since=self.time_start or 0.0,
            ttl=report.ttl,
            label=cleaned.text(report.label),
        )
        return RunHold(report.hold(), holder, self.task.name)

    @property
    def is_stopped_when_lost(self) -> bool:
        """Whether its task is stopped when it has lost its lock, and not only warned about."""
        options = self._options()
        return options is not None and options.on_lock_lost == "abort"

    def info(self, safe: bool = False) -> dict[str, Any]:
        """What `celery inspect active` and the like show, without what only we need."""
        info = super().info(safe)
        return {**info, "delivery_info": delivery.without_ours(info.get("delivery_info") or {})}

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        self.has_begun = True
        super().on_accepted(pid, time_accepted)
        # This process takes what was revoked before a child began with it.
        if pid != os.getpid() and (children := children_of.get(self.app)) is not None:
            reports.receive()  # Now and then, so that the pipe is never full.
            children.assign(pid, self)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A time limit is over; for a hard one, Celery kills the child after this."""
        if soft:
            return super().on_timeout(soft, timeout)
        try:
            with self._recorded_as(TimeLimitExceeded(timeout)):
                super().on_timeout(soft, timeout)
        finally:
            if (children := children_of.get(self.app)) is not None:
                children.free_when_gone(self)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """It failed, by itself (`return_ok`) or because its child is gone."""
        error = raised(exc_info)
        if isinstance(error, Concluded):
            self._conclude(error.kind)
        if isinstance(error, _LOST) and not return_ok:
            return self._on_lost(error, exc_info, send_failed_event)
        result = super().on_failure(exc_info, send_failed_event, return_ok)
        if self._brought is not None and not (return_ok and self._has_freed(error)) and self._is_over:
            self._end_brought()
        # Otherwise it has taken over the lock that was kept for it.
        if self._is_over and (self.hold() is None or isinstance(error, LockUnavailable)):
            self._give_up_kept()
        return result

    def _conclude(self, kind: Kind) -> None:
        """Its process has ended it without a run."""
        if (worker := worker_of.get(self.app)) is not None:
            give_token_back(worker.consumer, self.task.name)
        if kind in ("revoked", "expired"):
            self._announce_skipped(expired=kind == "expired")
        if kind == "rejected":
            self.reject()  # Before Celery acknowledges it, which it does not do twice.

    def _on_lost(self, error: BaseException, exc_info: Any, send_failed_event: bool) -> Any:
        """Its child is gone, or is going."""
        # Before the message goes back: its next delivery must not be refused by this one's lock. A child that raises
        # `SystemExit` frees it before the pool says so, and then still takes a while to end.
        self._free_if_gone(DEATH if isinstance(error, Exception) else 0.0)
        if not isinstance(error, Terminated):  # Celery takes a child that has raised `SystemExit` for lost, too.
            ended = self._recorded_end()
            if ended is not None and ended.state in _NO_RESULT:  # The child, which is gone, has ended it.
                self._end_brought()
                return super().on_failure(reported(Ignore("its child had ended it")), send_failed_event=False)
            if ended is not None and not ended.settled and self._may_be_uncounted():
                exc_info = reported(Reject("its chord may not know of it", requeue=True))
        with self._recorded_as(error):
            return super().on_failure(exc_info, send_failed_event)

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        self._is_cancelled = True  # Before its greenlet is killed, which may end at once.
        try:
            super().cancel(*args, **kwargs)
        except NotImplementedError:  # This pool cannot end a task: it runs on.
            self._is_cancelled = False
            raise
        finally:  # Celery stores RETRY after it has killed a greenlet, which may fail.
            if self._is_cancelled:
                self._end_with_greenlet()

    def acknowledge(self) -> None:
        """As Celery's, except for a message that is to run elsewhere: Celery takes a killed greenlet for a success."""
        if not (self._is_cancelled and self.task.acks_late):
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        self._goes_on = True
        super().reject(requeue)
        if not requeue:
            self._end_brought()

    def terminate(self, *args: Any, **kwargs: Any) -> None:
        """As Celery's, and for the message's other deliveries: Celery knows only one, which may be a waiting copy."""
        for request in self.others_at_work():
            if isinstance(request, SingletonRequest):  # Not what has just replaced itself by this one.
                request._terminate(*args, **kwargs)  # noqa: SLF001 - its own class
        self._terminate(*args, **kwargs)

    def _terminate(self, *args: Any, **kwargs: Any) -> None:
        if self.was_terminated:
            return
        super().terminate(*args, **kwargs)
        self._end_with_greenlet()

    def _end_with_greenlet(self) -> None:
        """A greenlet that was killed is gone by now, whatever it was doing; the end of a child is reported."""
        if self.acknowledged and self.app not in children_of:
            self._end_brought()

    def on_sent_again(self) -> None:
        self._goes_on = True

    def has_ended(self) -> bool:
        return self._recorded_end() is not None

    def revoked(self) -> bool:
        revoked = super().revoked()
        if revoked:
            self._end_brought()
            if self.context.retries:
                aside.do(self._end_attempt)
            self.has_begun = True
        return revoked

    def _wait(self) -> None:
        """Wait: begin when the lock that it was put back for is free, and end when it expires."""
        line, its = line_of.get(self.app), message_of(self.context)
        waits = its.note.waits_on(Runtime.of(self.app).settings.prefix)
        if line is not None and waits is not None:
            # Now and then such a copy checks whether the task that it joined has ended, or a newer message has come.
            looks = its.note.joins is not None or its.number is not None
            # A follower may have taken the lock for which this copy of it waits, and its process has died.
            may_have_it = self.delivery_info["redelivered"] and its.note.follows is not None
            if line.park(self, waits.key, its.note.since_now(), waits.limit) and not (looks or may_have_it):
                longest = min(HELD, longest_delay(self.app.conf))
                self._held_until = datetime.fromtimestamp(clock.wall() + longest, timezone.utc)
        if self.expires is not None and self.eta - self.expires > EXPIRED:
            self._held_until = self.expires + EXPIRED

    def _confirmed(self) -> QueueLock | None:
        """The lock that the message brought, confirmed: its sender may have died before it could confirm it."""
        try:
            brought = lock_in(carried_in(self.request_dict), self.app, self.task.name)
            if brought is not None and brought.ends_at_end:
                Runtime.of(self.app).confirmations.add(brought.confirmed_again())
            return brought
        except Exception as error:  # noqa: BLE001 - what a message carries may be anything
            logger.debug("%s: the main process cannot tell what it brought: %r", self, error)
            return None

    def _has_freed(self, error: BaseException) -> bool:
        """Whether its process has freed what the message brought, or that goes on. Before the task is called, as in
        `before_start`, or if a soft time limit strikes there, the process does not, and has reported no key.
        """
        return isinstance(error, Retry) or _continues(error) or self.hold() is not None

    def _end_brought(self) -> None:
        brought, self._brought = self._brought, None
        if brought is not None and not self._has_passed_on():
            end_brought(self.app, brought)

    def _has_passed_on(self) -> bool:
        """Whether what goes on has the lock that the message brought."""
        ended = self._recorded_end()
        return ended is not None and ended.state in _NO_RESULT and not ended.settled

    def _may_be_uncounted(self) -> bool:
        """Whether the child may have died between storing its result and having its chord count it: then a copy, which
        ends as this message's record says, has the chord count it.
        """
        is_part = self.context.chord is not None and counts_part_once(self.task.backend)
        return is_part and self.task.acks_late and self.success_was_stored

    def _recorded_end(self) -> Outcome | None:
        """How it has ended, as far as is known."""
        hold, runtime = self.hold(), Runtime.of(self.app)
        outage = runtime.heartbeat.outage
        if hold is None or outage.is_silent:  # The consumer waits for the answer: once, and not for each message.
            return None
        try:
            found = runtime.store.recorded(hold.key, holder_of(self.task, self.context).message)
        except LockUnavailable as error:
            outage.failed(error)
            return None
        except Exception as error:  # noqa: BLE001 - greenlets' hub cannot wait: it may run the handler of a signal
            logger.debug("%s: it is not known whether it has ended: %r", self, error)
            return None
        outage.answered()
        return None if found is None else ends.read(found)[0]

    def _free_if_gone(self, within: float) -> None:
        """Free the lock if the child is gone within so many seconds. One that still cleans up frees it itself, or
        dies and is noticed.
        """
        children = children_of.get(self.app)
        if children is not None and not children.forget(self, within):
            return
        if (hold := self.hold()) is not None:
            self._free(hold)

    def _free(self, hold: RunHold) -> None:
        runtime = Runtime.of(self.app)
        free(runtime.store, hold, runtime.journal)

    def _announce_skipped(self, *, expired: bool) -> None:
        """Announce what the result says, as Celery itself does for a revoked task."""
        self.send_event("task-revoked", terminated=False, signum=None, expired=expired)
        task_revoked.send(self.task, request=self.context, terminated=False, signum=None, expired=expired)

    @contextmanager
    def _recorded_as(self, error: BaseException) -> Iterator[None]:
        """Record what Celery makes of the loss of the child, if that is the end of the message. Unless that fails, the
        result is stored by then, and what follows sent.
        """
        settled = False
        try:
            yield
            settled = True
        finally:
            try:
                self._record_end(error, settled)
            except Exception as failure:  # noqa: BLE001 - what it carries may be unreadable; the consumer goes on
                logger.warning("%s: its end cannot be recorded: %r", self, failure)

    def _record_end(self, error: BaseException, settled: bool) -> None:
        seconds = Runtime.of(self.app).settings.done_ttl
        if (ended := self._outcome(error)) is None:
            if self._is_dropped:
                self._end_brought()
            return
        self._end_brought()
        if not seconds or (isinstance(error, _LOST) and self.success_was_stored):
            return  # In the latter case Celery keeps the success, which was recorded before it was stored.
        if (hold := self.hold()) is not None:
            self._remember(hold.key, ended, seconds, settled)
        else:
            aside.do(partial(self._remember_aside, ended, seconds, settled))
        self._give_up_kept()  # It may have died as it waited for the attempt before.

    def _remember_aside(self, ended: Outcome, seconds: float, settled: bool) -> None:
        if (hold := self._expected_hold(self._owner)) is not None:
            self._remember(hold.key, ended, seconds, settled)

    def _remember(self, key: str, ended: Outcome, seconds: float, settled: bool) -> None:
        holder, runtime = holder_of(self.task, self.context), Runtime.of(self.app)
        runtime.store.remember(key, ended.record_of(holder, seconds))
        if settled:
            runtime.records.replace(key, Outcome(ended.state, settled=True).record_of(holder, seconds))

    def _give_up_kept(self) -> None:
        """Free the lock that the attempt before this one may have kept for it: nobody takes it."""
        options = self._options() if self.context.retries else None
        if options is not None and options.retain_on_retry:
            aside.do(self._free_kept)

    def _free_kept(self) -> Hold | None:
        if (hold := self._expected_hold(holder_of(self.task, self.context).reserved_as)) is not None:
            self._free(RunHold(hold, Holder()))
        return hold

    def _end_attempt(self) -> None:
        """Free the lock kept for this retry, which never begins, and record that for waiting copies (`sharing`)."""
        holder, runtime, hold = holder_of(self.task, self.context), Runtime.of(self.app), self._free_kept()
        if hold is not None and (seconds := runtime.settings.done_ttl):
            record = Outcome(states.REVOKED, settled=True).record_of(holder, seconds)
            with suppress(LockUnavailable):  # Waiting callers ask the result backend as well.
                runtime.store.refuse(hold.key, holder, record)

    def _outcome(self, error: BaseException) -> Outcome | None:
        """The end of the message; None if it will be delivered again, or is retried."""
        if not self._is_over:
            return None
        if isinstance(error, Terminated):
            return Outcome(states.REVOKED)
        if not isinstance(error, Exception):  # Celery takes its child for lost.
            error = WorkerLostError(f"its process has ended: {error!r}")
        return ends.failed(error, is_awaited=ends.is_awaited(self.task, self.context))

    @property
    def _is_over(self) -> bool:
        """Whether the message will not be delivered again, and is not retried."""
        return not (self._goes_on or self.was_cancelled) and bool(self.acknowledged)

    @property
    def _is_dropped(self) -> bool:
        """Whether it was cancelled, by a cold shutdown, say, and nobody delivers it again."""
        return self.was_cancelled and not (self._goes_on or self.task.acks_late)

    def _options(self) -> Options | None:
        """How the execution locks; None if it takes no lock."""
        try:
            options: Options | None = self.task.lock_options(self.context)
            return options
        except Exception as error:  # noqa: BLE001 - what a message asks for may not be allowed
            logger.debug("%s: the main process cannot tell its options: %r", self, error)
            return None

    def _expected_hold(self, owner: str) -> Hold | None:
        """The hold that an execution has under this owner, with the key made as the execution makes it; None if there
        is none. Only in the `aside` thread: it runs the user's code.
        """
        try:
            lock = self.task.lock_of(self.context, self.args, self.kwargs)
        except Exception as error:  # noqa: BLE001 - also whatever the user's lock_key raises
            logger.debug("%s: the main process cannot tell its lock: %r", self, error)
            return None
        if lock is None:
            return None
        return Hold(lock.key, owner, ttl=lock.options.ttl, limit=lock.options.limit)


def _continues(error: BaseException) -> bool:
    """Whether the message is carried out elsewhere, or will be."""
    return isinstance(error, Concluded) and error.kind == "continues"


@task_unknown.connect
@task_rejected.connect
def _end_brought(sender: Any, message: Any, **_: Any) -> None:
    """A message that reaches no task: Celery drops those that it cannot read, or whose task the worker does not know.

    A rolling deploy causes some; the locks that they brought with them end.
    """
    try:
        headers = message.headers or {}
        end_brought(sender.app, lock_in(carried_in(headers), sender.app, headers.get("task", "")))
    except Exception as error:  # noqa: BLE001 - what a message carries may be anything
        logger.debug("the worker cannot tell which lock a message brought that reaches no task: %r", error)
