"""Faults of messages that end as another one, or because a newer one has come."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_joining = partial(Mutant, file="task/joining.py", kind="joined")
_refusal = partial(Mutant, file="task/refusal.py", kind="joined")
_requeue = partial(Mutant, file="task/requeue.py", kind="joined")
_following = partial(Mutant, file="task/following.py", kind="follows")
_queued = partial(Mutant, file="task/queued.py", kind="follows")
_leader = partial(Mutant, file="task/leader.py", kind="follows")
_order = partial(Mutant, file="stores/redis/scripts/lock/newest.lua", kind="newest")
_acquire = partial(Mutant, file="stores/redis/scripts/lock/acquire.lua", kind="newest")
_newest = partial(Mutant, file="task/refusal.py", kind="newest")
_renew = partial(Mutant, file="stores/redis/scripts/lock/renew.lua", kind="newest")
_run = partial(Mutant, file="task/run.py", kind="newest")

MUTANTS = (
    _joining(
        "a copy that runs in the place of a dead one does not say so",
        old="            it.runtime.store.remember(self._key, Record(name, head + own.encode(), seconds))\n",
        new="            pass\n",
        breaks="one of the joined runs",
    ),
    _joining(
        "nobody looks for the copy that runs in the place of a dead one",
        old="            if heir is None or heir in looked_at:\n",
        new="            if True:\n",
        breaks="one of the joined runs",
    ),
    _joining(
        "a copy that has got the lock does not look again",
        old="    return (joining.with_lock(found) or found) if isinstance(found, Lease) else found\n",
        new="    if isinstance(found, Lease):\n        joining._take_over()\n    return found\n",
        breaks="a joined copy ends as the holder",
    ),
    _joining(
        "a joined copy looks only with the lock",
        old="    if (ended := joining.before_lock()) is not None:\n",
        new="    if (ended := None) is not None:\n",
        breaks="a joined copy ends as the holder, also when another one has the lock",
    ),
    _joining(
        "a copy that ends as another one keeps the lock",
        old="            self._acquisition.abandon()\n",
        new="            pass\n",
        breaks="a copy that does not run holds nothing",
    ),
    _joining(
        "one copy runs in the place of any delivery",
        old=':{joined.since:.6f}"',
        new='"',
        breaks="nobody ends as a run of before it has joined",
    ),
    _joining(
        "a death is an end",
        old="_DIED = (WorkerLostError, LockLost)",
        new="_DIED = ()",
        breaks="the holder dies: one of the joined runs",
    ),
    _joining(
        "the next attempt is not waited for",
        old="                self.joined = self.joined.next_attempt()\n                continue\n",
        new="                return None\n",
        breaks="a joined copy ends as the holder's last attempt",
    ),
    _joining(
        "a next attempt that has not begun is not waited for",
        old="        return NotYet(key=self._key if held else None)\n",
        new="        return None\n",
        breaks="a joined copy ends as the holder's last attempt",
    ),
    _joining(
        "an end that is not stored yet is none",
        old="        return NotYet(chance.spread(SOON)) if is_settling else None\n",
        new="        return None\n",
        breaks="a joined copy ends as the holder",
    ),
    _joining(
        "what the result backend has is not looked at",
        old="        if stored is not None:\n"
        "            return stored if isinstance(stored, NotYet) else as_end(stored)\n"
        "        if self.joined",
        new="        if self.joined",
        breaks="a joined copy ends as the holder",
    ),
    _refusal(
        "a copy that has ended as another one wakes nobody",
        old="        acquisition.leave_line()\n",
        new="        pass\n",
        breaks="all that have joined end one after the other",
    ),
    _refusal(
        "two copies may end as another one",
        old="    return None if found is None else found._replace(mark=new_owner())\n",
        new="    return found\n",
        breaks="what follows is sent once",
    ),
    _refusal(
        "a copy that ends as another one does not say so",
        old="        copy = _record_end(acquisition, _outcome_of(it, ended))\n",
        new="        copy = None\n",
        breaks="a message has one end",
    ),
    _refusal(
        "the joined task is forgotten as the lock is held by another one",
        old="            joins = joining.joinable(it, found) if policy == JOIN else None\n",
        new="            joins = joining.joinable(it, found) if policy == JOIN else None\n"
        "            joins = joins and joins._replace(since=joins.since + 1.0, sending='x' + joins.sending)\n",
        breaks="a joined copy ends as the holder",
    ),
    _requeue(
        "a copy that waits once more does not know whom it has joined",
        old="    if (joins := carried.joins or joined_by(request)) is not None:\n",
        new="    if (joins := carried.joins if not joined_by(request) else None) is not None:\n",
        breaks="a joined copy ends as the holder",
    ),
    _queued(
        "a leader does not say what it runs as",
        old="        if self.key is None or not may_be_followed(task, settings, self.lock.scope):\n"
        "            return None\n",
        new="        return None\n",
        breaks="a follower waits for the end of the leader",
    ),
    _following(
        "a follower looks for a record first, and then for the lock",
        old="        has_lock = [held for held in self._held(self._lock.key) if self._leader.has(held)]\n"
        "        if (run := self._started()) is not None:\n"
        "            self._leader = self._leader._replace(run=run)\n"
        "            return None\n",
        new="        if (run := self._started()) is not None:\n"
        "            self._leader = self._leader._replace(run=run)\n"
        "            return None\n"
        "        has_lock = [held for held in self._held(self._lock.key) if self._leader.has(held)]\n",
        breaks="a follower waits for the end of the leader",
        unseen="it looks once more when it has taken the lock",
    ),
    _following(
        "a follower that has taken the leader's lock does not look again",
        old="        if self._leader.run is None and (run := self._started()) is not None:  # As this message took its "
        "lock.\n",
        new="        if False:\n",
        breaks="a follower waits for the end of the leader",
        unseen="only where the leader's lock was lost, and in the moment in which it starts",
    ),
    _following(
        "a leader that runs is gone",
        old="            if any(held.holder and held.holder.sending == run.joined.sending for held in "
        "self._held(run.key)):\n"
        "                return NotYet(key=run.key)\n",
        new="",
        breaks="a follower waits for the end of the leader",
    ),
    _following(
        "a follower does not look for the one that runs in the leader's place",
        old="            if (other := self._heir()) is None and self._is_over():\n",
        new="            if (other := None) is None and self._is_over():\n",
        breaks="one of the followers runs",
        unseen="it is found all the same, as this one is to be named",
    ),
    _following(
        "several run in a leader's place",
        old="        said = self._store.refuse(self._lock.key, self._leader.heirs_name, "
        "self._names_heir(self._leader, self._own))\n",
        new="        said = None\n",
        breaks="one of the followers runs",
    ),
    _following(
        "a copy that follows after all keeps the lock",
        old="        self._brought.give_back()\n        return other\n",
        new="        return other\n",
        breaks="a follower has no lock",
        unseen="it looks at its leader once more, and frees the lock as it ends; tests/unit/test_following.py sees it",
    ),
    _following(
        "a follower that runs in a leader's place takes no lock",
        old="        met = self._brought.lead(self._execution.holder.label)\n        if isinstance(met, Held) and",
        new="        met = None\n        if met is not None and",
        breaks="none is sent beside a follower that runs in a leader's place",
    ),
    _queued(
        "a follower that runs in a leader's place does not free its lock",
        old="        self.is_own = True\n        self._keep_early()\n",
        new="        self._keep_early()\n",
        breaks="it ends with its message",
    ),
    _queued(
        "a follower that runs in a leader's place does not have its lock confirmed",
        old="        if self._lease is None and lock.ends_at_end:\n"
        "            self._runtime.confirmations.add(lock.confirmed())\n"
        "        return None\n",
        new="        return None\n",
        breaks="it lasts for as long as its message may wait",
        unseen="the worker that gets its next copy confirms it as well",
    ),
    _following(
        "a follower of another lock leaves what woke it",
        old="        self._acquisition.leave_line(later.key)\n",
        new="        pass\n",
        breaks="a copy in line is begun as the lock is free",
    ),
    _acquire(
        "an older message is given a free lock",
        old="elseif newer and not kept then\n",
        new="elseif false then\n",
        breaks="none runs after a newer one has come",
    ),
    _acquire(
        "an older message waits on",
        old="  if newer and not copy then\n",
        new="  if newer and not copy and held < limit then\n",
        breaks="a message that is not the newest ends",
    ),
    _acquire(
        "a newer one wakes nobody",
        old="  wake_others(math.max(freed, waits and 1 or 0))\n",
        new="  wake_others(freed)\n",
        breaks="a message that is not the newest ends soon",
    ),
    _acquire(
        "a superseded message keeps what has woken it",
        old="    wake_others(math.max(freed, held < limit and 1 or 0))\n    return {SUPERSEDED",
        new="    return {SUPERSEDED",
        breaks="a copy in line is begun as the lock is free",
        unseen="its main process has the next one begun as well",
    ),
    _order(
        "each question is a newer one",
        old="  local number = redis.pcall('ZSCORE', order, arrives_as)\n",
        new="  local number = false\n",
        breaks="a message keeps its place",
    ),
    _order(
        "the oldest is the newest",
        old="redis.call('ZRANGE', order, -1, -1, 'WITHSCORES')",
        new="redis.call('ZRANGE', order, 0, 0, 'WITHSCORES')",
        breaks="the newest runs",
    ),
    _order(
        "any message that asks is the newest",
        old="  return number, number < highest and before, is_new and before\n",
        new="  return number, nil, is_new and before\n",
        breaks="none runs after a newer one has come",
    ),
    _newest(
        "a superseded message leaves no record",
        old="        copy = _record_end(acquisition, outcome.superseded(it.task, it.request, error))\n",
        new="        copy = None\n",
        breaks="a message has one end",
        unseen="a copy of it finds as well that a newer one has come",
    ),
    _newest(
        "a superseded message ends in silence",
        old="            on_conflict.supersede(it.task, error, met)\n",
        new="            raise Ignore(str(error))\n",
        breaks="every message has an end",
    ),
    _order(
        "the holder is not told to stop",
        old="  if not fields[NEWER] then\n",
        new="  if false then\n",
        breaks="a newer message stops an older one that runs",
    ),
    _renew(
        "a renewal does not say for whom to stop",
        old="          renewed[i] = newer[2]\n",
        new="",
        breaks="a newer message stops an older one that runs",
        unseen="its process is told at once, in another way",
    ),
    _acquire(
        "what is kept for an older message is waited for",
        old="  slot = is_kept and held <= limit and first_slot or nil\n",
        new="",
        breaks="the newest has at once what is kept for an older one",
        unseen="the older message frees it as it comes back",
    ),
    _acquire(
        "an older message takes what is kept for it",
        old="if kept and newer and stops ~= '' then\n",
        new="if false then\n",
        breaks="none runs after a newer one has come",
    ),
    _acquire(
        "a repeated acquire forgets that it is to stop",
        old="      if number and fields[NEWER] then\n",
        new="      if false then\n",
        breaks="a newer message stops an older one that runs",
        unseen="its process is told at once, in another way",
    ),
    _order(
        "a holder of any order is stopped",
        old=" or fields[ORDER] ~= stops then",
        new=" then",
        breaks="only an older message of the same order stops",
        unseen="all tasks that share a lock in a plan have one order",
    ),
    _run(
        "a run that was stopped goes on as one that has failed",
        old="        return LockSuperseded(self._lease.key, newer)\n",
        new="        return None\n",
        breaks="what was stopped ends as superseded",
    ),
)
