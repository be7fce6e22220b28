"""When something that takes its time is excused, since a fault is under way or has only just ended."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tests.simulation.plan import Fault

#: Seconds after a fault in which nothing has to happen at once; and after one that lets messages take two.
AFTERMATH, OF_SLOW = 1.5, 3.5

#: Seconds for which a link holds requests back, and those after which whoever sent one has given it up and said so.
HOLDS_BACK, GIVEN_UP = 2.0, 4.0

#: Faults that delay nothing once they have happened.
HARMLESS = ("delivered again", "acknowledgement lost", "wall clock set", "out of order", "broker cut", "broker deaf")
BRIEF = (*HARMLESS, "child killed", "worker killed", "child killed at an end")


def is_there(world: Any, *, but: Collection[str] = HARMLESS) -> bool:
    """Whether a fault, or what comes of it, is an excuse; those of some kinds are none."""
    now = world.run.now
    return any(fault.at <= now < _is_over(fault) for fault in world.plan.faults if fault.kind not in but)


def _is_over(fault: Fault) -> float:
    if fault.kind == "requests held back":
        # What arrives when it is over must not matter.
        return fault.at + HOLDS_BACK + GIVEN_UP
    return fault.at + fault.seconds + (OF_SLOW if fault.kind == "slow" else AFTERMATH)
