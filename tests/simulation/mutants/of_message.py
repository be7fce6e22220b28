"""Faults of what a message carries on to its copies, and of messages whose ends or places others depend on."""

from __future__ import annotations

from functools import partial

from tests.simulation.mutants.mutant import Mutant

_original = partial(Mutant, file="task/original.py", breaks="a copy carries what its message carried")
_requeue = partial(Mutant, file="task/requeue.py")
_joining = partial(
    Mutant, file="task/joining.py", kind="joined", breaks="one of the joined runs, and the others end as it"
)
_children = partial(Mutant, file="worker/children.py", breaks="a lock ends with its child, and not before")

MUTANTS = (
    _original(
        "a copy loses its priority",
        old='        priority = self.properties.get("priority")\n',
        new="        priority = None\n",
    ),
    _original(
        "a copy loses its properties",
        old="in self.properties.items() if name not in _NOT_COPIED}",
        new="in ()}",
    ),
    _original(
        "a copy loses other people's headers",
        old="if name not in _NOT_COPIED_HEADERS}",
        new='if name not in _NOT_COPIED_HEADERS and name[:2] != "x-"}',
    ),
    _original(
        "a copy loses the ids of the canvas that it is part of",
        old='        headers[HEADER] = {**header, "put_back": {**header["put_back"], **way}}\n',
        new='        headers[HEADER] = {**header, "put_back": {**header["put_back"], **way}}\n'
        '        headers.pop("root_id", None)\n',
    ),
    _requeue(
        "a message that has not begun does not expire any more",
        old='NOT_BEGUN: tuple[Reason, ...] = ("conflict", "unavailable", "follows")',
        new='NOT_BEGUN: tuple[Reason, ...] = ("unavailable",)',
        breaks="a message that has not begun expires",
    ),
    _requeue(
        "a copy in case its message dies may expire",
        old="    expires = reason in NOT_BEGUN\n",
        new="    expires = True\n",
        breaks="a message that has begun does not expire",
    ),
    _requeue(
        "a copy is not counted",
        old="put_back_count(request, other) + (other == reason) for",
        new="put_back_count(request, other) for",
        breaks="a copy is due later each time",
    ),
    Mutant(
        "each copy is due after the same time",
        file="chance.py",
        old="first * 2.0 ** min(failures, 16)",
        new="first",
        breaks="a copy is due later each time",
    ),
    _joining(
        "the heir of a retry is not known to those that have joined an earlier attempt",
        old="self.joined.since and (self.joined.goes_on or self.joined.retries)",
        new="self.joined.since and self.joined.goes_on",
    ),
    _joining(
        "the heir before a retry is not known to those that have seen the retry begin",
        old="                return self._look_at_heir_before()\n",
        new="                return None\n",
    ),
    _joining(
        "a lock that is kept for a retry shows when that has begun",
        file="task/joined.py",
        old="if is_kept else joined",
        new="if False else joined",
    ),
    _children(
        "a child is taken for the dead one that had its pid",
        old="            if child is not None and child.is_over:\n",
        new="            if False:\n",
    ),
    _children(
        "a child is forgotten for the dead one that had its pid",
        old="        if child is not None and not child.is_at(delivery):\n",
        new="        if False:\n",
    ),
    Mutant(
        "a message is known by its id",
        file="task/message_identity.py",
        old='    return {"id": task_id, "sent": new_owner()}\n',
        new='    return {"id": task_id, "sent": fixed(str(task_id))}\n',
        breaks="what is remembered is remembered of one sending",
    ),
    Mutant(
        "a lock that is kept for an older message keeps the newest waiting",
        file="stores/redis/scripts/lock/acquire.lua",
        old="is_kept and held <= limit and first_slot or nil",
        new="nil",
        breaks="the newest message does not wait for one that it supersedes",
        kind="newest",
    ),
)
