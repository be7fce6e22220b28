"""Faults of locks outside of tasks."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_lock = partial(Mutant, file="lock.py", kind="locks")

MUTANTS = (
    Mutant(
        "the end of a hold wakes the one that has waited longest",
        "stores/redis/scripts/lock/free.lua",
        "return somebody_waits and next_waiter(waiting, asked) or FREED",
        "return FREED",
        kind="locks",
    ),
    _lock(
        "on_lost is called when a lock is lost",
        old="if self._on_lost is not None:",
        new="if False:",
    ),
    _lock(
        "giving back a lost lock raises an error",
        old="if not freed or (freed == Freeing.UNCLEAR and not was_held):",
        new="if False:",
    ),
    _lock(
        "nobody waits for longer than was asked for",
        old="else clock.now() + patience",
        new="else clock.now() + 10 * patience",
    ),
)
