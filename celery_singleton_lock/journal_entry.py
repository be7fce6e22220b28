"""An entry of the journal: what became of one copy of a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from celery_singleton_lock import cleaned

#: What became of it: it ran; it was refused as `on_conflict` said, or waits, also for the message that it follows; it
#: ended as the task that it had joined, or followed; a newer one came while it waited; it stood by for a copy that runs
#: elsewhere, or was dropped beside one; it ended as another copy had that was finished; its lock was freed, since its
#: process had died.
Waiting = Literal["retry", "rerun", "replace", "join", "follow"]
Kind = Literal["run", "skip", "raise", "reject", Waiting, "joined", "superseded", "stand-by", "drop", "repeat", "free"]

KINDS: tuple[Kind, ...] = get_args(Kind)

#: The message header that names the entry of beat's schedule that it was sent for.
SCHEDULED_HEADER = "singleton_lock_entry"

#: The outcome of a run that was stopped, since its lock was lost; of one whose process was being stopped; and of one
#: that was stopped for a newer one.
LOST, STOPPED, SUPERSEDED = "LOST", "STOPPED", "SUPERSEDED"

#: Those that were not carried out, and will not be.
REFUSALS: tuple[Kind, ...] = ("skip", "raise", "reject")

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Entry(NamedTuple):
    """What became of one copy; its fields stand in the journal in this order.

    Attributes:
        kind: see `Kind`.
        task: the task's name.
        key: of the lock.
        task_id: of the copy.
        node, pid: where it was: the worker's node name, and the process.
        began, ended: when the body ran; of a copy that did not run, when it asked for the lock and when it had its
            answer. Seconds on one clock: of this host until it is written, then the server's.
        waited: seconds for the lock.
        outcome: of a run: Celery's state for it, LOST or STOPPED.
        fence, renewals: of a run's lease.
        limit: how many may hold the lock at once.
        holder, holder_node, holder_since: the task that had the lock meanwhile, where it ran, and since when.
        scheduled: the entry of beat's schedule that it was sent for; '' where it was not, or by another kind of beat.
        label: what the digest in the key is of, in a few words; '' where nobody has said that.
    """

    kind: Kind
    task: str
    key: str
    task_id: str | None
    node: str | None
    pid: int
    began: float
    ended: float
    waited: float = 0.0
    outcome: str = ""
    fence: int = 0
    renewals: int = 0
    limit: int = 1
    holder: str | None = None
    holder_node: str | None = None
    holder_since: float = 0.0
    scheduled: str = ""
    label: str = ""

    def moved(self, offset: float) -> Entry:
        """The same on a clock that is ahead by so much."""
        return self._replace(began=self.began + offset, ended=self.ended + offset)

    def cleaned(self) -> Entry:
        """The same, whatever is in it, as it may be kept and shown."""
        return _cleaned(self)

    def dumps(self) -> str:
        return _encode(self)

    @classmethod
    def loads(cls, text: str | bytes) -> Entry | None:
        """The entry as written by `dumps`, also by a later version, which may have more fields.

        None when somebody else wrote it, or when a later version did of a kind that is unknown here.
        """
        fields = cleaned.array(text)
        if fields is None or len(fields) < _REQUIRED or fields[0] not in KINDS:
            return None
        return _cleaned(fields)


def _cleaned(fields: Sequence[Any]) -> Entry:
    return Entry(*(clean(value) for clean, value in zip(_CLEAN.values(), fields, strict=False)))


#: How each field is cleaned; of the kind it is known that it is one.
_CLEAN: Mapping[str, Callable[[Any], Any]] = {
    "kind": str,
    "task": cleaned.text,
    "key": cleaned.key,
    "task_id": cleaned.text_or_none,
    "node": cleaned.text_or_none,
    "pid": cleaned.count,
    "began": cleaned.seconds,
    "ended": cleaned.seconds,
    "waited": cleaned.seconds,
    "outcome": cleaned.text,
    "fence": cleaned.count,
    "renewals": cleaned.count,
    "limit": cleaned.count,
    "holder": cleaned.text_or_none,
    "holder_node": cleaned.text_or_none,
    "holder_since": cleaned.seconds,
    "scheduled": cleaned.text,
    "label": cleaned.text,
}

#: The fields that an entry of any version has: those without a default.
_REQUIRED = 8
