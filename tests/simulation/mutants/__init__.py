"""Can the simulator find anything? Faults that are put into the package; it has to find each of them."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.mutants import (
    of_beat,
    of_cluster,
    of_line,
    of_lock,
    of_message,
    of_protocol,
    of_redlock,
    of_scripts,
    of_sending,
    of_sharing,
)
from tests.simulation.mutants.mutant import Mutant

#: The seed that found each mutant last.
SEEDS = Path(__file__).with_name("seeds.json")

MUTANTS: tuple[Mutant, ...] = (
    *of_scripts.MUTANTS,
    *of_redlock.MUTANTS,
    *of_protocol.MUTANTS,
    *of_lock.MUTANTS,
    *of_line.MUTANTS,
    *of_beat.MUTANTS,
    *of_sending.MUTANTS,
    *of_sharing.MUTANTS,
    *of_message.MUTANTS,
    *of_cluster.MUTANTS,
)
