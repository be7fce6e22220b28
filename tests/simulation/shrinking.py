"""Shrinks a plan that breaks a promise, as long as the same promise breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.figures import kind_of
from tests.simulation.plan import Plan

if TYPE_CHECKING:
    from tests.simulation.simulate import Result

#: Orders of events in which each smaller plan is tried: with one part less, the same seed gives another order.
ORDERS = 12

#: Statements between two preemptions, from never to often.
INTERVALS = (1e9, 1000.0, 200.0, 60.0)


def shrink(failed: Result, run: Callable[[Plan], Result], *, orders: int = ORDERS) -> Result:
    """The smallest plan found that fails in the same way, and its run."""
    assert failed.failure is not None
    kind = kind_of(failed.failure)
    smallest = failed
    while (smaller := _next(smallest.plan, kind, run, orders)) is not None:
        smallest = smaller
    return smallest


def _next(plan: Plan, kind: str, run: Callable[[Plan], Result], orders: int) -> Result | None:
    for smaller in _smaller(plan):
        for order in range(orders):
            result = run(replace(smaller, seed=plan.seed + order))
            if result.failure is not None and kind_of(result.failure) == kind:
                return result
    return None


def _smaller(plan: Plan) -> Iterator[Plan]:
    yield from plan.smaller()
    for interval in INTERVALS:
        if interval > plan.interval:
            yield replace(plan, interval=interval)
