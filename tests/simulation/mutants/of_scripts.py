"""Faults of the server scripts."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_SCRIPTS = "stores/redis/scripts/lock"
_renew = partial(Mutant, file=f"{_SCRIPTS}/renew.lua")
_free = partial(Mutant, file=f"{_SCRIPTS}/free.lua")
_acquire = partial(Mutant, file=f"{_SCRIPTS}/acquire.lua")
_holds = partial(Mutant, file=f"{_SCRIPTS}/holds.lua")
_grant = partial(Mutant, file=f"{_SCRIPTS}/grant.lua")
_refuse = partial(Mutant, file=f"{_SCRIPTS}/refuse.lua")

MUTANTS = (
    _renew(
        "nobody renews another's lock",
        old="hold_of(lock, owner)",
        new="hold_of(lock, '')",
    ),
    _renew(
        "a renewal never brings back a lock that has ended",
        old="  if value then",
        new="  value = value or redis.call('SET', lock, owner, 'PX', ttl) and owner\n  if value then",
    ),
    _renew(
        "a holder learns from its renewal that its lock is gone",
        old="renewed[i] = 0",
        new="renewed[i] = 1",
    ),
    _free(
        "what has run is remembered, also when its lock is gone",
        old="if record_ms ~= '0' then\n  -- Even",
        new="if ours and record_ms ~= '0' then\n  -- Even",
    ),
    _free(
        "nobody frees another's lock",
        old="hold_of(lock, owner)",
        new="hold_of(lock, '')",
    ),
    _free(
        "an end never changes",
        old="local repeated, reserved, reserved_ms = ARGV[5] or '0', ",
        new="local repeated, reserved, reserved_ms = '0', ",
    ),
    _free(
        "no lock is kept for a message that never comes",
        old="(done_of_next == done or redis.call('EXISTS', done_of_next) == 0)",
        new="true",
    ),
    _acquire(
        "what arrives late of an owner that has ended takes nothing",
        old="is_given_up and not hold_of(lock, owner) then",
        new="false then",
    ),
    Mutant(
        "an earlier try that comes last takes nothing",
        f"{_SCRIPTS}/request.lua",
        "again = ARGV[16] or '', ARGV[17] == '1'",
        "again = ARGV[16] or '', false",
        nodes=1,
        kind="locks",
    ),
    _acquire(
        "no body runs again after its end",
        old="if checks_finished then",
        new="if false then",
    ),
    _acquire(
        "a repeated acquire meets no conflict with itself",
        old="  if token == owner then",
        new="  if token == owner and limit < 0 then",
        kind="locks",
    ),
    _acquire(
        "one execution at a time",
        old="elseif in_use < limit then",
        new="elseif in_use < limit or first_pttl < ttl / 2 then",
    ),
    _acquire(
        "no more than its limit allows run beside an execution",
        old="local in_use, replaced, takes = held,",
        new="local in_use, replaced, takes = limit > 1 and held - 1 or held,",
        kind="locks",
    ),
    _holds(
        "the holds of several last as long as each is renewed",
        old="  if last then",
        new="  if false then",
        kind="locks",
    ),
    _acquire(
        "two copies of a message never run at the same time",
        old="if copy or newer and not kept then",
        new="if newer and not kept then",
    ),
    _acquire(
        "a lock that is kept for a retry is given to nobody else",
        old="elseif reserved_as ~= '' and token == reserved_as then",
        new="elseif string.find(value, '\"\",0.0]', 1, true) then",
    ),
    _grant(
        "fencing tokens grow, whatever the server's clock says",
        old="    number = highest + 1\n",
        new="",
        nodes=3,
    ),
    Mutant(
        "every key has a time to live",
        "stores/redis/scripts/lock/line.lua",
        old="  redis.call('PEXPIRE', waiting, KEPT_MS)\n",
        new="",
    ),
    _refuse(
        "no refusal is recorded while a copy of the message runs",
        old="  if is_copy then",
        new="  if is_copy and retries == '?' then",
    ),
    _refuse(
        "no refusal is recorded after the message has ended",
        old="elseif type(known) == 'string' and string.match(known, PROMISED) ~= record then",
        new="elseif known == '' then",
        kind="joined",
    ),
)
