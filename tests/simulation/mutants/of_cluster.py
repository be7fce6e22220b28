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
        old="    return (moved.host or asked[0]), moved.port",
        new="    return asked",
    ),
    _cluster(
        "a renewal goes to where the slot is by then",
        old="            self.learn(given, address)\n"
        "            answers.update(zip(indexes, given, strict=True))\n"
        "        return redirected([answers[index] for index in range(len(calls))], calls, "
        "partial(self.run, step=step))",
        new="            answers.update(zip(indexes, given, strict=True))\n"
        "        return [answers[index] for index in range(len(calls))]",
    ),
)
