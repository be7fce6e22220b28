"""Faults of clients of a cluster whose slots move."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_cluster = partial(Mutant, file="stores/redis/cluster.py")

MUTANTS = (
    _cluster(
        "what is answered ASK is sent to the other node with ASKING",
        old="[command] if isinstance(answer, MovedError) else",
        new="[command] if answer else",
    ),
    _cluster(
        "a moved slot is followed",
        old="    return (moved.host or asked[0]), moved.port",
        new="    return asked",
    ),
    _cluster(
        "a renewal goes to where the slot is by then",
        old="call.understood(self._followed(one, call.by_text)) for",
        new="call.understood(one) for",
    ),
)
