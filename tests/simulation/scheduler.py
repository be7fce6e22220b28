"""Which task of which process runs next, and what time it is: all decided by one seed, and nothing sleeps.

A task of the simulation is a thread of a simulated process, as a greenlet. It runs until it waits (`park`), or until it
is preempted at one of the points that `loading` puts before each statement. Events at a certain time (a message that
arrives, a timeout, a fault) are in a heap; when no task can run, the time becomes that of the first event.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from math import log
from typing import Any

from greenlet import getcurrent, greenlet

#: Longest time, in seconds, until a task that can run does so.
SWITCH = 0.00002

#: Turns of tasks after which a simulation counts as looping: a hundred times what the longest one takes.
TURNS = 300_000


class Ended(BaseException):
    """Raised in the remaining tasks when a simulation is over. No code of the product may swallow it."""


class Deadlock(Exception):
    """Something waits outside of any task: nothing could wake it."""


@dataclass(eq=False)
class Host:
    """A machine with its own clocks.

    Attributes:
        rate: seconds that its steady clock counts in a true second.
        steady: the steady clock at the beginning.
        wall: seconds by which the wall clock is ahead of the true time.
        identity: its name and its boot id.
    """

    name: str
    rate: float = 1.0
    steady: float = 1000.0
    wall: float = 0.0
    identity: str = ""
    suspended: bool = False

    def clock(self, now: float) -> float:
        """The steady clock."""
        return self.steady + now * self.rate

    def wall_clock(self, now: float) -> float:
        """The wall clock, seconds since the epoch."""
        return EPOCH + self.wall + now * self.rate


#: The wall clock at the beginning.
EPOCH = 1_700_000_000.0


@dataclass(eq=False)
class Process:
    """A process of a host, with a copy of the package that no other living process has.

    Attributes:
        pid: its own; `os_pid` may be that of a process of the host that is dead by now.
    """

    host: Host
    pid: int
    name: str
    package: Any
    os_pid: int
    #: Whether it is a process of a pool.
    is_child: bool = False
    parent: Process | None = None
    #: Until when it was last stopped, or its host suspended.
    frozen_until: float = float("-inf")
    alive: bool = True
    stopped: bool = False
    main: Task | None = None
    #: Tasks that could run if the process were not stopped.
    held_up: list[Task] = field(default_factory=list)
    #: Called when it ends in any way: for sockets, pipes and tasks that wait for its end.
    at_end: list[Callable[[], None]] = field(default_factory=list)
    handlers: dict[int, Any] = field(default_factory=dict)
    #: The ids of the messages that it began with, and which attempts.
    had: set[tuple[str, int]] = field(default_factory=set)

    @property
    def runs(self) -> bool:
        return not (self.stopped or self.host.suspended)

    @property
    def is_well(self) -> bool:
        return self.alive and self.runs


class Task:
    """A thread of a simulated process."""

    def __init__(self, simulation: Simulation, process: Process, function: Callable[[], None], name: str) -> None:
        self.simulation, self.process, self.name = simulation, process, name
        self.number = simulation.next_number()
        self.done = False
        self.waits = 0  # The number of its waits: a late timeout belongs to an earlier wait.
        self.parked = False
        #: Whether it was woken; False after a timeout, None while it waits.
        self.woken: bool | None = None
        #: Exceptions to raise in it at its next point; and signals for a main thread.
        self.thrown: list[type[BaseException]] = []
        self.signals: list[int] = []
        #: The message that it carries out, if it is a thread of a pool: as it was delivered.
        self.delivered: dict[str, Any] | None = None
        self._function = function
        # When it ends, its parent continues: not the task that started it, whose process may be dead by then.
        self.greenlet = greenlet(self._run, simulation.hub)

    def _run(self) -> None:
        try:
            self._function()
        except Ended:
            pass
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever a thread ends with is to be seen
            self.simulation.broke(self, error)
        self.done = True

    def __repr__(self) -> str:
        return f"{self.process.name}/{self.name}"


class Simulation:
    """One run.

    Args:
        seed: decides everything.
        interval: statements of the package between two preemptions, on average.
    """

    def __init__(self, seed: int, *, interval: float = 60.0) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self._rate = 1.0 / interval
        self.until_preempted = 0
        self.current: Task | None = None
        self.over = False
        self.trace: list[tuple[float, str, str, str]] = []
        self.processes: list[Process] = []
        self.tasks: list[Task] = []
        self.ready: list[Task] = []
        self.switches = 0
        #: Called whenever time is about to advance, to check what must hold at every moment.
        self.watch: list[Callable[[], None]] = []
        #: When the checkers look next that do not always do.
        self.looks_at: dict[Callable[[Any], None], float] = {}
        #: Called when it is over.
        self.at_close: list[Callable[[], object]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        self.hub = getcurrent()
        self.failure: str | None = None
        self.is_finished = False
        #: How often each rule was judged, each kind of fault struck, and each excuse held.
        self.judged, self.struck, self.excused = Counter[str](), Counter[str](), Counter[str]()

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def note(self, what: str, detail: str = "", *, by: str | None = None) -> None:
        """Write a line of the trace."""
        who = by if by is not None else (repr(self.current) if self.current else "world")
        self.trace.append((self.now, who, what, detail))

    def must(self, holds: object, rule: str, *found: object) -> None:
        """Count that a rule was judged, and fail if it does not hold.

        Args:
            rule: what is wrong otherwise, with a place for each thing found; the rule's name in `judged`. It is always
                a literal, so that a rule that is never judged is known, too.
        """
        self.judged[rule] += 1
        if not holds:
            self.fail(rule.format(*found))

    def strikes(self, fault: str) -> None:
        """A fault of this kind has struck something."""
        self.struck[fault] += 1

    def fail(self, what: str) -> None:
        """A promise is broken; the first one counts."""
        if self.failure is None:
            self.failure = what
            self.note("BROKEN", what, by="checker")

    def broke(self, task: object, error: BaseException) -> None:
        """A thread, or the checker, ended with an uncaught error."""
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        self.fail(
            f"{task} died of {type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        )

    # Time

    def at(self, when: float, function: Callable[[], None]) -> None:
        """Call `function` at a time, outside of any task."""
        self._numbers += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._numbers, function))

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call `function` after this many true seconds."""
        self.at(self.now + seconds, function)

    # Tasks

    def spawn(self, process: Process, function: Callable[[], None], name: str) -> Task:
        """Start a new thread of a process."""
        task = Task(self, process, function, name)
        self.tasks.append(task)
        self._may_go_on(task)
        return task

    def park(self, seconds: float | None = None) -> bool:
        """Let the current task wait until it is woken, or some seconds of its host; returns whether it was woken."""
        task = self._own()
        task.waits += 1
        task.woken, task.parked = None, True
        if seconds is not None:
            turn = task.waits
            self.after(max(seconds, 0.0) / task.process.host.rate, partial(self._time_out, task, turn))
        try:
            while task.woken is None:
                self._leave()
                if task.signals:
                    self._handle_signals(task)
        finally:
            task.parked = False
        if task.thrown:
            raise task.thrown.pop(0)
        return task.woken

    def wake(self, task: Task) -> None:
        """End the waiting of a task."""
        if task.parked and task.woken is None:
            task.woken = True
            self._may_go_on(task)

    def yield_now(self) -> None:
        """Let other tasks run first."""
        task = self._own()
        self._may_go_on(task)
        self._leave()
        if task.signals:
            self._handle_signals(task)
        if task.thrown:
            raise task.thrown.pop(0)

    def point(self) -> None:
        """Called before a statement: from time to time, the task is preempted here."""
        task = self.current
        if task is None or getcurrent() is not task.greenlet:
            return
        # As `rng.expovariate`, in half the time.
        self.until_preempted = int(-log(1.0 - self.rng.random()) / self._rate) + 1
        if self.ready or (self._heap and self._heap[0][0] <= self.now) or not self._may_stay(task):
            self.yield_now()
        else:
            self._take_a_turn(task)

    def _may_stay(self, task: Task) -> bool:
        """Whether it would run next, and find everything unchanged."""
        return task.process.alive and task.process.runs and not (self.over or task.signals or task.thrown)

    def signal(self, process: Process, signum: int) -> None:
        """Send a signal to the main thread of a process."""
        main = process.main
        if main is None or main.done or not process.alive:
            return
        main.signals.append(signum)
        if main.parked and main.woken is None:
            self._may_go_on(main)  # Its system call is interrupted.

    def _handle_signals(self, task: Task) -> None:
        while task.signals:
            signum = task.signals.pop(0)
            handler = task.process.handlers.get(signum)
            if callable(handler):
                handler(signum, None)

    def throw(self, task: Task, error: type[BaseException]) -> None:
        """Raise an exception in a task at its next statement."""
        task.thrown[:] = [error]

    def _own(self) -> Task:
        if self.over:
            raise Ended
        task = self.current
        if task is None or getcurrent() is not task.greenlet:
            raise Deadlock("something waits outside of any task")
        return task

    def _time_out(self, task: Task, turn: int) -> None:
        if task.parked and task.waits == turn and task.woken is None:
            task.woken = False
            self._may_go_on(task)

    def _may_go_on(self, task: Task) -> None:
        process = task.process
        if not process.alive:
            return
        waiting = process.held_up if process.stopped or process.host.suspended else self.ready
        if task not in waiting:
            waiting.append(task)

    def _take_a_turn(self, task: Task) -> None:
        self.now += self.rng.random() * SWITCH
        self.switches += 1
        if self.switches > TURNS:
            self.fail(f"{task} and others go on forever")

    def _leave(self) -> None:
        task = self.current
        self.hub.switch()
        if self.over:
            raise Ended
        self.current = task

    # Processes

    def start(self, process: Process, function: Callable[[], None], name: str = "main") -> Process:
        """Start a new process whose main thread calls `function`."""
        self.processes.append(process)
        process.main = self.spawn(process, function, name)
        self.note("starts", by=process.name)
        return process

    def kill(self, process: Process) -> None:
        """End a process between two statements: none of its tasks runs any more."""
        if not process.alive:
            return
        process.alive = False
        self.note("is killed", by=process.name)
        self.ready = [task for task in self.ready if task.process is not process]
        process.held_up.clear()
        for at_end in process.at_end:
            at_end()
        if self.current is not None and self.current.process is process and getcurrent() is self.current.greenlet:
            self._leave()  # And never come back.

    def stop(self, process: Process) -> None:
        """SIGSTOP."""
        if process.alive and not process.stopped:
            process.stopped = True
            self.note("is stopped", by=process.name)
            self._hold_up(process)

    def go_on(self, process: Process) -> None:
        """SIGCONT."""
        if process.alive and process.stopped:
            process.stopped = False
            self.note("goes on", by=process.name)
            self._resume(process)

    def suspend(self, host: Host) -> None:
        """The host sleeps, but its clock goes on."""
        host.suspended = True
        self.note("is suspended", by=host.name)
        for process in self.processes:
            if process.host is host:
                self._hold_up(process)

    def resume(self, host: Host) -> None:
        """The host wakes up."""
        host.suspended = False
        self.note("is resumed", by=host.name)
        for process in self.processes:
            if process.host is host:
                self._resume(process)

    def _hold_up(self, process: Process) -> None:
        for task in [task for task in self.ready if task.process is process]:
            self.ready.remove(task)
            process.held_up.append(task)

    def _resume(self, process: Process) -> None:
        if process.runs:
            held_up, process.held_up = process.held_up, []
            for task in held_up:
                self._may_go_on(task)

    # The hub

    def run(self, until: float) -> None:
        """Run until that time, until nothing is left to do, or until a promise is broken."""
        rng, heap = self.rng, self._heap
        while self.failure is None and not self.is_finished:
            while heap and heap[0][0] <= self.now:
                heapq.heappop(heap)[2]()
            if ready := self.ready:
                task = ready.pop(int(rng.random() * len(ready)) if len(ready) > 1 else 0)
                self._take_a_turn(task)
                if self.failure is not None:
                    return
                self.current = task
                task.greenlet.switch()
                self.current = None
            elif heap:
                for watch in self.watch:
                    watch()
                if heap[0][0] > until:
                    self.now = until
                    return
                self.now = heap[0][0]
            else:
                return

    def close(self) -> None:
        """End all tasks: their `finally` blocks run, but can change nothing any more."""
        self.over = True
        for task in self.tasks:
            if not task.done and task.greenlet:
                for _ in range(100):  # Even if the task catches it.
                    if task.greenlet.dead:
                        break
                    with suppress(BaseException):
                        task.greenlet.throw(Ended)
        self.tasks.clear()
        for at_close in self.at_close:
            at_close()


#: The simulation that is under way.
_current: list[Simulation] = []


def every(seconds: float) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """A checker's look, which it takes only so often, since it takes long."""

    def seldom(look: Callable[[Any], None]) -> Callable[[Any], None]:
        @wraps(look)
        def looks(checker: Any) -> None:
            run: Simulation = checker.run
            if run.now >= run.looks_at.get(looks, 0.0):
                run.looks_at[looks] = run.now + seconds
                look(checker)

        return looks

    return seldom


def simulation() -> Simulation:
    """The simulation that is under way."""
    return _current[-1]


def begin(new: Simulation) -> None:
    """Make `new` the simulation that is under way."""
    _current[:] = [new]


def active() -> Simulation | None:
    """The simulation that is under way; None if there is none."""
    return _current[-1] if _current else None
