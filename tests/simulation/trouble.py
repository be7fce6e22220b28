"""When a delay is excused, since a fault is under way or has just ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, ParamSpec

from tests.simulation.plan import Fault
from tests.simulation.scheduler import simulation

Asked = ParamSpec("Asked")

#: The names of all excuses.
EXCUSES: set[str] = set()

#: Seconds after a fault in which nothing has to happen at once; and after a fault that lets messages take two seconds.
AFTERMATH, OF_SLOW = 1.5, 3.5

#: Seconds after which the sender of a request that is held back has given up, and sent that.
GIVEN_UP = 4.0

#: Faults that delay nothing once they have happened.
HARMLESS = (
    *("delivered again", "acknowledgement lost", "wall clock set", "out of order", "broker cut", "broker deaf"),
    *("pids come again", "near", "far"),  # The plan's latency allows for these.
    *("cut at an end", "cut there at an end", "cut back at an end"),  # These begin when a body ends.
)
BRIEF = (
    *HARMLESS,
    "child killed",
    "worker killed",
    "worker ended",
    "child killed at an end",
    "child killed by SIGTERM",
    "beat killed as it sends",
)

#: Faults after which a process that resumes reaches the lock servers at once.
OF_WORKERS = ("host suspended", "worker stopped", "child stopped")

#: Faults of servers that concern all hosts.
OF_SERVERS = ("server stalled", "server restarted", "server restarted empty", "connections closed")


def excuse(function: Callable[Asked, object]) -> Callable[Asked, bool]:
    """Mark a function that says whether a rule need not hold; how often it says so is counted."""
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
    EXCUSES.add(name)

    @wraps(function)
    def is_excused(*args: Asked.args, **named: Asked.kwargs) -> bool:
        holds = bool(function(*args, **named))
        simulation().excused[name] += holds
        return holds

    return is_excused


@excuse
def is_there(world: Any, *, but: Collection[str] = HARMLESS) -> bool:
    """Whether a fault, or its aftermath, is an excuse now; faults of some kinds do not count."""
    return was_there(world, world.run.now, but=but)


@excuse
def is_held_back(world: Any) -> bool:
    """Whether a server may not know yet that a client is gone."""
    faults = [fault for fault in world.plan.faults if fault.kind == "requests held back"]
    return any(fault.at <= world.run.now < fault.at + fault.seconds + AFTERMATH for fault in faults)


@excuse
def was_there(world: Any, since: float, *, but: Collection[str] = HARMLESS) -> bool:
    """Whether there was an excuse at some time since then."""
    return last_end(world, but=but) > since


def last_end(world: Any, *, but: Collection[str] = HARMLESS) -> float:
    """When the last fault that has begun is over; before all times if there was none."""
    faults = [fault for fault in world.plan.faults if fault.kind not in but]
    times = [(fault.at, _is_over(fault)) for fault in faults]
    times += [(at, at + GIVEN_UP) for at in world.network.held_back_at]
    times += [(at, at + seconds + AFTERMATH) for at, seconds in world.ways_cut_at]
    return max((ends for begins, ends in times if begins <= world.run.now), default=float("-inf"))


def _is_over(fault: Fault) -> float:
    if fault.kind == "requests held back":
        return fault.at  # It matters to a sender at that time; late requests must not matter.
    return fault.at + fault.seconds + (OF_SLOW if fault.kind == "slow" else AFTERMATH)
