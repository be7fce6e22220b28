"""Faults of the server scripts."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_SCRIPTS = "stores/redis/scripts/lock"
_renew = partial(Mutant, file=f"{_SCRIPTS}/renew.lua")
_free = partial(Mutant, file=f"{_SCRIPTS}/free.lua")
_end = partial(Mutant, file=f"{_SCRIPTS}/end.lua")
_acquire = partial(Mutant, file=f"{_SCRIPTS}/acquire.lua")
_grant = partial(Mutant, file=f"{_SCRIPTS}/grant.lua")
_hand_over = partial(Mutant, file=f"{_SCRIPTS}/hand_over.lua")
_handed = partial(Mutant, file=f"{_SCRIPTS}/handed.lua")
_refuse = partial(Mutant, file=f"{_SCRIPTS}/refuse.lua")
_ended = partial(Mutant, file=f"{_SCRIPTS}/ended.lua")

MUTANTS = (
    _renew(
        "renew without comparing the owner",
        old="if type(value) == 'string' and string.sub(value, 1, #owner) == owner then",
        new="if type(value) == 'string' then",
        breaks="nobody renews another's hold",
    ),
    _renew(
        "renew creates",
        old="local value = redis.pcall('GET', lock)",
        new="local value = redis.pcall('GET', lock) or redis.call('SET', lock, owner, 'PX', ttl) and owner",
        breaks="a renewal never creates a key",
    ),
    _renew(
        "renew always says yes",
        old="renewed[i] = 0",
        new="renewed[i] = 1",
        breaks="a holder hears that its lock is lost",
    ),
    _renew(
        "renew does nothing",
        old="renewed[i] = redis.call('PEXPIRE', lock, ttl)",
        new="renewed[i] = 1",
        breaks="a lease that is trusted is kept",
    ),
    _end(
        "free without comparing the owner",
        old="if type(value) == 'string' and string.sub(value, 1, #owner) == owner then",
        new="if type(value) == 'string' then",
        breaks="nobody frees another's hold",
    ),
    _end(
        "free deletes nothing",
        old="    redis.call('DEL', ours)\n",
        new="",
        breaks="the end of a run frees its lock",
    ),
    _end(
        "free forgets the last slot",
        old="for i = FIRST, FIRST + locks - 1 do",
        new="for i = FIRST, FIRST + locks - 2 do",
        breaks="the end of a run frees its lock",
    ),
    _free(
        "free wakes nobody",
        old="local length = redis.pcall('RPUSH', wake, 1)",
        new="local length = 0",
        breaks="the end of a hold wakes a waiter",
    ),
    _free(
        "free's wake-ups stay forever",
        old="  redis.call('PEXPIRE', wake, wake_ms)\n",
        new="",
        breaks="each key has a time to live",
    ),
    _free(
        "free leaves no record",
        old="  elseif not redis.call('SET', done, record, 'PX', record_ms, 'NX') then",
        new="  elseif redis.call('EXISTS', done) == 1 then",
        breaks="no body runs again after its end",
    ),
    _free(
        "free leaves a record without end",
        old="redis.call('SET', done, record, 'PX', record_ms, 'NX')",
        new="redis.call('SET', done, record, 'NX')",
        breaks="each key has a time to live",
    ),
    _free(
        "a record only where the hold is still there",
        old="if record_ms ~= '0' then\n  -- Even",
        new="if ours and record_ms ~= '0' then\n  -- Even",
        breaks="what ran has a record, also when its lock is gone",
    ),
    _end(
        "a late record overwrites a newer one",
        old="ARGV[6] or '0', ARGV[7] or '0'",
        new="ARGV[6] or '0', '0'",
        breaks="an end never changes",
    ),
    _free(
        "given up is not noted",
        old="  redis.call('SET', KEYS[i], 1, 'PX', over_ms)\n",
        new="",
        breaks="what arrives late of an owner that was given up takes nothing",
        kind="locks",
    ),
    _free(
        "no reservation",
        old="  redis.call('SET', ours, reserved, 'PX', reserved_ms)\n",
        new="",
        breaks="lock_retain_on_retry keeps the lock between two attempts",
    ),
    _free(
        "a reservation for a message that is done",
        old="(done_of_next == done\n"
        "    or redis.call('EXISTS', done_of_next) == 0 and not known_for(ended, more_of_next, name_of_next, aside))",
        new="true",
        breaks="no lock is kept for a message that never comes",
    ),
    _acquire(
        "a given up owner may take",
        old="  if redis.call('EXISTS', over, request) ~= 0 then\n    return {GIVEN_UP}",
        new="  if redis.call('EXISTS', request) ~= 0 then\n    return {GIVEN_UP}",
        breaks="what arrives late of an owner that was given up takes nothing",
    ),
    _acquire(
        "a given up request may take",
        old="  if redis.call('EXISTS', over, request) ~= 0 then\n    return {GIVEN_UP}",
        new="  if redis.call('EXISTS', over) ~= 0 then\n    return {GIVEN_UP}",
        breaks="what arrives late of a request that was given up takes nothing",
        kind="locks",
    ),
    _acquire(
        "late requests are not noted",
        old="  redis.call('SET', KEYS[i], 1, 'PX', over_ms)\n",
        new="",
        breaks="what arrives late of a request that was given up takes nothing",
        kind="locks",
    ),
    _acquire(
        "what was given up stays held",
        old="      redis.call('DEL', KEYS[FIRST + slot])\n      freed = freed + 1",
        new="      freed = freed + 1",
        breaks="what a delivery gave up never counts as running elsewhere",
    ),
    _acquire(
        "acquire looks for no record",
        old="if once then",
        new="if false then",
        breaks="no body runs again after its end",
    ),
    _acquire(
        "acquire is not idempotent",
        old="    if token == owner and asked_for then",
        new="    if token == owner and asked_for and slots < 0 then",
        breaks="a repeated acquire meets no conflict with itself",
        kind="locks",
    ),
    _acquire(
        "acquire takes what is held",
        old="  if not value then\n    if slot < limit",
        new="  if not value or redis.call('PTTL', lock) < ttl / 2 then\n    if slot < limit",
        breaks="one at a time",
    ),
    _acquire(
        "the limit is off by one",
        old="elseif free and (kept or held < limit) then",
        new="elseif free or held < limit + 1 then\n  free = free or limit - 1",
        breaks="lock_limit at a time",
    ),
    _acquire(
        "two copies beside each other",
        old="if copy then\n  slot = nil",
        new="if copy and slots == 1 then\n  slot = nil",
        breaks="two copies of a message never run beside each other",
    ),
    _acquire(
        "anybody takes a reservation",
        old="elseif reserved_as ~= '' and token == reserved_as and (asked_for or slot >= limit) then",
        new="elseif string.find(value, '\"\",0.0]', 1, true) and (asked_for or slot >= limit) then",
        breaks="lock_retain_on_retry keeps the lock between two attempts",
    ),
    _acquire(
        "nobody takes a reservation",
        old="elseif reserved_as ~= '' and token == reserved_as and (asked_for or slot >= limit) then",
        new="elseif reserved_as == '?' then",
        breaks="a message gets the lock that is kept for it",
    ),
    _grant(
        "a lock without end",
        old="owner .. string.gsub(holder, '\\n', ',' .. digits, 1), 'PX', ttl)",
        new="owner .. string.gsub(holder, '\\n', ',' .. digits, 1))",
        breaks="each key has a time to live",
    ),
    _grant(
        "a fence without end",
        old="redis.pcall('SET', fence, digits, 'PX', fence_ttl, 'GET')",
        new="redis.pcall('SET', fence, digits, 'GET')",
        breaks="each key has a time to live",
    ),
    _grant(
        "a fence is not counted on",
        old="    number = highest + 1\n",
        new="    number = highest\n",
        breaks="fences grow",
        nodes=3,
    ),
    _grant(
        "a fence is the time alone",
        old="elseif highest >= number and highest < 2^53 then",
        new="elseif false then",
        breaks="fences grow, whatever the clocks say",
        nodes=3,
    ),
    _grant(
        "a fence is not written",
        old="redis.pcall('SET', fence, digits, 'PX', fence_ttl, 'GET')",
        new="redis.pcall('GET', fence)",
        breaks="fences grow, whatever the clocks say",
        nodes=3,
    ),
    _grant(
        "a fence that is counted on is not written",
        old="    redis.call('SET', fence, digits, 'PX', fence_ttl)\n  end\n",
        new="  end\n",
        breaks="fences grow, whatever the clocks say",
        nodes=3,
    ),
    _acquire(
        "a waiter is not noted",
        old="if redis.call('ZADD', waiting, asked_at, owner) == 1 then",
        new="if false then",
        breaks="the end of a hold wakes a waiter",
    ),
    _acquire(
        "a waiter is noted forever",
        old="    redis.call('PEXPIRE', waiting, waiting_ms)\n",
        new="",
        breaks="each key has a time to live",
    ),
    _hand_over(
        "handed over to its holder",
        old="  gone = gone or holds(slot, owner)\n",
        new="",
        breaks="a lease that is trusted is kept",
        kind="locks",
    ),
    _hand_over(
        "handed over to a waiter that has left",
        old="local gone = redis.call('EXISTS', over, request) ~= 0",
        new="local gone = false",
        breaks="a waiter that leaves takes nothing",
        unseen="acquire.lua looks again; what is lost is that another waiter is woken at once",
    ),
    _hand_over(
        "the wake-up of a waiter that has left is lost",
        old="  wake_others(1)\n",
        new="",
        breaks="the end of a hold wakes a waiter",
        kind="locks",
    ),
    _handed(
        "handed over without looking",
        old="unpack(KEYS, others, #KEYS - 2)) == 0 then",
        new="unpack(KEYS, others, #KEYS - 2)) < 2 then",
        breaks="a waiter that leaves takes nothing",
        kind="locks",
    ),
    _handed(
        "handed over for a message that is done",
        old="if redis.call('EXISTS', KEYS[#KEYS], unpack(KEYS, others, #KEYS - 2)) == 0 then",
        new="if redis.call('EXISTS', KEYS[#KEYS]) == 0 then",
        breaks="no body runs again after its end",
    ),
    _refuse(
        "refused beside a copy that runs",
        old="    if is_copy then",
        new="    if is_copy and retries == '?' then",
        breaks="one message, one end",
    ),
    _refuse(
        "refused after the end",
        old="elseif type(known) == 'string' and string.match(known, PROMISED) ~= record then",
        new="elseif known == '' then",
        breaks="one message, one end",
        kind="joined",
    ),
    _refuse(
        "refused without a record",
        old="redis.call('SET', done, record, 'PX', record_ms)\nif ended_ms",
        new="if ended_ms",
        breaks="one message, one end",
    ),
    _ended(
        "an end is not noted",
        old="  redis.call('APPEND', ended, entry)\n",
        new="",
        breaks="what was sent is not sent again",
    ),
    _ended(
        "an end is noted forever",
        old="    redis.call('PEXPIRE', ended, seconds * 1000)\n",
        new="",
        breaks="each key has a time to live",
    ),
    _ended(
        "nobody looks for an end that was noted",
        old="  return left > 0 and left * 1000 or nil",
        new="  return nil",
        breaks="no body runs again after its end",
        unseen="few messages come again a minute after their end; tests/integration/test_ended.py sees it",
    ),
    Mutant(
        "a settled record is not written",
        f"{_SCRIPTS}/replace_records.lua",
        "settled[i] = redis.call('SET', done, record, 'PX', ms, 'XX') and 1 or 0",
        "settled[i] = 1",
        "what was sent is not sent again",
    ),
)
