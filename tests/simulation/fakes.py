"""What the package imports instead of the standard library: threads, clocks, sockets, pipes and signals of the
simulation.

Each module here is made once, and asks `simulation()` for the present run. Outside of any task (while the package is
loaded, or when a test inspects something), operations complete at once without waiting.
"""

from __future__ import annotations

import os
import random
import select
import selectors
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import Empty
from types import ModuleType
from typing import Any

from greenlet import getcurrent

from tests.simulation.network import Socket, descriptors
from tests.simulation.scheduler import Deadlock, Ended, Process, Task, active, simulation


def _task() -> Task | None:
    """The task that runs here; None outside of any task."""
    run = active()
    if run is None:
        return None
    if run.over:
        raise Ended
    task = run.current
    return task if task is not None and getcurrent() is task.greenlet else None


def _own_task() -> Task:
    task = _task()
    if task is None:
        raise Deadlock("only a simulated process has that, or can wait for it")
    return task


def _process() -> Process:
    return _own_task().process


class Lock:
    """`threading.Lock`."""

    def __init__(self) -> None:
        self._locked = False
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._locked:
            self._locked = True
            return True
        if not blocking:
            return False
        return self._wait(timeout)

    def _wait(self, timeout: float) -> bool:
        run = simulation()
        until = None if timeout < 0 else run.now + timeout
        while self._locked:
            task = _own_task()
            self._waiters.append(task)
            woken = False
            try:
                woken = run.park(None if until is None else until - run.now)
            finally:
                if task in self._waiters:
                    self._waiters.remove(task)
            if not woken:
                return False
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        if self._waiters:
            simulation().wake(self._waiters.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """`threading.RLock`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Any = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = getcurrent()
        if self._owner is me:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        if self._owner is not getcurrent():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def let_go(self) -> int:
        """Release it completely; returns how often it was taken."""
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def take_again(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = getcurrent(), count

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: deque[Task] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = _own_task()
        self._waiters.append(task)
        count = self._lock.let_go()
        try:
            return simulation().park(timeout)
        finally:
            if task in self._waiters:
                self._waiters.remove(task)
            self._lock.take_again(count)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        ends_at = None if timeout is None else simulation().now + timeout
        while not (is_so := predicate()):
            left = None if ends_at is None else ends_at - simulation().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return is_so

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            simulation().wake(self._waiters.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._condition, self._set = Condition(), False

    def set(self) -> None:
        with self._condition:
            self._set = True
            self._condition.notify_all()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        with self._condition:
            if not self._set:
                self._condition.wait(timeout)
            return self._set


class Thread:
    """`threading.Thread`: a task of the process that starts it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or "thread", daemon
        self.task: Task | None = None
        self._over = Event()

    def start(self) -> None:
        self.task = simulation().spawn(_process(), self._run, self.name)
        self.task.thread = self  # type: ignore[attr-defined]

    def _run(self) -> None:
        try:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)
        finally:
            run = active()
            if run is not None and not run.over:
                self.task.done = True  # type: ignore[union-attr]
                self._over.set()

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done and self.task.process.alive

    def join(self, timeout: float | None = None) -> None:
        if self.is_alive():
            self._over.wait(timeout)

    @property
    def ident(self) -> int | None:
        return None if self.task is None else self.task.number


class _MainThread(Thread):
    def __init__(self, task: Task) -> None:
        super().__init__(name="MainThread")
        self.task = task


def current_thread() -> Any:
    task = _task()
    return threading.current_thread() if task is None else _thread_of(task)


def main_thread() -> Any:
    task = _task()
    is_there = task is not None and task.process.main is not None
    return _thread_of(task.process.main) if is_there else threading.main_thread()  # type: ignore[union-attr]


def _thread_of(task: Any) -> Any:
    """Its thread; a main thread is made when it is asked for."""
    if not hasattr(task, "thread"):
        task.thread = _MainThread(task)
    return task.thread


def get_ident() -> int:
    task = _task()
    return 0 if task is None else task.number


class local:
    """`threading.local`: it has a separate `__dict__` for each task."""

    __slots__ = ("__dict__", "_made_with")

    def __new__(cls, *args: Any, **kwargs: Any) -> local:
        self = object.__new__(cls)
        object.__setattr__(self, "_made_with", (args, kwargs))
        return self

    def _turn(self) -> None:
        # Stored on the greenlet: a module's `local` outlives simulations, and would keep their threads.
        its = vars(getcurrent()).setdefault("locals", {})
        is_new = self not in its
        object.__setattr__(self, "__dict__", its.setdefault(self, {}))
        if is_new:
            args, kwargs = object.__getattribute__(self, "_made_with")
            type(self).__init__(self, *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        local._turn(self)
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        local._turn(self)
        object.__setattr__(self, name, value)


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._condition = Condition()

    def put(self, item: Any) -> None:
        with self._condition:
            self._items.append(item)
            self._condition.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            if not self._items and block:
                self._condition.wait(timeout)
            if not self._items:
                raise Empty
            return self._items.popleft()


class finalize(weakref.finalize):  # type: ignore[type-arg]
    """`weakref.finalize`. Its registry belongs to the interpreter: it would keep whole simulations alive."""

    __slots__ = ()

    def __init__(self, it: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(it, function, *args, **kwargs)
        run = active()
        if run is not None:
            run.at_close.append(self.detach)


def _module(name: str, of: ModuleType | None = None, **parts: Any) -> ModuleType:
    """A module like `of`, with some parts replaced."""
    made = ModuleType(name)
    if of is not None:
        made.__dict__.update({name: part for name, part in vars(of).items() if not name.startswith("__")})
    made.__dict__.update(parts)
    return made


# The clocks


def _clock() -> float:
    task = _task()
    return 0.0 if task is None else task.process.host.clock(simulation().now)


def _wall() -> float:
    task = _task()
    if task is None:
        run = active()
        return 1_700_000_000.0 + (run.now if run else 0.0)
    return task.process.host.wall_clock(simulation().now)


def sleep(seconds: float) -> None:
    """`time.sleep`."""
    simulation().park(seconds)


# Processes


def process_here(pid: int) -> Process | None:
    """The living process of this host that has this pid."""
    alive = (it for it in simulation().processes if it.os_pid == pid and it.alive and it.host is _process().host)
    return next(alive, None)


def _kill(pid: int, signum: int) -> None:
    run, process = simulation(), process_here(pid)
    if process is None:
        raise ProcessLookupError(pid)
    if signum == signal.SIGKILL:
        run.kill(process)
    elif signum:
        run.signal(process, signum)


def _pthread_kill(_: int, signum: int) -> None:
    simulation().signal(_process(), signum)


def _raise_signal(signum: int) -> None:
    """For a main thread, where its handler runs at once."""
    run = simulation()
    run.signal(_process(), signum)
    run.yield_now()


def _signal(signum: int, handler: Any) -> Any:
    handlers = _process().handlers
    previous, handlers[signum] = handlers.get(signum, signal.SIG_DFL), handler
    return previous


def _getsignal(signum: int) -> Any:
    return _process().handlers.get(signum, signal.SIG_DFL)


class _PythonApi:
    @staticmethod
    def PyThreadState_SetAsyncExc(thread: Any, error: Any) -> int:
        number = getattr(thread, "value", thread)
        for task in simulation().tasks:
            if task.number == number and not task.done:
                simulation().throw(task, error)
                return 1
        return 0


class _Chance:
    """`random.SystemRandom`: from the seed."""

    def randrange(self, *args: int) -> int:
        return simulation().rng.randrange(*args)

    def uniform(self, a: float, b: float) -> float:
        return simulation().rng.uniform(a, b)


def _randbytes(count: int) -> bytes:
    run = active()
    return run.rng.randbytes(count) if run is not None else b"\0" * count


def _ready(it: Any) -> int:
    """The events of what is at a descriptor; each of them, if that is closed."""
    reads, writes = it is None or it.readable, it is None or getattr(it, "writable", False)
    return selectors.EVENT_READ * reads | selectors.EVENT_WRITE * writes


class _Selector:
    """`selectors.DefaultSelector`."""

    def __init__(self) -> None:
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, it: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(it, it.fileno(), events, data)
        self._keys[key.fd] = key
        return key

    def unregister(self, it: Any) -> selectors.SelectorKey:
        fd = next(fd for fd, key in self._keys.items() if key.fileobj is it)
        return self._keys.pop(fd)

    def modify(self, it: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self.unregister(it)
        return self.register(it, events, data)

    def close(self) -> None:
        self._keys.clear()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        wait_for(list(self._keys), timeout, lambda: bool(self._there()))
        return self._there()

    def _there(self) -> list[tuple[selectors.SelectorKey, int]]:
        found = ((key, key.events & _ready(descriptors().get(fd))) for fd, key in self._keys.items())
        return [(key, events) for key, events in found if events]


def wait_for(fds: list[int], timeout: float | None, is_there: Callable[[], bool]) -> None:
    """Wait until a condition is true; look again whenever something happens to the descriptors."""
    run = simulation()
    if is_there() or timeout == 0:
        return
    until = None if timeout is None else run.now + timeout
    task = _own_task()
    while not is_there():
        its = [it for fd in fds if (it := descriptors().get(fd)) is not None]
        for it in its:
            it.watchers.append(task)
        try:
            woken = run.park(None if until is None else max(until - run.now, 0.0))
        finally:
            for it in its:
                if task in it.watchers:
                    it.watchers.remove(task)
        if not woken:
            return


class _Poll:
    """`select.poll`, for descriptors that become readable."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def register(self, fd: int, events: int = 0) -> None:
        self._fds.append(fd)

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        timeout = None if milliseconds is None else milliseconds / 1000
        wait_for(self._fds, timeout, lambda: bool(self._there()))
        return self._there()

    def _there(self) -> list[tuple[int, int]]:
        its = descriptors()
        return [(fd, select.POLLIN) for fd in self._fds if fd not in its or its[fd].readable]


class Pipe:
    """The reading end of a pipe, and its contents."""

    def __init__(self) -> None:
        self.content = b""
        self.watchers: list[Task] = []
        self.is_over = False
        self.writer: int | None = None

    @property
    def readable(self) -> bool:
        return bool(self.content) or self.is_over

    def wake(self) -> None:
        for task in list(self.watchers):
            simulation().wake(task)


#: Bytes that fit into a pipe.
PIPE = 65536


def _pipe() -> tuple[int, int]:
    its, pipe = descriptors(), Pipe()
    reader, pipe.writer = its.add(pipe), its.add(pipe)
    return reader, pipe.writer


def _close(fd: int) -> None:
    it = descriptors().pop(fd)
    if isinstance(it, Pipe) and fd == it.writer:
        it.is_over = True
        it.wake()


def _write(fd: int, data: bytes) -> int:
    pipe = descriptors()[fd]
    if len(pipe.content) + len(data) > PIPE:
        raise BlockingIOError("the pipe is full")
    pipe.content += data
    pipe.wake()
    return len(data)


def _read(fd: int, count: int) -> bytes:
    pipe = descriptors()[fd]
    if not pipe.content and not pipe.is_over:
        raise BlockingIOError("the pipe is empty")
    data, pipe.content = pipe.content[:count], pipe.content[count:]
    return data


def _pidfd_open(pid: int) -> int:
    process = process_here(pid)
    if process is None:
        raise ProcessLookupError(pid)
    end = Pipe()

    def over() -> None:
        end.is_over = True
        end.wake()

    process.at_end.append(over)
    return descriptors().add(end)


def _getpid() -> int:
    try:
        task = _task()
    except Ended:  # A connection that is collected afterwards asks whose it is.
        return 0
    return 0 if task is None else task.process.os_pid


MODULES: dict[str, ModuleType] = {
    "threading": _module(
        "threading",
        threading,
        Lock=Lock,
        RLock=RLock,
        Condition=Condition,
        Event=Event,
        Thread=Thread,
        local=local,
        current_thread=current_thread,
        main_thread=main_thread,
        get_ident=get_ident,
    ),
    "time": _module(
        "time",
        time,
        time=_wall,
        monotonic=_clock,
        clock_gettime=lambda _: _clock(),
        sleep=sleep,
    ),
    "os": _module(
        "os",
        os,
        getpid=_getpid,
        kill=_kill,
        pipe=_pipe,
        read=_read,
        write=_write,
        close=_close,
        set_blocking=lambda *_: None,
        pidfd_open=_pidfd_open,
        register_at_fork=lambda **_: None,
        urandom=_randbytes,
    ),
    "random": _module("random", random, SystemRandom=_Chance),
    "secrets": _module("secrets", None, token_hex=lambda count=32: _randbytes(count).hex()),
    "select": _module("select", select, poll=_Poll),
    "selectors": _module("selectors", selectors, DefaultSelector=_Selector, PollSelector=_Selector),
    "signal": _module(
        "signal",
        signal,
        signal=_signal,
        getsignal=_getsignal,
        pthread_kill=_pthread_kill,
        raise_signal=_raise_signal,
    ),
    "_signal": _module("_signal", None, getsignal=_getsignal),
    "socket": _module("socket", socket, gethostname=lambda: _process().host.name, socket=Socket),
    "weakref": _module("weakref", weakref, finalize=finalize),
    "queue": _module("queue", None, SimpleQueue=SimpleQueue, Empty=Empty),
    # A simulated process does not end with the interpreter.
    "atexit": _module("atexit", None, register=lambda it, *_, **__: it, unregister=lambda _: None),
}
MODULES["ctypes"] = _module(
    "ctypes", None, pythonapi=_PythonApi, py_object=lambda it: it, c_ulong=lambda number: number
)
