"""Faults of copies that wait in line for a lock, in workers' main processes."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_line = partial(Mutant, file="worker/line.py", kind="lines")
_wake_ups = partial(Mutant, file="stores/redis/wake_ups.py", kind="lines")
_request = partial(Mutant, file="worker/request.py", kind="lines")
_celery = partial(Mutant, file="_celery.py", kind="lines")

MUTANTS = (
    _line(
        "a wake-up that one process has no use for reaches another one",
        old="            if request is None:\n                self._unused.append(partial(self._pass_on, freed))",
        new="",
    ),
    _line(
        "a worker that ends leaves the line",
        old="        self._wake_ups.leave()\n        # The loop may",
        new="        # The loop may",
    ),
    _line(
        "a message in line is found again after an error of the server",
        old="                self._failures += 1\n                if isinstance",
        new="                return\n                if isinstance",
    ),
    _wake_ups(
        "the message that has waited longest begins first, in whichever worker",
        old="        if not older:\n            return freed._replace",
        new="        if older is not None:\n            return freed._replace",
    ),
    _request(
        "a message in line does not ask again and again",
        old="        return self._held_until or super().eta",
        new="        return super().eta",
    ),
    _request(
        "a message in line is held for its own time at most",
        old="                longest = min(HELD, longest_delay(self.app.conf))",
        new="                longest = 7200.0",
    ),
    Mutant(
        "a message that is put back keeps its place in line",
        "task/message.py",
        "        return min(self.since or math.inf, clock.wall())",
        "        return clock.wall()",
        kind="lines",
    ),
    _celery(
        "a message of a lost connection to the broker does not begin",
        old="        if not entry.canceled and entry.args and",
        new="        if entry.args and",
    ),
    _celery(
        "a busy worker leaves the wake-up to one that has room",
        old="    return len(worker_state.reserved_requests) < (pool.num_processes or 1)",
        new="    return True",
    ),
)
