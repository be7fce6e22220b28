"""Faults of the lock that a message has while it waits."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_sending = partial(Mutant, file="task/sending.py", kind="sent")
_lock = partial(Mutant, file="task/queue_lock.py", kind="sent")
_queued = partial(Mutant, file="task/queue_lock.py", kind="sent")
_request = partial(Mutant, file="worker/request.py", kind="sent")

MUTANTS = (
    _queued(
        "until_executing: another message can be sent as the body begins",
        old="        freed = self._free()\n        self._turn.queue_lock_ended",
        new="        freed = None\n        self._turn.queue_lock_ended",
    ),
    _queued(
        "the queue lock stays while its message is put back",
        old="if is_given_back or continues else None",
        new="if is_given_back else None",
    ),
    _queued(
        "the queue lock of a message that is lost with its worker ends in a ttl",
        old="        if not self._task.acks_late:\n            # As if",
        new="        if False:\n            # As if",
    ),
    _lock(
        "a header says nothing about another message",
        file="task/message.py",
        old='        return header if task_id is not None and header["id"] == task_id else _NOTHING\n',
        new="        return header\n",
    ),
    _lock(
        "until_expired: the lock lasts for its time",
        old="        return self.scope != UNTIL_EXPIRED\n\n    @property\n    def wakes_followers",
        new="        return True\n\n    @property\n    def wakes_followers",
    ),
    _lock(
        "a sender that dies before it has sent keeps others out for 30 s",
        old="        ttl = self.seconds if self.scope == UNTIL_EXPIRED else min(UNCONFIRMED_TTL, self.seconds)\n",
        new="        ttl = self.seconds\n",
    ),
    _sending(
        "what was not sent can be sent again",
        old="            runtime.store.abandon(replace(lock, owner=request.owner).hold())\n            raise\n",
        new="            raise\n",
    ),
    _sending(
        "a queue lock lasts as long as its message may wait",
        old="        runtime.confirmations.add(lock.confirmed())\n    return result\n",
        new="        pass\n    return result\n",
    ),
    _sending(
        "a duplicate that something follows on is sent",
        old="        if _is_part(named):\n            return self._send_following(named, publish)\n",
        new="",
    ),
    _sending(
        "without a lock server, on_send_unavailable decides whether it is sent",
        old="            if _is_raised(refusal, options) and not _follows(before, named):\n",
        new="            if not _follows(before, named):\n",
    ),
    _sending(
        "none is sent while another one waits",
        old="        return DuplicateResult.of(self.task, self.error)\n",
        new="        return publish(**named)\n",
    ),
    _sending(
        "a duplicate names the message that waits or runs",
        old="        result = cls(duplicate.task_id, backend",
        new="        result = cls(uuid(), backend",
    ),
    _sending(
        "a message knows its place among those that replace each other",
        old="number=fence)",
        new="number=None)",
    ),
    _sending(
        "a message that replaces another one is the newest when it has come",
        old="newest = replace(lock, number=None)",
        new="newest = replace(lock, number=1)",
    ),
    _sending(
        "lock_queue_ttl counts from when the message is due",
        old="        return min(delay + options.queue_ttl, MAX_QUEUE_TTL)\n",
        new="        return min(options.queue_ttl, MAX_QUEUE_TTL)\n",
    ),
    _request(
        "the queue lock of a revoked message ends",
        old="        if revoked:\n            self._end_brought()\n",
        new="        if revoked:\n",
    ),
    _request(
        "the queue lock of a message that dies with its child ends",
        old="            return\n        self._end_brought()\n        if not seconds or",
        new="            return\n        if not seconds or",
    ),
)
