"""Faults of locks outside of tasks."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_lock = partial(Mutant, file="lock/lock.py", kind="locks")

MUTANTS = (
    Mutant(
        "a lock outside of tasks wakes nobody",
        "stores/redis/scripts/lock/free.lua",
        "local length = redis.pcall('RPUSH', wake, 1)",
        "local length = 0",
        "the end of a hold wakes the one that has waited longest",
        kind="locks",
    ),
    Mutant(
        "a semaphore lets one more in",
        "lock/semaphore.py",
        "self._limit = limit",
        "self._limit = limit + 1",
        "never more than the limit",
        kind="locks",
    ),
    Mutant(
        "nobody is called when a lock is lost",
        "lock/holding.py",
        "if not self._is_lost:",
        "if False:",
        "a holder is told of its loss",
        kind="locks",
    ),
    _lock(
        "a lost lock is given back well",
        old="if freed != Freeing.NOW and not (was_held and (again or freed)):",
        new="if False:",
        breaks="giving back a lost lock raises an error",
    ),
    _lock(
        "a lock outside of tasks is not renewed",
        old="if self._renews:",
        new="if False:",
        breaks="a lock is kept while it is held",
    ),
    _lock(
        "a wait is ten times as long",
        old="else clock.now() + patience",
        new="else clock.now() + 10 * patience",
        breaks="nobody waits for longer than was asked for",
    ),
)
