"""Many seeds, distributed to processes one by one. If a process crashes or hangs, its seed fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, get_context
from typing import Any

from tests.simulation.figures import Figures, Outcome
from tests.simulation.plan import draw

#: Seconds of real time after which a simulation counts as hanging, and its process ends: a hundred times what the
#: slowest one takes.
HANGS = 120.0

#: What a process sends before it takes a seed.
READY = None

#: Processes start afresh, without the code and the patches of this process.
_processes = get_context("spawn")


@dataclass(eq=False)
class _Hand:
    """A process that simulates, and its present or next seed."""

    process: Any
    pipe: Any
    seed: int

    def heard(self) -> Outcome | None:
        """The outcome of its seed, if it says one."""
        try:
            said: Outcome | None = self.pipe.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            how = "hangs" if code == -signal.SIGALRM else f"crashes: exit code {code}"
            return Outcome(self.seed, f"the simulation's process {how}")
        if said is READY:
            self.pipe.send(self.seed)
        return said


def carry_out(
    seeds: Iterable[int],
    *,
    jobs: int,
    nodes: int | None = None,
    minutes: float | None = None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Figures:
    """Simulate seeds until there are no more, or the minutes are over."""
    began, figures = time.monotonic(), Figures(jobs=jobs)
    left = _until(iter(seeds), None if minutes is None else began + minutes * 60)
    hands = {hand.pipe: hand for hand in (_hire(seed, nodes) for seed in islice(left, jobs))}
    try:
        while hands:
            for pipe in connection.wait([*hands]):
                hand = hands.pop(pipe)  # type: ignore[call-overload]
                if (outcome := hand.heard()) is not None:
                    figures.add(outcome)
                    on_outcome(outcome)
                    hand = _next(hand, next(left, None), nodes)
                if hand is not None:
                    hands[hand.pipe] = hand
    finally:
        for hand in hands.values():
            hand.process.kill()
    figures.minutes = (time.monotonic() - began) / 60
    return figures


def _until(seeds: Iterator[int], end: float | None) -> Iterator[int]:
    for seed in seeds:
        if end is not None and time.monotonic() > end:
            return
        yield seed


def _hire(seed: int, nodes: int | None) -> _Hand:
    pipe, other = _processes.Pipe()
    process = _processes.Process(target=_simulate, args=(other, nodes), daemon=True)
    process.start()
    other.close()
    return _Hand(process, pipe, seed)


def _next(hand: _Hand, seed: int | None, nodes: int | None) -> _Hand | None:
    """Who goes on with the next seed: the same process, or another one if that has ended; None if there is no seed."""
    if hand.process.exitcode is not None:
        return None if seed is None else _hire(seed, nodes)
    hand.pipe.send(seed)
    return None if seed is None else _Hand(hand.process, hand.pipe, seed)


def _simulate(pipe: Any, nodes: int | None) -> None:
    """The main function of each process: simulate until there is no seed."""
    from tests.simulation import simulate

    simulate.prepare()
    pipe.send(READY)
    while (seed := pipe.recv()) is not None:
        signal.setitimer(signal.ITIMER_REAL, HANGS)
        began = time.process_time()
        plan = draw(seed, nodes=nodes)
        result = simulate.simulate(plan)
        numbers = {
            "seconds": result.seconds,
            "cpu": time.process_time() - began,
            "switches": result.switches,
            "messages": len(plan.messages),
            "bodies": result.bodies,
        }
        pipe.send(Outcome(seed, result.failure, numbers, result.counts))
