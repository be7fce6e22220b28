"""Faults of what a message carries on to its copies, and of messages whose ends or places others depend on."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_original = partial(Mutant, file="task/putback.py")
_requeue = partial(Mutant, file="task/requeue.py")
_joining = partial(Mutant, file="task/sharing.py", kind="joined")

MUTANTS = (
    _original(
        "a copy keeps its message's priority",
        old='        priority = self.properties.get("priority")\n',
        new="        priority = None\n",
    ),
    _original(
        "a copy keeps its message's properties",
        old="in self.properties.items() if name not in _NOT_COPIED}",
        new="in ()}",
    ),
    _original(
        "a copy keeps other people's headers",
        old="if name not in _NOT_COPIED_HEADERS}",
        new='if name not in _NOT_COPIED_HEADERS and name[:2] != "x-"}',
    ),
    _original(
        "a copy keeps the ids of its canvas",
        old='        headers[HEADER] = {**header, "put_back": {**header["put_back"], **way}}\n',
        new='        headers[HEADER] = {**header, "put_back": {**header["put_back"], **way}}\n'
        '        headers.pop("root_id", None)\n',
    ),
    Mutant(
        "a message that has not begun may still expire after a conflict",
        file="task/message.py",
        old='NOT_BEGUN: tuple[Reason, ...] = ("conflict", "unavailable", "follows")',
        new='NOT_BEGUN: tuple[Reason, ...] = ("unavailable",)',
    ),
    _requeue(
        "a message that has begun does not expire",
        old="    expires = reason in NOT_BEGUN\n",
        new="    expires = True\n",
    ),
    _requeue(
        "each put-back is counted",
        old="message.put_back_count(other) + (other == reason) for",
        new="message.put_back_count(other) for",
    ),
    _requeue(
        "a message that is put back keeps its number in the order of its key",
        old='        known["arrived"] = number\n',
        new="        pass\n",
        kind="newest",
    ),
    Mutant(
        "a copy is due later each time",
        file="clock.py",
        old="first * 2.0 ** min(failures, 16)",
        new="first",
    ),
    _joining(
        "the heir of a retry is found by those that have joined an earlier attempt",
        old="            if self.joined.retries and not self.joined.since:",
        new="            if False:",
    ),
    _joining(
        "an heir from before a retry is found by those that have seen the retry begin",
        old="                return self._look_at_heir_before()\n",
        new="                return None\n",
    ),
    _joining(
        "a lock that is kept for a retry does not say that the retry has begun",
        file="task/message.py",
        old="since = holder.since if holder.pid or holder.is_nobody else 0.0",
        new="since = holder.since",
    ),
    Mutant(
        "the newest message does not wait for one that it supersedes",
        file="stores/redis/scripts/lock/acquire.lua",
        old="if is_kept and held <= limit then",
        new="if false then",
        kind="newest",
    ),
)
