"""Faults of clients of a cluster whose slots move."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_cluster = partial(Mutant, file="stores/redis/cluster.py")

MUTANTS = (
    _cluster(
        "what is answered ASK is sent to the other node with ASKING",
        old="_target(moved, address), not isinstance(moved, MovedError)",
        new="_target(moved, address), False",
    ),
    _cluster(
        "a moved slot is followed",
        old="            except AskError as moved:  # Or a MovedError, which is one.\n",
        new="            except ZeroDivisionError as moved:\n",
    ),
    _cluster(
        "a renewal goes to where the slot is by then",
        old="        if isinstance(answer, AskError):  # Or a MovedError",
        new="        if False:  # Or a MovedError",
    ),
)
