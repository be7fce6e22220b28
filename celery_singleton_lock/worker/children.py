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

#: Seconds until a delivery is asked for its hold; most are over by then. No ttl is so short that a renewal would be due
#: earlier.
FIRST_CHECK = MIN_TTL * trust.RENEW_AFTER

#: The most seconds between two such questions: a delivery may never take a lock.
MAX_CHECK = 1.0

#: Renewals for which a superseded child may go on: until the first it may not know, and then it has a tenth of the ttl
#: before it kills itself.
PATIENCE = 2

#: Seconds until the next try after the store did not answer, or something went wrong.
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

    def hold(self) -> Hold | None:
        """Its hold, as far as is known yet; called under a mutex that others wait for."""


class _Child:
    """A child and the delivery that it carries out; the next delivery replaces the last."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = _open(pid)
        self._end = _poller([] if self.pidfd is None else [self.pidfd])
        self._delivery: weakref.ref[Delivery] | None = None
        self._hold: Hold | None = None
        self._renewed_at = 0.0
        self.interval = 0.0
        #: Renewals since its run was to stop for a newer task.
        self._waited = 0

    def carry_out(self, delivery: Delivery) -> None:
        # Weak: the delivery's arguments may be large, and a child may be idle for days.
        self._delivery, self._hold = weakref.ref(delivery), None
        self._renewed_at, self.interval, self._waited = clock.now(), FIRST_CHECK, 0

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, as far as this platform reports that."""
        return bool(self._end.poll(0))

    def is_at(self, delivery: Delivery) -> bool:
        return self._delivery is not None and self._delivery() is delivery

    @property
    def due_at(self) -> float:
        """When to renew next; infinite while it does nothing."""
        return self._renewed_at + self.interval if self._running() else float("inf")

    def looked_at(self, now: float) -> float:
        """When to look at it next, unless somebody wakes the thread before; infinite if it has done nothing for long.

        There is such a time even if it does nothing right now: otherwise each short delivery would wake the thread.
        """
        at = self._renewed_at + self.interval
        return at if at > now or self._running() else float("inf")

    def due(self, now: float) -> Hold | None:
        """Its hold if that is to be renewed now; this also sets the next time."""
        if self.due_at > now:
            return None
        if self._hold is None:
            hold = self.hold()
            if hold is None:
                self._renewed_at, self.interval = now, min(2 * self.interval, MAX_CHECK)
                return None
            self.interval = hold.ttl * trust.RENEW_AFTER
            if self.due_at > now:
                return None
        self.renew_after(self.interval)
        return self.hold()

    def hold(self) -> Hold | None:
        """The hold of what it carries out; None if it does nothing, or needs no lock."""
        self._note(self._running())
        return self._hold

    def keep_hold(self) -> None:
        """Remember the hold, although the delivery's end was reported."""
        self._note(self._delivery() if self._delivery else None)

    def renew_after(self, seconds: float) -> None:
        self._renewed_at = clock.now() + seconds - self.interval

    def stop_at_last(self, hold: Hold) -> None:
        """Its hold was renewed: kill it if it was to stop long ago, but has neither done so nor killed itself, because
        it is frozen, or in C code that lets no other thread run.
        """
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

    def _note(self, delivery: Delivery | None) -> None:
        """Remember the hold of a delivery, which may ask again under another owner, and has a place once taken."""
        hold, known = delivery.hold() if delivery is not None else None, self._hold
        if hold is not None and (known is None or known.owner != hold.owner):
            self._hold = hold

    def _running(self) -> Delivery | None:
        delivery = self._delivery() if self._delivery else None
        return delivery if delivery is not None and delivery.is_running else None


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
        self._children: dict[int, _Child] = {}
        #: Children that are gone, and whose pid another process has.
        self._succeeded: list[_Child] = []
        self._mutex = Mutex(threading.RLock)  # A cold shutdown's handler may have interrupted `assign`.
        self._thread: threading.Thread | None = None
        self._news = Pipe()
        self._outage = outage
        #: When the thread goes on by itself.
        self._wakes_at = 0.0
        self._closed = False

    def start(self) -> None:
        """Start the thread, which a child may need before the first delivery is assigned."""
        with self._mutex.lock:
            self._start_thread()

    def assign(self, pid: int, delivery: Delivery) -> None:
        """The child with this pid carries out `delivery` from now on."""
        with self._mutex.lock:
            child = self._children.get(pid)
            if child is not None and child.is_over:
                # The pid is used again: this is another process.
                self._succeeded.append(child)
                child = None
            if new := child is None:
                child = self._children[pid] = _Child(pid)
            child.carry_out(delivery)
            if not self._start_thread() and (new or self._succeeded or child.due_at < self._wakes_at):
                self._news.give()

    def free_when_gone(self, pid: int | None) -> None:
        """The child is being killed, and may still clean up: free its lock when it is gone."""
        with self._mutex.lock:
            if pid is not None and (child := self._children.get(pid)) is not None:
                child.keep_hold()

    def forget(self, pid: int, delivery: Delivery, within: float) -> bool:
        """Forget the child that was lost with `delivery`, once it is gone.

        Returns:
            False if it is still there after so many seconds.
        """
        with self._mutex.lock:
            child = self._children.get(pid)
        if child is not None and not child.is_at(delivery):
            return True  # Another process has its pid.
        if child is not None and child.pidfd is not None and not _poll([child.pidfd], within):
            self.free_when_gone(pid)
            return False
        with self._mutex.lock:
            if child is not None and self._children.get(pid) is child:
                del self._children[pid]
                child.close()
        return True

    def close(self) -> None:
        """The worker ends: end the thread once the last child is gone."""
        self._closed = True
        self._news.give()

    def _start_thread(self) -> bool:
        """Start the thread, under the mutex; False if it is there."""
        if self._thread is not None and self._thread.is_alive():
            return False
        self._thread = threading.Thread(target=self._run, name="singleton-lock-children", daemon=True)
        self._thread.start()
        return True

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
            pidfds = [child.pidfd for child in self._children.values() if child.pidfd is not None]
            now = clock.now()
            self._wakes_at = min((child.looked_at(now) for child in self._children.values()), default=float("inf"))
            seconds = self._wakes_at - now
        _poll([self._news.descriptor, *pidfds], None if seconds == float("inf") else max(seconds, 0.0))
        self._news.take()

    def _free_for_the_dead(self) -> None:
        with self._mutex.lock:
            watched = {child.pidfd: child for child in self._children.values() if child.pidfd is not None}
            dead = [watched[pidfd] for pidfd in _poll([*watched], 0.0)]
            for child in dead:
                del self._children[child.pid]
            dead += self._succeeded
            self._succeeded = []
            for child in dead:
                child.close()
        for child in dead:
            if (hold := child.hold()) is not None:
                free(self._store, hold, self._journal)

    def _renew(self) -> None:
        now, pairs = clock.now(), []
        with self._mutex.lock:
            for child in self._children.values():
                if (hold := child.due(now)) is not None:
                    pairs.append((child, hold))
        if not pairs:
            return
        holds = [hold for _, hold in pairs]
        try:
            renewed = self._store.renew(holds, timeout=trust.step_of(min(hold.ttl for hold in holds)))
        except LockUnavailable as error:
            self._outage.failed(error)
            for child, hold in pairs:
                child.renew_after(min(RETRY_AFTER, hold.ttl * trust.RETRY_SHARE))
            return
        self._outage.answered()
        with self._mutex.lock:
            for (child, hold), is_held in zip(pairs, renewed, strict=True):
                # A child that has freed its lock has stopped: it may still store its end, and send what follows.
                if is_held and self._children.get(child.pid) is child:
                    child.stop_at_last(hold)


def free(store: Store, hold: Hold, journal: JournalWriter) -> None:
    """Free the lock of a process that is gone, if the process still has it.

    The lock is abandoned rather than freed: what the process sent with its last breath may arrive after this.
    """
    freed = store.abandon(hold)
    if freed is None:
        logger.warning("%s could not be freed yet: no answer from %s; trying again", hold.key, store.server)
    elif freed:
        run = hold if isinstance(hold, RunHold) else RunHold(hold, Holder())
        journal.add(crash(run.task, hold.key, run.holder, limit=hold.limit))
        whose = f": {run}" if is_of_run(run.holder) else ""
        key = with_label(hold.key, run.holder.label)
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
