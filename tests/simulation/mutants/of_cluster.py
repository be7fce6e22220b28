"""Faults of clients of a cluster whose slots move."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_cluster = partial(Mutant, file="stores/redis/cluster.py")

MUTANTS = (
    _cluster(
        "what is answered ASK is sent to the other node with ASKING",
        old="(moving.host or address[0], moving.port), True",
        new="(moving.host or address[0], moving.port), False",
    ),
    _cluster(
        "a moved slot is followed",
        old="                address, asking = self._learn(moved, address), False\n",
        new="                raise\n",
    ),
    _cluster(
        "a renewal goes to where the slot is by then",
        old="            if isinstance(answers[index], AskError):  # Or a MovedError",
        new="            if False:  # Or a MovedError",
    ),
)
