"""Stops the running body of a task, in a way that depends on the pool.

- prefork and solo: a signal to the main thread, which runs the body. It interrupts blocking calls as well.
- threads, and solo on Windows: an asynchronous exception, which arrives with the thread's next bytecode (not within a
  blocking call).
- gevent and eventlet: the exception is thrown into the body's greenlet at its next switch.

Each raises `Aborted` in the body, leaves it half of its grace to clean up, and raises again until the body ends. A
prefork child that goes on after its grace is killed. In the other pools that would kill other tasks too, so there the
worker only logs it, as critical.

When the body has ended, whatever else would interrupt its message comes too late, and is dropped: a soft time limit,
which is a signal, too. So what follows the body is written once, as if nothing could interrupt it. Within the body of
another task, it may be meant for that one, and comes again when the inner one has ended (`pass_on`).

Protocol: `docs/protocol.md`, section 5.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, TracebackType
from typing import Any
from weakref import ref

from celery.exceptions import Ignore, Retry
from celery.utils.log import get_logger

from celery_singleton_lock import clock, trust
from celery_singleton_lock._celery import current_task, innermost_request, is_child_of_a_pool
from celery_singleton_lock.errors import Aborted
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.task.message import RequestLike

logger = get_logger(__name__)

#: Interrupts the main thread. Celery's own soft time limit uses it in the same way, and still works. None on Windows.
_SIGNAL: Any = getattr(signal, "SIGUSR1", None)

#: Of all bodies, each of which has it for moments. A signal's handler may interrupt who has it, and run a task itself.
_mutex = Mutex(threading.RLock)

#: Seconds for which a process that is to be killed may try to log that.
LAST_WORDS = 0.05


class Body:
    """The body of one execution while it runs: `with Body(lease, request): ...`.

    The heartbeat's thread calls `interrupt`; the thread that runs the body calls everything else. The mutex decides
    which of them comes first: nothing is raised in a thread whose body has ended.

    Attributes:
        request: a weak reference to its message's request.
        interrupted: whether it was asked to end.
        is_spared: whether nothing is raised in it now (see `sending`).
        sent: the exception that ends it, even if `Aborted` has overtaken it: the next attempt, or a replacement, was
            sent.
    """

    def __init__(self, lease: Lease, request: RequestLike) -> None:
        self.request = ref(request)
        self.interrupted = False
        self.is_spared = False
        self.sent: Retry | Ignore | None = None
        self._lease = lease
        self._interrupted_at = 0.0
        self._strike_again_at = 0.0
        self._outlived_grace = False
        self._running = False
        self._way = _way_of_this_thread()

    def __enter__(self) -> Body:
        self._running = True
        self._way.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """The body has ended: raise nothing more in it, see `protect`. May be called again, if it was interrupted as it
        began.
        """
        while True:
            try:
                with _mutex.lock:
                    # First: what is on its way must find a body that runs, or one that is protected.
                    self._way.leave(self)
                    self._running = False
                return
            except Aborted:
                # It was on its way when the body ended. Now that it has arrived, no other can follow.
                continue

    @property
    def wants_abort(self) -> bool:
        return self.interrupted and self._running and not self.is_spared

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Neither raise anything nor kill while the next attempt, or a replacement, is sent: nobody could tell whether
        it was sent.
        """
        with _mutex.lock:
            self.is_spared = True
        try:
            yield
        except (Retry, Ignore) as sent:
            self.sent = sent
            raise
        finally:
            self.is_spared = False

    def interrupt(self) -> None:
        """Make the body end: raise `Aborted` in it, and kill its process if that does not help in time."""
        with _mutex.lock:
            if not self._running:
                return
            now, grace = clock.now(), self._lease.ttl * trust.GRACE_SHARE
            if not self.interrupted or self.is_spared:
                self.interrupted, self._interrupted_at = True, now
            elif now - self._interrupted_at >= grace and not self._outlived_grace:
                self._outlived_grace = True
                _kill_this_child(self._lease)
            if now >= self._strike_again_at and not self.is_spared:
                self._strike_again_at = now + grace / 2
                self._way.interrupt(self)


class _Way(ABC):
    def enter(self, body: Body) -> None:  # noqa: B027 - most ways need nothing here
        """The body begins."""

    def leave(self, body: Body) -> None:  # noqa: B027
        """The body has ended; may be called again."""

    @abstractmethod
    def interrupt(self, body: Body) -> None:
        """Raise `Aborted` in the body."""


class _BySignal(_Way):
    """In the main thread. The handler runs in the same thread, so it sees at once whether the body has ended."""

    def __init__(self) -> None:
        self._bodies: list[Body] = []
        self._previous: Any = None
        #: The last request whose message is not to be interrupted any more.
        self._protected: Callable[[], RequestLike | None] = lambda: None
        #: Whether a signal was kept from an inner task that may be meant for an outer one.
        self._is_held_back = False

    def enter(self, body: Body) -> None:
        self._listen()
        self._bodies.append(body)

    def leave(self, body: Body) -> None:
        self._protected = body.request
        if body in self._bodies:
            self._bodies.remove(body)

    def protect(self, request: RequestLike) -> None:
        self._listen()
        self._protected = ref(request)

    def pass_on(self) -> None:
        if self._is_held_back and threading.current_thread() is threading.main_thread():
            self._is_held_back = False
            signal.raise_signal(_SIGNAL)

    def _listen(self) -> None:
        current = signal.getsignal(_SIGNAL)
        if current != self._on_signal:
            self._previous = current
            signal.signal(_SIGNAL, self._on_signal)

    def interrupt(self, body: Body) -> None:
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, _SIGNAL)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if any(body.wants_abort for body in self._bodies):
            raise Aborted
        if any(body.interrupted and body.is_spared for body in self._bodies):
            return  # It was on its way to a body that is spared now.
        protected, task = self._protected(), current_task()
        is_late = protected is not None and task is not None and innermost_request(task) is protected
        if is_late and is_child_of_a_pool():  # Elsewhere the signal means something else.
            logger.debug("a soft time limit comes too late: it is decided how its message ends")
            self._is_held_back = protected is not None and protected.is_eager is True
            return
        if callable(self._previous):
            self._previous(signum, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)


class _ByAsyncException(_Way):
    """In any other thread."""

    def __init__(self) -> None:
        self._thread = ctypes.c_ulong(threading.get_ident())

    def leave(self, body: Body) -> None:
        if not body.interrupted:
            return
        # An exception may still be on its way. If it were cleared, the interpreter would look for it at every bytecode
        # until another comes (CPython up to 3.12). So send one, which replaces any other, and catch it here.
        try:
            while self._send():
                clock.sleep(0)
        except Aborted:
            return

    def interrupt(self, body: Body) -> None:
        self._send()

    def _send(self) -> bool:
        """Send it; whether the thread still exists."""
        return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(Aborted)))


class _ByThrow(_Way):
    """In a greenlet.

    Args:
        greenlet: it runs the body.
        schedule: makes the greenlets' hub call a function with arguments soon; may be called from any thread.
    """

    def __init__(self, greenlet: Any, schedule: Callable[..., Any]) -> None:
        self._greenlet = greenlet
        self._schedule = schedule

    def interrupt(self, body: Body) -> None:
        self._schedule(self._throw, body)

    def _throw(self, body: Body) -> None:
        if body.wants_abort:
            self._greenlet.throw(Aborted)


_by_signal = _BySignal()


def protect(request: RequestLike) -> None:
    """Have nothing interrupt what follows the body of this request's message, or takes its place.

    That lasts as long as this thread carries out the message. Only signals would interrupt it: in other pools nobody
    has a soft time limit, and what ends a greenlet ends its process's part in the message, too.
    """
    if _way_of_this_thread() is _by_signal:
        _by_signal.protect(request)


def pass_on() -> None:
    """An inner task has ended: the soft time limit of an outer one strikes now if it came after the inner body."""
    _by_signal.pass_on()


def _way_of_this_thread() -> _Way:
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        gevent = sys.modules["gevent"]
        return _ByThrow(gevent.getcurrent(), gevent.get_hub().loop.run_callback_threadsafe)
    patcher: Any = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        eventlet = sys.modules["eventlet"]
        return _ByThrow(eventlet.getcurrent(), partial(eventlet.hubs.get_hub().schedule_call_global, 0))
    if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
        return _by_signal
    return _ByAsyncException()


def _kill_this_child(lease: Lease) -> None:
    why = "its lock is lost" if lease.reason is not None else "it is superseded"
    kills = is_child_of_a_pool()
    then = "killing its process" if kills else "this pool cannot kill it"
    # It may hang as it logs, and nobody else can log then. And the heartbeat's thread has other bodies to stop.
    words = "%s: the task does not end although %s; %s"
    saying = threading.Thread(target=logger.critical, args=(words, lease.key, why, then), daemon=True)
    try:
        saying.start()
        if kills:
            saying.join(LAST_WORDS)
    finally:
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
