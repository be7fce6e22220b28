"""Faults of copies that wait in line for a lock, in workers' main processes."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_line = partial(Mutant, file="worker/line.py", kind="lines")
_script = partial(Mutant, file="stores/redis/scripts/lock/line.lua", kind="lines")
_request = partial(Mutant, file="worker/request.py", kind="lines")
_celery = partial(Mutant, file="_celery.py", kind="lines")

MUTANTS = (
    _line(
        "a wake-up that one process has no use for reaches another one",
        old="                self._unused.append(key)\n",
        new="",
    ),
    _line(
        "a worker that ends leaves the line",
        old="            for key in [*self._copies]:\n                self._leave(key)\n",
        new="",
    ),
    _line(
        "a message in line is found again after an error of the server",
        old="            self._look_soon([*self._copies], 0.0)\n",
        new="            self._copies.clear()\n",
    ),
    _script(
        "the message that has waited longest begins first, in whichever worker",
        old="redis.pcall('ZRANGE', waiting, 0, MANY)",
        new="redis.pcall('ZRANGE', waiting, -1, -1)",
    ),
    _script(
        "a waiter that is gone is not woken again and again",
        old="math.min(at, time - LIVE_MS + COMES_MS)",
        new="time",
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
