"""Faults of the lock that a message has while it waits."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_sending = partial(Mutant, file="task/sending.py", kind="sent")
_asking = partial(Mutant, file="task/asking.py", kind="sent")
_lock = partial(Mutant, file="task/queue_lock.py", kind="sent")
_queued = partial(Mutant, file="task/queued.py", kind="sent")
_request = partial(Mutant, file="worker/request.py", kind="sent")
_confirmations = partial(Mutant, file="confirmations.py", kind="sent")

MUTANTS = (
    _queued(
        "the lock is not freed as the body begins",
        old="        freed = self._free()\n        self._progress.is_begun",
        new="        freed = None\n        self._progress.is_begun",
        breaks="until it starts, and no longer",
    ),
    _queued(
        "the lock is not freed as the message ends",
        old="            self._free()\n        self._progress.is_begun = True  # What",
        new="            pass\n        self._progress.is_begun = True  # What",
        breaks="it ends with its message",
    ),
    _queued(
        "a retry frees the lock",
        old="        if self._progress.passes_on is not None:\n            return self._progress.passes_on\n",
        new="",
        breaks="it stays between two attempts",
    ),
    _queued(
        "a put-back copy frees the lock",
        old="if is_given_back or isinstance(error, requeue.GoesOn) else None",
        new="if is_given_back else None",
        breaks="it stays while a message is put back",
    ),
    _queued(
        "what a retry takes over stays a lease",
        old="                self._runtime.confirmations.add(hold)\n",
        new="                pass\n",
        breaks="it stays between two attempts",
        unseen="the worker that gets the next attempt confirms it as well",
    ),
    _queued(
        "an acknowledged message keeps the lock for a day",
        old="        if not self._task.acks_late:\n            # As if",
        new="        if False:\n            # As if",
        breaks="the lock of a message that is lost with its worker ends with that",
    ),
    _queued(
        "nobody renews the lock of a body that runs",
        old="        self._runtime.heartbeat.start(self._lease, self._when_lost)\n",
        new="",
        breaks="the lock of a message that is lost with its worker ends with that",
    ),
    _lock(
        "the lock is freed as any body begins",
        old="        return self.scope not in (UNTIL_EXECUTED, UNTIL_EXPIRED)",
        new="        return self.scope != UNTIL_EXPIRED",
        breaks="none is sent while one runs",
    ),
    _lock(
        "a header of another message counts",
        file="task/header.py",
        old='        return header if task_id is not None and header["id"] == task_id else _NOTHING\n',
        new="        return header\n",
        breaks="a header says nothing on another message",
    ),
    _lock(
        "it is confirmed by another token",
        old="        return Hold(self.key, self.owner, ttl=self.seconds, limit=self.limit, slot=self._slot)",
        new="        return Hold(self.key, self.owner[::-1], ttl=self.seconds, limit=self.limit, slot=self._slot)",
        breaks="it lasts for as long as its message may wait",
    ),
    _lock(
        "what lasts for its time is freed",
        old="        return self.scope != UNTIL_EXPIRED\n\n    @property\n    def wakes_followers",
        new="        return True\n\n    @property\n    def wakes_followers",
        breaks="until it has expired",
    ),
    _asking(
        "the lock is taken when it is sent",
        old="""            return publish(**{**named, "producer": producer})
""",
        new="""            with _Producer(app, named.get("producer"), bool) as producer:
                result = publish(**{**named, "producer": producer})
            self.wait()
            return result
""",
        breaks="one waits",
    ),
    _lock(
        "an unconfirmed lock lasts for a day",
        old="        ttl = self.seconds if self.scope == UNTIL_EXPIRED else min(UNCONFIRMED_TTL, self.seconds)\n",
        new="        ttl = self.seconds\n",
        breaks="a sender that dies first keeps others out for 30 s",
    ),
    _asking(
        "a sender that has not sent keeps the lock",
        old="        if error is not None and error is not self.refusal:",
        new="        if False:",
        breaks="what was not sent can be sent again",
    ),
    _sending(
        "a sender that has sent confirms nothing",
        old="        runtime.confirmations.add(lock.confirmed())\n    return result\n",
        new="        pass\n    return result\n",
        breaks="it lasts for as long as its message may wait",
    ),
    _sending(
        "a retry does not take over the lock",
        old="    kept = before.lock if before.lock is not None and before.lock.key == key else None\n",
        new="    kept = None\n",
        breaks="it stays between two attempts",
    ),
    _sending(
        "a part of a canvas is not sent",
        old="        if _is_part(named):\n            return self._send_following(named, publish)\n",
        new="",
        breaks="what something follows on is sent",
    ),
    _sending(
        "without a lock server, nothing is sent",
        old="            elif _is_raised(error, options) and not _follows(before, named):\n",
        new="            elif not _follows(before, named):\n",
        breaks="it is sent without a lock",
    ),
    _sending(
        "a duplicate is its own message's",
        old="        result = cls(duplicate.task_id, backend",
        new="        result = cls(uuid(), backend",
        breaks="a duplicate names the one that waits or runs",
    ),
    _sending(
        "a countdown does not count",
        old="        return min(delay + options.queue_ttl, MAX_QUEUE_TTL)\n",
        new="        return min(options.queue_ttl, MAX_QUEUE_TTL)\n",
        breaks="lock_queue_ttl counts from when it is due",
    ),
    _request(
        "a worker confirms nothing",
        old="                Runtime.of(self.app).confirmations.add(brought.confirmed_again())\n",
        new="                pass\n",
        breaks="a sender may die as it has sent",
    ),
    _request(
        "what is revoked keeps its lock",
        old="        if revoked:\n            self._end_brought()\n",
        new="        if revoked:\n",
        breaks="revoked or expired: another one can be sent",
    ),
    _request(
        "what dies with its child keeps its lock",
        old="            return\n        self._end_brought()\n        if not seconds or",
        new="            return\n        if not seconds or",
        breaks="it ends with its message",
    ),
    _confirmations(
        "what was not answered is not said again",
        old="                return RETRY_AFTER\n",
        new="                self._holds.clear()\n                return None\n",
        breaks="it lasts for as long as its message may wait",
        unseen="the worker that gets the message confirms it as well",
    ),
)
