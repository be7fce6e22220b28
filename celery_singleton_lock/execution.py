"""One execution of a task: acquire → run → release.

Whatever happens between two of these lines, the lock is freed: by the `finally` here, or, where that is torn down as
well, by the end of the lease, since the heartbeat forgets a lease that nobody refers to any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from celery import states
from celery.exceptions import Ignore
from celery.utils.dispatch import Signal
from celery.utils.log import get_logger
from celery.utils.time import get_exponential_backoff_interval
from kombu.exceptions import OperationalError

from celery_singleton_lock import clock, conflict, signals
from celery_singleton_lock.abort import Body
from celery_singleton_lock.errors import Aborted, LockLost, LockUnavailable
from celery_singleton_lock.lease import Held, Holder, Lease, new_owner
from celery_singleton_lock.options import Options
from celery_singleton_lock.runtime import Runtime

logger = get_logger(__name__)

#: Seconds that a retry waits for its own previous attempt, which sent it a moment before it freed the lock.
OWN_RETRY_WAIT = 5.0

#: Seconds after the end of a lease at which the put-back copy of a running message is due.
AFTER_LEASE = 1.0


class Execution:
    """One message in the hands of one process, or one eager call.

    Args:
        task: the task; its `request` is that of this execution.
        runtime: of the task's app.
        options: of this execution.
        key: of its lock.
    """

    def __init__(self, task: Any, runtime: Runtime, options: Options, key: str) -> None:
        self._task = task
        self._request = task.request
        self._store = runtime.store
        self._heartbeat = runtime.heartbeat
        self._options = options
        self._key = key
        self._owner = new_owner()
        self._began = clock.now()
        self._loss_told = False

    def __str__(self) -> str:
        return f"task {self._task.name}[{self._request.id}]"

    def acquire(self) -> Lease | None:
        """The lease to run under, or None to run without one; else raise what this execution ends with.

        Raises:
            Ignore, Reject, LockConflict: as `on_conflict` says.
            LockUnavailable: with `on_unavailable="raise"`.
        """
        failures = 0
        while True:
            try:
                return self._acquire_or_settle()
            except LockUnavailable as error:
                if self._options.on_unavailable == "run":
                    logger.warning("%s runs without a lock: %s", self, error)
                    return None
                if self._options.on_unavailable == "raise" or self._request.is_eager:
                    raise
                logger.warning("%s is put back: %s", self, error)
                if self._was_put_back():
                    raise Ignore(f"put back: {error}") from None
            except OperationalError as error:
                logger.warning("%s cannot be put back: %s", self, error)
            # Neither the lock server nor the broker answers: the message waits here, where it is not lost.
            clock.sleep(conflict.back_off(failures))
            failures += 1

    def run(self, lease: Lease, body: Callable[[], Any]) -> Any:
        """Run `body` under `lease`: renewed meanwhile, freed afterwards.

        Raises:
            LockLost: the lease was lost and the body was stopped.
        """
        self._lease, self._body = lease, Body(lease)
        self._request.singleton_lease = lease
        try:
            self._heartbeat.start(lease, self._when_lost)
            waited = lease.acquired_at - self._began
            logger.debug("%s holds %s after %.3f s, fence %d", self, lease.key, waited, lease.fence)
            self._send(signals.lock_acquired, lease=lease, waited=waited)
            record_started(self._task)
            if self._options.on_lock_lost == "abort":
                lease.check()  # The receivers and the result backend may have taken their time.
            with self._body:
                return body()
        except Aborted:
            if not self._body.struck:
                raise
            self._fail_for_loss()
        finally:
            try:
                self._heartbeat.stop(lease)
                self._body.end()
            finally:
                self._release()

    def _acquire_or_settle(self) -> Lease:
        found = self._ask_until_free()
        if isinstance(found, Lease):
            self._drop_if_done(found)
            return found
        if self._is_of_this_message(found):
            # Running elsewhere. A copy stands by, in case that worker dies: to end here would acknowledge the last one.
            logger.info("%s is already running on %s; a copy stands by", self, found.holder)
            conflict.put_back(self._task, countdown=found.remaining + AFTER_LEASE, stands_by=True)
        conflict.settle(self._task, found.conflict(self._key), self._options)

    def _ask_until_free(self) -> Lease | Held:
        """Ask for the lock; where it is held, wait as long as `lock_wait` says, and for an own earlier attempt."""
        while True:
            found = self._ask()
            if isinstance(found, Lease):
                return found
            patience = OWN_RETRY_WAIT if self._is_own_earlier_attempt(found) else self._options.wait
            left = self._began + patience - clock.now()
            if left <= 0:
                return found
            self._store.wait(self._key, min(left, found.remaining + 0.002))

    def _ask(self) -> Lease | Held:
        request = self._request
        holder = Holder(request.id, request.retries or 0, request.hostname, os.getpid(), clock.wall())
        may_wait = self._options.wait > 0 or holder.retries > 0
        return self._store.acquire(self._key, self._owner, ttl=self._options.ttl, holder=holder, waiting=may_wait)

    def _is_of_this_message(self, found: Held) -> bool:
        task_id = self._request.id
        return found.holder is not None and task_id is not None and found.holder.task_id == task_id

    def _is_own_earlier_attempt(self, found: Held) -> bool:
        return (
            self._is_of_this_message(found)
            and found.holder is not None
            and found.holder.retries < (self._request.retries or 0)
        )

    def _drop_if_done(self, lease: Lease) -> None:
        """End a copy that stood by for an execution which has finished since."""
        if not conflict.stands_by(self._request):
            return
        done = True
        try:
            done = self._task.backend.get_state(self._request.id) in states.READY_STATES
        except NotImplementedError:
            done = False  # There is no result backend to ask.
        finally:
            if done:
                self._store.release(lease)
        if done:
            logger.info("%s is already done; the copy that stood by is dropped", self)
            raise Ignore("already done")

    def _was_put_back(self) -> bool:
        try:
            conflict.put_back(self._task)
        except Ignore:
            return True
        except OperationalError as error:
            logger.warning("%s cannot be put back: %s", self, error)
            return False

    def _when_lost(self) -> None:
        """In the heartbeat's thread, at once when the lease is lost and then until the body ends."""
        if self._options.on_lock_lost == "abort":
            self._body.strike()
        if not self._loss_told:
            self._loss_told = True
            # A receiver may take its time; other leases need the heartbeat's thread meanwhile.
            threading.Thread(target=self._tell_loss, name="singleton-lock-lost", daemon=True).start()

    def _tell_loss(self) -> None:
        lease = self._lease
        logger.error("%s lost %s (%s): %s", self, lease.key, self._options.on_lock_lost, lease.reason)
        self._send(signals.lock_lost, lease=lease, reason=lease.reason)

    def _fail_for_loss(self) -> NoReturn:
        """Fail with LockLost, or retry where the task's autoretry says so: its wrapper is inside, and saw Aborted."""
        task = self._task
        lost = LockLost(self._lease.key, self._lease.reason or "")
        wanted = tuple(getattr(task, "autoretry_for", None) or ())
        unwanted = tuple(getattr(task, "dont_autoretry_for", None) or ())
        if not isinstance(lost, wanted) or isinstance(lost, unwanted):
            raise lost from None
        options = dict(getattr(task, "retry_kwargs", None) or {})
        if factor := getattr(task, "retry_backoff", False):
            options["countdown"] = get_exponential_backoff_interval(
                factor=int(max(1.0, factor)),
                retries=self._request.retries or 0,
                maximum=int(getattr(task, "retry_backoff_max", 600)),
                full_jitter=getattr(task, "retry_jitter", True),
            )
        raise task.retry(exc=lost, **options)

    def _release(self) -> None:
        lease = self._lease
        if lease.pid != os.getpid():
            return  # Forked by the body: the lock is the parent's.
        held = clock.now() - lease.acquired_at
        try:
            released = self._store.release(lease)
        except LockUnavailable as error:
            logger.warning("%s could not free %s, which ends by itself: %s", self, lease.key, error)
            return
        if released:
            logger.debug("%s freed %s after %.3f s", self, lease.key, held)
            self._send(signals.lock_released, lease=lease, held=held)
        elif not self._loss_told:
            lease.lose("it was no longer ours when the task ended")
            self._tell_loss()

    def _send(self, signal: Signal, **details: Any) -> None:
        signal.send(sender=self._task, task_id=self._request.id, key=self._key, **details)


def record_started(task: Any) -> None:
    """Store STARTED if the task wants that; Celery's own way would do it before the lock is asked for."""
    request = task.request
    if not task.tracks_started or request.is_eager or request.id is None or conflict.ignores_result(task):
        return
    meta = {"pid": os.getpid(), "hostname": request.hostname}
    task.backend.store_result(request.id, meta, states.STARTED, request=request)
