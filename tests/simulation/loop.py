"""The event loop of a worker's main process: its events, kombu's timer, and the descriptors that it reads."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from kombu.asynchronous.timer import Entry, Timer

from tests.simulation.network import descriptors
from tests.simulation.scheduler import Host, Simulation, Task


class _Numbered(Entry):  # type: ignore[misc]
    """An entry with a number: of two entries due at one time, kombu would take the one that is first in memory."""

    __slots__ = ("number",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.number = 0

    def __lt__(self, other: Any) -> bool:
        return bool(self.number < other.number)


class _Timer(Timer):  # type: ignore[misc]
    """Kombu's timer, on the steady clock of a host."""

    Entry = _Numbered

    def __init__(self, run: Simulation, host: Host) -> None:
        super().__init__(on_error=_raise)
        self._run, self._host = run, host
        self._numbers = count()
        #: Called with each entry and its due time on that clock.
        self.on_entry: Callable[[Any, float], None] = lambda *_: None

    def call_at(self, eta: float, fun: Any, args: Any = (), kwargs: Any = None, priority: int = 0) -> Any:
        """Call at a time of the present wall clock."""
        entry = self.Entry(fun, args, kwargs)
        entry.number = next(self._numbers)
        now = self._run.now
        due = eta - self._host.wall_clock(now) + self._host.clock(now)
        self.on_entry(entry, due)
        return self._enter(due, priority, entry)

    @property
    def entries(self) -> list[Any]:
        """The entries that are still to come."""
        return [scheduled.entry for scheduled in self._queue if not scheduled.entry.canceled]

    def left(self) -> float | None:
        """Seconds until the next entry; None if there is none."""
        return self._queue[0].eta - self._host.clock(self._run.now) if self._queue else None

    def due(self) -> Any:
        """The next entry that is due; None if there is none."""
        while (left := self.left()) is not None and left <= 0:
            entry = heapq.heappop(self._queue).entry
            if not entry.canceled:
                return entry
        return None


class Loop:
    """Runs until it is told to end. For `Line.register`, it is the hub."""

    def __init__(self, run: Simulation, host: Host) -> None:
        self.run = run
        self.timer = _Timer(run, host)
        #: Whether entries of the timer are still to be started.
        self.is_open = True
        self._events: deque[Callable[[], None]] = deque()
        self._readers: dict[int, Callable[[], None]] = {}
        self._asleep: Task | None = None

    def post(self, event: Callable[[], None]) -> None:
        """Let it handle an event."""
        self._events.append(event)
        if self._asleep is not None:
            self.run.wake(self._asleep)

    def add_reader(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Let it call `callback` while there is something to read."""
        self._readers[descriptor] = callback

    def turn(self) -> None:
        """Handle an event, or wait for one."""
        its = descriptors()
        if self._events:
            self._events.popleft()()
        elif self.is_open and (read := [call for fd, call in self._readers.items() if its[fd].readable]):
            for call in read:
                call()
        elif self.is_open and (entry := self.timer.due()) is not None:
            self.timer.apply_entry(entry)
        else:
            self._wait()

    def _wait(self) -> None:
        task = self._asleep = self.run.current
        read = [descriptors()[fd] for fd in self._readers] if self.is_open else []
        for it in read:
            it.watchers.append(task)
        left = self.timer.left() if self.is_open else None
        try:
            self.run.park(None if left is None else max(left, 0.0))
        finally:
            self._asleep = None
            for it in read:
                it.watchers.remove(task)


def _raise(error: BaseException) -> None:
    raise error
