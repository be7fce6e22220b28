"""Faults of beat."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_leader = partial(Mutant, file="beat/leader.py", kind="beats")
_claims = partial(Mutant, file="beat/claims.py", kind="beats")
_ticks = partial(Mutant, file="beat/ticks.py", kind="beats")

MUTANTS = (
    _leader(
        "a leader does not lose",
        old="        self._lease, self._owner = None, new_owner()\n\n    def _take_back",
        new="        self._owner = new_owner()\n\n    def _take_back",
        breaks="one beat leads",
    ),
    _leader(
        "a leader that ends keeps its lease",
        old="            self._store.free(lease)\n            logger.info",
        new="            logger.info",
        breaks="another beat takes over at once",
    ),
    _claims(
        "what beat sends is not recorded",
        old="            self._ledger.record(self._unrecorded, self._owner, ceiling=_ceiling())\n",
        new="",
        breaks="a new leader goes on where the old one was",
    ),
    _claims(
        "each beat has a secret of its own",
        old="self.secret = self._ledger.secret()",
        new="self.secret = self._owner",
        breaks="a tick has one id",
    ),
    _ticks(
        "a tick is named by when it is sent",
        old="{self.due}\\n{secret}",
        new="{now()}\\n{secret}",
        breaks="a tick has one id",
    ),
    _ticks(
        "ticks drift",
        old="return Tick(entry.name, last, due, due, following)",
        new="return Tick(entry.name, last, due, present, following)",
        breaks="every 10 s is every 10.000 s",
    ),
    Mutant(
        "a tick that the broker refused is forgotten",
        "beat/claiming.py",
        "            self._unsent[entry.name] = entry, tick\n",
        "",
        "a tick that the broker does not take is tried again",
        kind="beats",
    ),
)
