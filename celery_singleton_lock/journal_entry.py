"""An entry of the journal: what became of one copy of a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from celery_singleton_lock import cleaned

#: What became of it: it ran; it was refused as `on_conflict` said; it stood by for a copy that runs elsewhere, or was
#: dropped beside one; it ended as another copy had that was finished; its lock was freed, since its process had died.
Kind = Literal["run", "skip", "raise", "retry", "reject", "stand-by", "drop", "repeat", "free"]

KINDS: tuple[Kind, ...] = get_args(Kind)

#: The message header that names the entry of beat's schedule that it was sent for.
SCHEDULED_HEADER = "singleton_lock_entry"

#: The outcome of a run that was stopped, since its lock was lost; and of one whose process was being stopped.
LOST, STOPPED = "LOST", "STOPPED"

#: Those that were not carried out, and will not be.
REFUSALS: tuple[Kind, ...] = ("skip", "raise", "reject")

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Entry(NamedTuple):
    """What became of one copy. Seconds everywhere.

    Attributes:
        kind: see `Kind`.
        task: the task's name.
        key: of the lock.
        task_id: of the copy.
        node: the worker that had it.
        pid: the process.
        began: when the body began; of a copy that did not run, when it asked for the lock.
        ended: when the body ended; of a copy that did not run, when that was clear.
        waited: for the lock.
        outcome: of a run: Celery's state for it, LOST or STOPPED.
        fence: of a run.
        renewals: of its lease.
        limit: how many may hold the lock at once.
        holder: the task that had the lock meanwhile.
        holder_node: where that ran.
        holder_since: since when.
        scheduled: the entry of beat's schedule that it was sent for; '' where it was not, or by another beat than ours.
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

    def cleaned(self) -> Entry:
        """The same, whatever is in it, as it may be kept and shown."""
        own = {name: clean(getattr(self, name)) for name, clean in _CLEAN.items()}
        return self._replace(**own)

    def dumps(self) -> str:
        """As it stands in the journal."""
        return _encode(self)

    @classmethod
    def loads(cls, text: str | bytes) -> Entry | None:
        """The entry as written by `dumps`; None when somebody else wrote it, or a later version of this package."""
        fields = cleaned.array(text)
        if fields is None or len(fields) < _REQUIRED or fields[0] not in KINDS:
            return None
        return cls(*fields[: len(cls._fields)]).cleaned()


#: How each field is cleaned; what kind of entry it is need not be.
_CLEAN: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("task", "outcome", "scheduled"), cleaned.text),
    "key": cleaned.key,
    **dict.fromkeys(("task_id", "node", "holder", "holder_node"), cleaned.text_or_none),
    **dict.fromkeys(("pid", "fence", "renewals", "limit"), cleaned.count),
    **dict.fromkeys(("began", "ended", "waited", "holder_since"), cleaned.seconds),
}

#: Fields that every entry has.
_REQUIRED = len(Entry._fields) - len(Entry._field_defaults)
