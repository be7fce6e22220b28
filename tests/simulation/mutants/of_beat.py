"""Faults of beat."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_claims = partial(Mutant, file="beat/claims.py", kind="beats")
_ticks = partial(Mutant, file="beat/ticks.py", kind="beats")

MUTANTS = (
    _claims(
        "a beat goes on where another one has stopped",
        old="            self._ledger.record(self._unrecorded, self._owner, ceiling=_ceiling())\n",
        new="",
    ),
    _ticks(
        "a tick has one id, whichever beat sends it",
        old="{self.entry}\\n{self.due}",
        new="{self.entry}\\n{now()}",
    ),
    _ticks(
        "every 10 s means every 10.000 s",
        old="return Tick(entry.name, last, due, due, following)",
        new="return Tick(entry.name, last, due, present, following)",
    ),
    Mutant(
        "no beat sends a tick that another one has sent",
        "stores/redis/scripts/ledger/claim.lua",
        "if known and known > tonumber(last) and known <= tonumber(ceiling) then",
        "if known and known < 0 then",
        kind="beats",
    ),
    Mutant(
        "one beat at a time has the claim of a tick",
        "stores/redis/scripts/ledger/claim.lua",
        "if redis.call('EXISTS', tombstone) == 1 or claimer and claimer ~= owner then",
        "if redis.call('EXISTS', tombstone) == 1 then",
        kind="beats",
    ),
    Mutant(
        "a tick that the broker did not take is sent again",
        "beat/claiming.py",
        "        self._following.last_run_at = entry.last_run_at\n",
        "",
        kind="beats",
    ),
    Mutant(
        "a beat that has ended in order is shown no more",
        "beat/scheduler.py",
        "            self._presence.end()\n",
        "",
        kind="beats",
    ),
)
