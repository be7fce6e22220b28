"""What the worker's main process does for the children of its prefork pool: renew for them, and free for the dead.

A child cannot renew while C code holds its GIL or while it is stopped, and a dead child frees nothing. The main process
can: it gave each delivery its owner, and knows the key. One thread waits for children to end (by pidfd, if the platform
has it: Celery itself may take seconds to notice) and for the next renewal; it is a thread because the consumer's timers
stop while the broker is away.

Protocol: `docs/protocol.md`, section 9.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from celery.utils.log import get_logger

from celery_singleton_lock import clock, trust
from celery_singleton_lock.errors import LockUnavailable, with_label
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal.writer import JournalWriter, crash, is_of_run
from celery_singleton_lock.keys.key import name_in
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.options.rules import MIN_TTL
from celery_singleton_lock.outage import Outage
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task.reports import Pipe

logger = get_logger(__name__)

#: Seconds after which the thread looks at the children while any of them carries out a delivery, which may need a
#: renewal: no ttl is so short that one would be due earlier.
LOOK = MIN_TTL * trust.RENEW_AFTER

#: Renewals for which a superseded child may go on: until the first it may not know, and then it has a tenth of the ttl
#: before it kills itself.
PATIENCE = 2

#: Seconds until the thread goes on after something went wrong.
RETRY_AFTER = 0.5


class RunHold(Hold):
    """The hold of a run, with what the main process knows about the run.

    Attributes:
        task: the task's name; the lock's name if that is unknown.
        holder: who and where it is, and since when it has been running or waiting for the lock.
    """

    __slots__ = ("holder", "task")

    def __init__(self, hold: Hold, holder: Holder, task: str = "") -> None:
        super().__init__(hold.key, hold.owner, ttl=hold.ttl, limit=hold.limit)
        self.holder = holder
        self.task = task or name_in(hold.key)

    def __str__(self) -> str:
        return f"task {self.task}[{self.holder.task_id}] on {self.holder.place}"


class Delivery(Protocol):
    """What a child carries out."""

    @property
    def is_running(self) -> bool:
        """Whether its end has not been reported yet."""

    def hold(self) -> RunHold | None:
        """Its hold, as far as is known yet; called under a mutex that others wait for."""


class _Child:
    """A child and the delivery that it carries out; the next delivery replaces the last."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = _open(pid)
        self._end = _poller([] if self.pidfd is None else [self.pidfd])
        self._delivery: Callable[[], Delivery | None] = lambda: None
        self._hold: RunHold | None = None
        self._renewed_at = 0.0
        #: Renewals since its run was to stop for a newer task.
        self._waited = 0

    def carry_out(self, delivery: Delivery) -> None:
        # Weak: the delivery's arguments may be large, and a child may be idle for days.
        self._delivery, self._hold = weakref.ref(delivery), None
        self._renewed_at, self._waited = clock.now(), 0

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, as far as this platform reports that."""
        return bool(self._end.poll(0))

    def is_at(self, delivery: Delivery) -> bool:
        return self._delivery() is delivery

    @property
    def is_busy(self) -> bool:
        """Whether it carries out a delivery whose end was not reported yet."""
        delivery = self._delivery()
        return delivery is not None and delivery.is_running

    def due(self, now: float) -> RunHold | None:
        """Its hold if that is to be renewed now."""
        hold = self.hold() if self.is_busy else None
        return None if hold is None or now + LOOK < self._renewed_at + hold.ttl * trust.RENEW_AFTER else hold

    def hold(self, *, has_ended: bool = False) -> RunHold | None:
        """The hold of what it carries out, as far as is known; or the last one that was asked for.

        Args:
            has_ended: ask also for that of a delivery whose end was reported: its process may not be gone yet.
        """
        delivery = self._delivery()
        if delivery is not None and (has_ended or delivery.is_running):
            hold, known = delivery.hold(), self._hold
            # It may ask again under another owner, and has a place once taken.
            if hold is not None and (known is None or known.owner != hold.owner):
                self._hold = hold
        return self._hold

    def renewed(self, hold: RunHold, now: float) -> None:
        """Its hold was renewed: kill it if it was to stop long ago, but has neither done so nor killed itself, because
        it is frozen, or in C code that lets no other thread run.
        """
        self._renewed_at = now
        if hold.superseded_by is None or self.hold() is not hold:
            return
        self._waited += 1
        if self._waited > PATIENCE and self.pidfd is not None and not self.is_over:
            logger.critical("%s: child %d does not end although it is superseded; killing it", hold.key, self.pid)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)


class Children:
    """The children of this process that carry out exclusive tasks; made before any of them.

    Args:
        store: where their locks are.
        journal: notes what is freed for them.
        outage: logs when the store does not answer.
    """

    def __init__(self, store: Store, journal: JournalWriter, outage: Outage) -> None:
        self._store = store
        self._journal = journal
        #: Also one that is gone, whose pid another process may have, until its lock is freed.
        self._children: list[_Child] = []
        self._mutex = Mutex(threading.RLock)  # A cold shutdown's handler may have interrupted `assign`.
        self._thread: threading.Thread | None = None
        self._news = Pipe()
        self._outage = outage
        #: Whether the thread waits for news, however long that takes.
        self._sleeps = False
        self._closed = False

    def start(self) -> None:
        """Start the thread, which a child may need before the first delivery is assigned."""
        with self._mutex.lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="singleton-lock-children", daemon=True)
                self._thread.start()

    def assign(self, pid: int, delivery: Delivery) -> None:
        """The child with this pid carries out `delivery` from now on."""
        with self._mutex.lock:
            child = next((child for child in self._children if child.pid == pid and not child.is_over), None)
            if is_new := child is None:
                child = _Child(pid)
                self._children.append(child)
            child.carry_out(delivery)
            if is_new or self._sleeps:
                self._news.give()
            self.start()

    def free_when_gone(self, delivery: Delivery) -> None:
        """The child with this delivery is being killed, and may still clean up: free its lock when it is gone."""
        with self._mutex.lock:
            if (child := self._at(delivery)) is not None:
                child.hold(has_ended=True)

    def forget(self, delivery: Delivery, within: float) -> bool:
        """Forget the child that was lost with `delivery`, once it is gone.

        Returns:
            False if it is still there after so many seconds.
        """
        with self._mutex.lock:
            child = self._at(delivery)
        if child is not None and child.pidfd is not None and not _poll([child.pidfd], within):
            self.free_when_gone(delivery)
            return False
        with self._mutex.lock:
            if child in self._children:
                self._children.remove(child)
                child.close()
        return True

    def close(self) -> None:
        """The worker ends: end the thread once the last child is gone."""
        self._closed = True
        self._news.give()

    def _at(self, delivery: Delivery) -> _Child | None:
        """The child that has this delivery; None if it is gone, or has the next one."""
        return next((child for child in self._children if child.is_at(delivery)), None)

    def _run(self) -> None:
        while not self._has_ended():
            try:
                self._wait()
                self._free_for_the_dead()
                self._renew()
            except Exception:
                # Whatever it was, the other children's locks depend on this thread.
                logger.exception("children: unexpected error; going on")
                clock.sleep(RETRY_AFTER)

    def _has_ended(self) -> bool:
        with self._mutex.lock:
            if has_ended := self._closed and not self._children:
                self._thread = None
            return has_ended

    def _wait(self) -> None:
        with self._mutex.lock:
            pidfds = [child.pidfd for child in self._children if child.pidfd is not None]
            self._sleeps = not any(child.is_busy for child in self._children)
        _poll([self._news.descriptor, *pidfds], None if self._sleeps else LOOK)
        self._news.take()

    def _free_for_the_dead(self) -> None:
        with self._mutex.lock:
            dead = [child for child in self._children if child.is_over]
            self._children = [child for child in self._children if child not in dead]
        for child in dead:
            child.close()
            if (hold := child.hold()) is not None:
                free(self._store, hold, self._journal)

    def _renew(self) -> None:
        now = clock.now()
        with self._mutex.lock:
            pairs = [(child, hold) for child in self._children if (hold := child.due(now)) is not None]
        if not pairs:
            return
        holds = [hold for _, hold in pairs]
        try:
            renewed = self._store.renew(holds, timeout=trust.step_of(min(hold.ttl for hold in holds)))
        except LockUnavailable as error:
            self._outage.failed(error)
            return  # The next look tries again.
        self._outage.answered()
        with self._mutex.lock:
            for (child, hold), is_held in zip(pairs, renewed, strict=True):
                # A child that has freed its lock has stopped: it may still store its end, and send what follows.
                if is_held and child in self._children:
                    child.renewed(hold, now)


def free(store: Store, run: RunHold, journal: JournalWriter) -> None:
    """Free the lock of a process that is gone, if the process still has it.

    The lock is abandoned rather than freed: what the process sent with its last breath may arrive after this.
    """
    freed = store.abandon(run)
    if freed is None:
        logger.warning("%s could not be freed yet: no answer from %s; trying again", run.key, store.server)
    elif freed:
        journal.add(crash(run.task, run.key, run.holder, limit=run.limit))
        whose = f": {run}" if is_of_run(run.holder) else ""
        key = with_label(run.key, run.holder.label)
        logger.warning("%s: freed for a process that ended without freeing it%s", key, whose)


def _open(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if the platform has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        # It is gone already: this pipe is readable at once, since its other end is closed.
        readable, other = os.pipe()
        os.close(other)
        return readable
    except OSError:
        return None


def _poll(descriptors: list[int], seconds: float | None) -> list[int]:
    """The descriptors that are readable, or become so within that many seconds."""
    # Rounded up: a thread that wakes just before something is due would look again and again. Zero stays zero: such a
    # caller does not wait.
    ready = _poller(descriptors).poll(None if seconds is None else math.ceil(seconds * 1000))
    return [descriptor for descriptor, _ in ready]


def _poller(descriptors: list[int]) -> select.poll:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll
