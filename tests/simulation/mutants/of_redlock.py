"""Faults of the Redlock."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_SCRIPTS = "stores/redis/scripts/lock"
_mutant = partial(Mutant, kind="nodes")
_redlock = partial(_mutant, file="stores/redis/redlock/store.py")
_votes = partial(_mutant, file="stores/redis/redlock/commands.py")
_put_back = partial(_mutant, file=f"{_SCRIPTS}/put_back.lua")

MUTANTS = (
    _mutant(
        "a node without memory votes",
        f"{_SCRIPTS}/vote.lua",
        "  if since < tonumber(ttl) and",
        "  if since < 0 and",
        "one at a time, whichever nodes forget",
    ),
    _mutant(
        "less than a majority is enough",
        "stores/redis/redlock/nodes.py",
        "self.quorum = len(servers) // 2 + 1",
        "self.quorum = len(servers) // 2",
        "one at a time",
    ),
    _mutant(
        "a fence is not raised",
        f"{_SCRIPTS}/raise_fence.lua",
        "  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])\n",
        "",
        "fences grow",
    ),
    _mutant(
        "a wake-up of a Redlock is lost",
        f"{_SCRIPTS}/wake.lua",
        "redis.pcall('RPUSH', KEYS[1], 2)",
        "0",
        "the end of a hold wakes a waiter",
    ),
    _put_back(
        "put back without a look at what was given up",
        old="if redis.call('EXISTS', lock, over) == 0 then",
        new="if redis.call('EXISTS', lock) == 0 then",
        breaks="nothing comes back of an owner that has freed",
    ),
    _put_back(
        "put back over another's hold",
        old="if redis.call('EXISTS', lock, over) == 0 then",
        new="if redis.call('EXISTS', over) == 0 then",
        breaks="one at a time",
    ),
    _put_back(
        "put back without end",
        old="redis.call('SET', lock, value, 'PX', ttl)",
        new="redis.call('SET', lock, value)",
        breaks="each key has a time to live",
    ),
    _mutant(
        "any refusal is taken back",
        f"{_SCRIPTS}/take_back.lua",
        "if redis.call('GET', KEYS[1]) == ARGV[1] then",
        "if redis.call('EXISTS', KEYS[1]) == 1 then",
        "one message, one end",
    ),
    _votes(
        "memory is not asked for",
        old="memory_ms=ms(MEMORY_TTL) if memory else 0,",
        new="memory_ms=0,",
        breaks="one at a time, whichever nodes forget",
    ),
    _votes(
        "freed without giving up",
        old="hold, owner, record=record, reservation=reservation, over=(owner,), over_for=over_for, wakes=False",
        new="hold, owner, record=record, reservation=reservation, wakes=False",
        breaks="nothing comes back of an owner that has freed",
    ),
    _votes(
        "undone for all attempts",
        old="return lock_commands.ending(hold, attempt, over=(attempt,), wakes=False)",
        new="return lock_commands.ending(hold, stem(attempt), over=(attempt,), wakes=False)",
        breaks="an attempt that was given up does not touch the next",
    ),
    _votes(
        "undone without a name",
        old="return lock_commands.ending(hold, attempt, over=(attempt,), wakes=False)",
        new="return lock_commands.ending(hold, attempt, wakes=False)",
        breaks="what arrives late of an attempt takes nothing",
    ),
    _redlock(
        "a failed attempt is not undone",
        old="        conversation.send(commands.undo(hold, attempt), maybe, repeat_for=max(wanted.ttl, REPEAT_FOR))\n",
        new="",
        breaks="a failed attempt is taken back",
    ),
    _redlock(
        "an attempt that was not answered is not undone",
        old="if index not in not_granted]",
        new="if index in answers and index not in not_granted]",
        breaks="a failed attempt is taken back",
    ),
    _redlock(
        "trusted from the answers of a majority",
        old="return wanted.lease(fence=fence, sent_at=sent_at, slot=slot)",
        new="return wanted.lease(fence=fence, sent_at=clock.now(), slot=slot)",
        breaks="trust counts from sending",
    ),
    _redlock(
        "renewed from the answers of a majority",
        old="                    hold.extend(sent_at)",
        new="                    hold.extend(clock.now())",
        breaks="trust counts from sending",
        unseen="an answer is waited for a twentieth of the ttl, and the lease is given up a third of it before its end",
    ),
    _redlock(
        "any fence is given out",
        old="if fences.count(fence) >= quorum:",
        new="if fences:",
        breaks="fences grow",
    ),
    _redlock(
        "renewed where one node has it",
        old="            hold: ours >= self._nodes.quorum\n",
        new="            hold: ours > 0\n",
        breaks="a lease that is trusted is kept by a majority",
    ),
    _redlock(
        "put back what no majority has",
        old="if not ours and renewed.get(hold) and hold.slot is not None",
        new="if not ours and hold.slot is not None",
        breaks="a hold comes back only where a majority has it",
    ),
    _redlock(
        "nobody is woken by a majority",
        old="if FreeAnswer.SOMEBODY_WAITS in answers.values():",
        new="if FreeAnswer.SOMEBODY_WAITS not in (2,):",
        breaks="the end of a hold wakes a waiter",
    ),
    _redlock(
        "refused without a promise",
        old="refuse(key, holder, each, slots=slots, promise=promise if is_promised else None)",
        new="refuse(key, holder, record, slots=slots)",
        breaks="one message, one end",
    ),
    _redlock(
        "refused by a minority",
        old="if kinds.count(Answer.GRANTED) < self._nodes.quorum:",
        new="if kinds.count(Answer.GRANTED) < 1:",
        breaks="one message, one end",
    ),
    _redlock(
        "freed by a minority",
        old="if ours + gone >= self._nodes.quorum:\n                # Gone",
        new="if ours + gone >= 1:\n                # Gone",
        breaks="what was not freed is said again",
    ),
    _redlock(
        "an end is not repeated",
        old="repeat_for = max(hold.ttl, REPEAT_FOR) if repeats else 0.0",
        new="repeat_for = 0.0",
        breaks="what was not freed is said again",
    ),
)
