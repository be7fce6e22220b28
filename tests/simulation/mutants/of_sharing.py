"""Faults of messages that end as another one, or because a newer one has come."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_joining = partial(Mutant, file="task/sharing.py", kind="joined")
_following = partial(Mutant, file="task/sharing.py", kind="follows")
_order = partial(Mutant, file="stores/redis/scripts/lock/newest.lua", kind="newest")
_acquire = partial(Mutant, file="stores/redis/scripts/lock/acquire.lua", kind="newest")
_newest = partial(Mutant, file="task/decide.py", kind="newest")
_run = partial(Mutant, file="task/run.py", kind="newest")

MUTANTS = (
    _joining(
        "one of the joined messages runs when the holder dies",
        old="        it.runtime.store.remember(self._key, _names_heir(it, self.joined, own))\n",
        new="",
    ),
    _joining(
        "a joined message that gets the lock looks for the holder's end first",
        old="    return (joining.with_lock(found) or found) if isinstance(found, Lease) else found\n",
        new="    if isinstance(found, Lease):\n        joining._take_over()\n    return found\n",
    ),
    _joining(
        "a joined message ends as the holder, whoever has the lock by then",
        old="    if (ended := joining.before_lock()) is not None:\n",
        new="    if (ended := None) is not None:\n",
    ),
    _joining(
        "a message that ends as another one holds nothing",
        old="            self._acquisition.abandon()\n",
        new="            pass\n",
    ),
    _joining(
        "no message ends as a run that had ended before it joined",
        file="task/message.py",
        old=':{self.since:.6f}")',
        new='")',
    ),
    _joining(
        "no message ends as one whose process has died",
        old="_DIED = (WorkerLostError, LockLost)",
        new="_DIED = ()",
    ),
    _joining(
        "a joined message ends as the holder's last attempt",
        old="        return NotYet(key=self._key if held else None)\n",
        new="        return None\n",
    ),
    _following(
        "a follower waits until its leader has ended",
        old="            if any(held.holder and held.holder.sending == self._leader.sending for held in "
        "self._held(key)):\n"
        "                return NotYet(key=key)\n",
        new="",
    ),
    _following(
        "no duplicate is sent beside a follower that runs in its leader's place",
        old="        met = self._brought.lead(self._execution.holder)\n        if isinstance(met, Held) and",
        new="        met = None\n        if met is not None and",
    ),
    _acquire(
        "no older message begins after a newer one has come",
        old="if copy or newer and not kept then\n",
        new="if copy then\n",
    ),
    _acquire(
        "a message that is not the newest any more ends",
        old="  if newer and not copy then\n",
        new="  if newer and not copy and held < limit then\n",
    ),
    _newest(
        "a superseded message has a final state",
        old='    return Finish(newer, states.REVOKED, "revoked", is_shared or newer.task_id == task_id)\n',
        new='    return Finish(newer, states.REVOKED, "over", True)\n',
    ),
    _order(
        "a newer message stops an older one that runs",
        old="  if not fields[NEWER] then\n",
        new="  if false then\n",
    ),
    _run(
        "a run that a newer message stops learns of it within a second",
        old="every=STOPPED_WITHIN if it.holder.order else math.inf,",
        new="every=math.inf,",
    ),
    _run(
        "a message that was stopped for a newer one ends as superseded",
        old="        return LockSuperseded(self._lease.key, newer)\n",
        new="        return None\n",
    ),
)
