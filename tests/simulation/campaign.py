"""Many seeds, distributed to processes one by one. If a process crashes or hangs, its seed fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import connection, get_context
from typing import Any

from tests.simulation.figures import Figures, Outcome
from tests.simulation.plan import draw

#: Seconds of real time after which a simulation counts as hanging: a hundred times what the slowest one takes.
HANGS = 120.0

#: What a process sends before it takes a seed.
READY = None

#: Processes start afresh, without the code and the patches of this process.
_processes = get_context("spawn")


@dataclass(eq=False)
class _Hand:
    """A process that simulates.

    Attributes:
        seed: its present or next seed; None after the last one.
        since: when it got the seed; None while it gets ready.
    """

    process: Any
    pipe: Any
    seed: int | None
    since: float | None = None

    def give(self, seed: int | None) -> None:
        self.seed, self.since = seed, time.monotonic()
        self.pipe.send(seed)


def carry_out(
    seeds: Iterable[int],
    *,
    jobs: int,
    nodes: int | None = None,
    minutes: float | None = None,
    hangs: float = HANGS,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> Figures:
    """Simulate seeds until there are no more, or the minutes are over."""
    began, figures = time.monotonic(), Figures(jobs=jobs)
    left = _until(iter(seeds), None if minutes is None else began + minutes * 60)
    hands = [_hire(seed, nodes) for seed in islice(left, jobs)]
    try:
        while hands:
            there = connection.wait([hand.pipe for hand in hands], timeout=1.0)
            for hand in list(hands):
                outcome = _heard(hand, hangs, has_said=hand.pipe in there)
                if outcome is None:
                    continue
                figures.add(outcome)
                on_outcome(outcome)
                _go_on(hands, hand, next(left, None), nodes)
    finally:
        for hand in hands:
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


def _heard(hand: _Hand, hangs: float, *, has_said: bool) -> Outcome | None:
    """The outcome of its seed, if there is one."""
    assert hand.seed is not None
    if has_said:
        try:
            said = hand.pipe.recv()
        except EOFError:
            hand.process.join()
            return Outcome(hand.seed, f"the simulation's process crashes: exit code {hand.process.exitcode}")
        if said is not READY:
            return said
        hand.give(hand.seed)
    elif hand.since is not None and time.monotonic() - hand.since > hangs:
        hand.process.kill()
        hand.process.join()
        return Outcome(hand.seed, f"the simulation hangs for {hangs:g} s")
    return None


def _go_on(hands: list[_Hand], hand: _Hand, seed: int | None, nodes: int | None) -> None:
    """Go on with the next seed, in the same process, or in another one if that has ended."""
    is_over = hand.process.exitcode is not None
    if is_over or seed is None:
        hands.remove(hand)
    if is_over and seed is not None:
        hands.append(_hire(seed, nodes))
    elif not is_over:
        hand.give(seed)


def _simulate(pipe: Any, nodes: int | None) -> None:
    """The main function of each process: simulate until there is no seed."""
    from tests.simulation import simulate

    simulate.prepare()
    pipe.send(READY)
    while (seed := pipe.recv()) is not None:
        began = time.process_time()
        plan = draw(seed, nodes=nodes)
        result = simulate.simulate(plan)
        pipe.send(
            Outcome(
                seed,
                result.failure,
                seconds=result.seconds,
                cpu=time.process_time() - began,
                switches=result.switches,
                messages=len(plan.messages),
                bodies=result.bodies,
                counts=result.counts,
            )
        )
