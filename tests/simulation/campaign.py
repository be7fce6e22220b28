"""Many seeds, dealt out to processes one by one. One that crashes or hangs fails with the seed that it had."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any

from tests.simulation.figures import Figures, Outcome
from tests.simulation.plan import draw

#: Seconds of real time after which a simulation hangs: a hundred times what the slowest takes.
HANGS = 120.0

#: Processes begin anew, without the code and the patches of this one.
_processes = get_context("spawn")


@dataclass(eq=False)
class _Hand:
    """A process that simulates, and the seed that it has."""

    process: Any
    pipe: Any
    seed: int | None = None
    since: float = 0.0

    def give(self, seed: int) -> None:
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
    """Simulate seeds, until they or the minutes are over."""
    began, figures = time.monotonic(), Figures(jobs=jobs)
    left = _until(iter(seeds), None if minutes is None else began + minutes * 60)
    hands = [_hire(nodes) for _ in range(jobs)]
    try:
        while hands:
            for hand in [hand for hand in hands if hand.seed is None]:
                seed = next(left, None)
                if seed is None:
                    hands.remove(hand)
                    _dismiss(hand)
                else:
                    hand.give(seed)
            for outcome in _next(hands, nodes, hangs):
                figures.add(outcome)
                on_outcome(outcome)
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


def _hire(nodes: int | None) -> _Hand:
    pipe, other = _processes.Pipe()
    process = _processes.Process(target=_simulate, args=(other, nodes), daemon=True)
    process.start()
    other.close()
    return _Hand(process, pipe)


def _dismiss(hand: _Hand) -> None:
    hand.pipe.close()
    hand.process.join()


def _next(hands: list[_Hand], nodes: int | None, hangs: float) -> Iterator[Outcome]:
    """What has come of some; those that come no more are replaced."""
    there = connection.wait([hand.pipe for hand in hands], timeout=1.0)
    for hand in list(hands):
        assert hand.seed is not None
        ended = None
        if hand.pipe in there:
            try:
                yield hand.pipe.recv()
                hand.seed = None
                continue
            except EOFError:
                hand.process.join()
                ended = f"the simulation's process crashes: exit code {hand.process.exitcode}"
        elif time.monotonic() - hand.since > hangs:
            ended = f"the simulation hangs for {hangs:g} s"
        if ended is not None:
            hand.process.kill()
            hands[hands.index(hand)] = _hire(nodes)
            yield Outcome(hand.seed, ended)


def _simulate(pipe: Any, nodes: int | None) -> None:
    """What each process does."""
    from tests.simulation import simulate

    simulate.prepare()
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
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
                faults=tuple(fault.kind for fault in plan.faults),
            )
        )
