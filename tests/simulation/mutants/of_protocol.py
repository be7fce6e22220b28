"""Faults of the protocol's Python, in workers and outside of them."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_trust = partial(Mutant, file="trust.py")
_store = partial(Mutant, file="stores/redis/store.py")
_heartbeat = partial(Mutant, file="heartbeat.py")
_run = partial(Mutant, file="task/run.py")
_acquisition = partial(Mutant, file="task/acquisition.py")
_decide = partial(Mutant, file="task/decide.py")
_children = partial(Mutant, file="worker/children.py")

MUTANTS = (
    _trust(
        "a holder stops trusting its lock first, although clocks drift",
        old="return sent_at + ttl - (ttl * DRIFT_SHARE + RESOLUTION)",
        new="return sent_at + ttl",
        kind="locks",
    ),
    _trust(
        "a body is stopped before its lock can be another's",
        old="GIVE_UP_BEFORE = 1 / 3",
        new="GIVE_UP_BEFORE = -1 / 6",
    ),
    _trust(
        "each step of a renewal is bounded",
        old="return min(MAX_STEP, ttl * STEP_SHARE)",
        new="return 1000.0",
        kind="locks",
    ),
    _store(
        "trust counts from before the request was sent",
        old="found = lock_answers.parse_acquired(answer, request, sent_at)",
        new="found = lock_answers.parse_acquired(answer, request, clock.now())",
        kind="locks",
    ),
    _store(
        "an answer that comes too late grants nothing",
        old="if isinstance(found, Lease) and not trust.came_in_time(sent_at, request.ttl):",
        new="if isinstance(found, Lease) and clock.now() - sent_at > request.ttl * 9:",
        kind="locks",
    ),
    _store(
        "what an interrupted acquire may have taken is taken back",
        old="            self._end(call_id, lock_commands.abandon(request.hold()), request.ttl, at_once=answers)\n",
        new="",
        kind="locks",
    ),
    _store(
        "an end that was not answered is repeated",
        old="        repeat()\n        return None\n",
        new="        return None\n",
    ),
    Mutant(
        "an end is repeated until it is answered",
        "batches.py",
        "        return RETRY_AFTER if self._waiting else None\n",
        "        return None\n",
    ),
    _heartbeat(
        "silence extends no trust",
        old="                watched.schedule(lease, after)\n",
        new="                lease.extend(clock.now(), lease.ttl)\n                watched.schedule(lease, after)\n",
    ),
    _heartbeat(
        "a holder is told that its lease is lost",
        old="            watched.stop()\n",
        new="            pass\n",
    ),
    _heartbeat(
        "a new ttl counts once it was answered",
        old="            (ours,) = self.store.renew([asked], timeout=trust.MAX_STEP)\n            if ours:\n",
        new="            lease.extend(sent_at, ttl)\n"
        "            (ours,) = self.store.renew([asked], timeout=trust.MAX_STEP)\n            if ours:\n",
        kind="locks",
    ),
    Mutant(
        "a late renewal does not shorten what was extended",
        "lock.py",
        "        lease.only_longer = True",
        "        lease.only_longer = False",
        kind="locks",
    ),
    Mutant(
        "check() raises once the lock is lost",
        "lease.py",
        "        if not self.held:\n            raise LockLost",
        "        if not self.held and self.ttl < 0:\n            raise LockLost",
    ),
    Mutant(
        "a body that does not end is killed with its process",
        "task/interrupt.py",
        "                _kill_this_child(self._lease)\n",
        "",
    ),
    Mutant(
        "a body that goes on is interrupted again",
        "task/interrupt.py",
        "            if now >= self._strike_again_at and not",
        "            if not self._strike_again_at and not",
    ),
    _trust(
        "a body that goes on has a tenth of the ttl to end",
        old="GRACE_SHARE = 1 / 10\n",
        new="GRACE_SHARE = 1.0\n",
    ),
    _run(
        "a body that fails without its lock ends as its copy does",
        old="self.was_lost = self.superseded is None and not lease.held and _is_failure(error)",
        new="self.was_lost = False",
    ),
    _run(
        "lock_retain_on_retry keeps the lock until the retry comes",
        old="return Reservation(following, seconds_until(error) + late)",
        new="return Reservation(following, 0.05)",
    ),
    _run(
        "a node of a Redlock that keeps the lock for a retry which has run is told so",
        old="        if ended is not None and it.options.retain_on_retry and it.request.retries:\n",
        new="        if False:\n",
        nodes=3,
    ),
    _run(
        "a message counts as reported when all that follows on it was sent",
        old="                settle_after(it, ended)\n",
        new="                it.runtime.records.replace(\n"
        "                    it.key, it.record(Outcome(ended.state, settled=True)))\n",
    ),
    _acquisition(
        "each delivery asks under an owner of its own",
        old="self._owner = self._delivered_as or new_owner()",
        new="self._owner = execution.holder.reserved_as",
    ),
    _acquisition(
        "never more than lock_limit at a time",
        old="limit=it.options.limit,\n            given_up=self.given_up,",
        new="limit=it.options.limit + 1,\n            given_up=self.given_up,",
    ),
    _acquisition(
        "a worker frees what a dead process of its host has left",
        old="if found.holder is None or not process_identity.is_dead(found.holder.process):",
        new="if found.holder is None or found.holder.process != '?':",
    ),
    _decide(
        "no body runs while nobody can tell whether its lock is held",
        old='    if policy == "run" and not is_wrong_server:\n',
        new='    if policy != "raise" and not is_wrong_server:\n',
    ),
    Mutant(
        "a message that the broker does not take back is sent again",
        "task/requeue.py",
        '        logger.warning("%s cannot be put back: %r", named(task), error)\n        return\n',
        '        logger.warning("%s cannot be put back: %r", named(task), error)\n',
    ),
    Mutant(
        "calls with other arguments do not exclude each other",
        "keys/key.py",
        "digest(name + content)",
        "digest(name)",
    ),
    Mutant(
        "lock_conflict_retries bounds how often a message is put back",
        "task/decide.py",
        '"raise" if bound is not None and message',
        '"raise" if bound == -1 and message',
    ),
    Mutant(
        "a copy knows that its message may have begun",
        "task/requeue.py",
        '        known["redelivered"] = True\n',
        "        pass\n",
    ),
    Mutant(
        "a copy of a message that has expired does not run",
        "worker/request.py",
        "in carried and message_of(self.context).may_have_begun):\n            # It",
        "in carried):\n            # It",
        kind="sent",
    ),
    Mutant(
        "a message that is delivered again does not run when it has expired",
        "task/decide.py",
        "    if message.comes_too_late():\n",
        "    if False:\n",
        kind="sent",
    ),
    Mutant(
        "a conflict spends none of the task's retries",
        "task/putback.py",
        '        way = {"exchange"',
        '        headers["retries"] = (headers.get("retries") or 0) + 1\n        way = {"exchange"',
    ),
    Mutant(
        "a refused message has a final state",
        "task/conclude.py",
        "    ends.report(it.task, error, decision.state, task_id=task_id)\n",
        "",
    ),
    Mutant(
        "what an earlier delivery may hold never keeps its own message out",
        "task/requeue.py",
        "    owners = note.given_up if owner is None else (*note.given_up, owner)\n",
        "    owners = note.given_up\n",
        kind="sent",
    ),
    _decide(
        "a redelivered copy waits as insurance while its message runs",
        old="if running > own or (running == own and not acks_late):",
        new="if running >= own:",
    ),
    _decide(
        "a copy leaves its message time to report its end",
        old="SETTLING = 10.0",
        new="SETTLING = 0.0",
    ),
    _decide(
        "an end that nobody has reported is reported by a copy",
        old="    return recorded.settled or recorded.state in (states.RETRY, states.IGNORED) or not is_awaited\n",
        new="    return True\n",
    ),
    _children(
        "a child that is stopped keeps its lock",
        old="                self._free_for_the_dead()\n                self._renew()\n",
        new="                self._free_for_the_dead()\n",
    ),
    _children(
        "a main process frees only what a dead child had",
        old="dead = [child for child in self._children if child.is_over]",
        new="dead = [*self._children]",
    ),
    _children(
        "the lock of a dead child is free at once",
        old="            if (hold := child.hold()) is not None:\n                free(",
        new="            if (hold := child.hold()) is None:\n                free(",
    ),
    _children(
        "what a child sent with its last breath takes nothing",
        old="    freed = store.abandon(run)\n",
        new="    freed = store.free(run)\n",
    ),
    _children(
        "nothing is freed of a new child that has a dead one's pid",
        old="if child.pid == pid and not child.is_over), None)",
        new="if child.pid == pid), None)",
    ),
    _children(
        "the lock of a lost child is free although a new one has its pid",
        old="        return next((child for child in self._children if child.is_at(delivery)), None)\n",
        new="        return next((child for child in self._children), None)\n",
    ),
    Mutant(
        "a waiter frees the lock of a dead process of its host whose pid another one has",
        "process_identity.py",
        'state in ("Z", "X") or (started is not None and started != start)',
        'state in ("Z", "X")',
    ),
    Mutant(
        "a body that a shutdown interrupts runs again",
        "task/ends.py",
        "    return None  # The process is being stopped; whatever stops it decides what becomes of the message.",
        "    return Outcome(states.FAILURE)",
    ),
    Mutant(
        "two messages with equal arguments are no copies of each other",
        "holder.py",
        'return self.sending != "" and self.sending == other.sending',
        'return self.sending != ""',
    ),
    Mutant(
        "each attempt of a message has an end of its own",
        "holder.py",
        'return f"{self.record or self.sending}:{self.replaced}.{self.retries}"',
        'return f"{self.record or self.sending}:{self.replaced}.0"',
    ),
)
