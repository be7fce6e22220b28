"""An entry of the journal: what became of one copy of a message."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


class Place(NamedTuple):
    """Where a copy was: the worker's node name, and the process."""

    node: str | None
    pid: int


class Times(NamedTuple):
    """When the body ran; of a copy that did not run, when it asked for the lock and when it had its answer.

    Attributes:
        began, ended: seconds on one clock: of this host until it is written, then the server's.
        waited: seconds for the lock.
    """

    began: float
    ended: float
    waited: float = 0.0

    def moved(self, offset: float) -> Times:
        """The same on a clock that is ahead by so much."""
        return self._replace(began=self.began + offset, ended=self.ended + offset)


class Run(NamedTuple):
    """How a run ended: Celery's state for it, LOST or STOPPED; the fence and the renewals of its lease."""

    outcome: str = ""
    fence: int = 0
    renewals: int = 0


class Blocker(NamedTuple):
    """The task that had the lock meanwhile, the node on which it ran, and since when."""

    task_id: str | None = None
    node: str | None = None
    since: float = 0.0


NO_RUN, NOBODY = Run(), Blocker()


class _Parts(NamedTuple):
    kind: Kind
    task: str
    key: str
    task_id: str | None
    place: Place
    times: Times
    run: Run = NO_RUN
    limit: int = 1
    blocker: Blocker = NOBODY
    scheduled: str = ""


class Entry(_Parts):
    """What became of one copy. What is in the groups can be read without them, too: `entry.began`.

    Attributes:
        kind: see `Kind`.
        task: the task's name.
        key: of the lock.
        task_id: of the copy.
        place: the worker, and the process: `node` and `pid`.
        times: `began`, `ended` and `waited`.
        run: `outcome`, `fence` and `renewals`.
        limit: how many may hold the lock at once.
        blocker: who had the lock: `holder`, `holder_node` and `holder_since`.
        scheduled: the entry of beat's schedule that it was sent for; '' where it was not, or by another beat than ours.
    """

    __slots__ = ()

    # As the receivers of `overlap_detected` know them.
    node, pid = property(lambda self: self.place.node), property(lambda self: self.place.pid)
    began, ended = property(lambda self: self.times.began), property(lambda self: self.times.ended)
    waited, outcome = property(lambda self: self.times.waited), property(lambda self: self.run.outcome)
    fence, renewals = property(lambda self: self.run.fence), property(lambda self: self.run.renewals)
    holder, holder_node = property(lambda self: self.blocker.task_id), property(lambda self: self.blocker.node)
    holder_since = property(lambda self: self.blocker.since)

    def cleaned(self) -> Entry:
        """The same, whatever is in it, as it may be kept and shown."""
        return _made_of(self._flat())

    def dumps(self) -> str:
        """As it stands in the journal."""
        return _encode(self._flat())

    @classmethod
    def loads(cls, text: str | bytes) -> Entry | None:
        """The entry as written by `dumps`, also by a later version, which may have more fields.

        None when somebody else wrote it, or when a later version did of a kind that is unknown here.
        """
        fields = cleaned.array(text)
        if fields is None or len(fields) < _REQUIRED or fields[0] not in KINDS:
            return None
        return _made_of([*fields, *_LEAST[len(fields) :]])

    def _flat(self) -> list[Any]:
        """As they stand in the journal, one behind the other."""
        copy = (self.kind, self.task, self.key, self.task_id, *self.place, *self.times)
        return [*copy, *self.run, self.limit, *self.blocker, self.scheduled]


def _made_of(fields: Sequence[Any]) -> Entry:
    """The entry of these fields; of what comes behind those that are known here, a later version knows more."""
    values = [clean(value) for clean, value in zip(_CLEAN, fields, strict=False)]
    kind, task, key, task_id, node, pid, began, ended, waited, outcome, fence, renewals, limit, *blocker, scheduled = (
        values
    )
    place, times, run = Place(node, pid), Times(began, ended, waited), Run(outcome, fence, renewals)
    return Entry(kind, task, key, task_id, place, times, run, limit, Blocker(*blocker), scheduled)


#: How each field is cleaned; of the kind it is known that it is one.
_CLEAN: Sequence[Callable[[Any], Any]] = [
    str,
    cleaned.text,
    cleaned.key,
    cleaned.text_or_none,
    cleaned.text_or_none,
    cleaned.count,
    cleaned.seconds,
    cleaned.seconds,
    cleaned.seconds,
    cleaned.text,
    cleaned.count,
    cleaned.count,
    cleaned.count,
    cleaned.text_or_none,
    cleaned.text_or_none,
    cleaned.seconds,
    cleaned.text,
]

#: What an entry has at least, and the fields that it has for those that an earlier version did not write.
_REQUIRED, _LEAST = 8, Entry("run", "", "", None, Place(None, 0), Times(0.0, 0.0))._flat()
