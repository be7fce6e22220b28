"""Faults of the Redlock."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_SCRIPTS = "stores/redis/scripts/lock"
_mutant = partial(Mutant, kind="nodes")
_redlock = partial(_mutant, file="stores/redis/redlock.py")
_put_back = partial(_mutant, file=f"{_SCRIPTS}/put_back.lua")

MUTANTS = (
    _mutant(
        "a node that has lost its data has no vote for one ttl",
        f"{_SCRIPTS}/acquire.lua",
        "  if remembers < tonumber(ttl) and",
        "  if remembers < 0 and",
    ),
    _mutant(
        "a Redlock is held on a majority of its nodes",
        "stores/redis/nodes.py",
        "self.quorum = len(servers) // 2 + 1",
        "self.quorum = len(servers) // 2",
    ),
    _put_back(
        "no node gets a hold back whose owner has ended",
        old="if redis.call('EXISTS', lock, tombstone) == 0 then",
        new="if redis.call('EXISTS', lock) == 0 then",
    ),
    _redlock(
        "a failed attempt is undone where it was not answered, too",
        old="    is_silent = answer is None or isinstance(answer, Exception)",
        new="    is_silent = isinstance(answer, Exception)",
    ),
    _redlock(
        "most nodes of a Redlock have its token",
        old="if fences.count(fence) >= quorum:",
        new="if fences:",
    ),
    _mutant(
        "a Redlock is renewed on a majority, or lost",
        "stores/redis/common.py",
        "            hold: ours >= self._quorum\n",
        "            hold: ours > 0\n",
    ),
    _redlock(
        "a node gets a hold back only while a majority has it",
        old="if not ours and renewed.get(hold)]",
        new="if not ours]",
    ),
    _redlock(
        "no refusal is recorded beside a Redlock that is granted meanwhile",
        old="refuse(key, holder, promise))",
        new="refuse(key, holder, record))",
    ),
    _redlock(
        "a Redlock was gone only if most nodes say so",
        old="if ours + gone >= self._quorum:\n                # Gone",
        new="if ours + gone >= 1:\n                # Gone",
    ),
)
