"""An entry of the journal: what happened to one copy of a message, or to a call that is a duplicate. For people, it has
words, a sign in a picture, and the colour of both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from celery_singleton_lock import cleaned

#: What happened to the copy: it ran; it was refused according to `on_conflict`, or waits, perhaps for the message that
#: it follows; it ended as the task that it had joined or followed; a newer message came while it waited; it was on
#: stand-by for a copy that runs elsewhere, or was dropped because of one; it ended like another copy that had finished;
#: its lock was freed because its process had died. Or it is no copy: a call was a duplicate of another message.
Waiting = Literal["retry", "rerun", "replace", "join", "follow"]
Kind = Literal[
    "run", "skip", "raise", "reject", Waiting, "joined", "superseded", "stand-by", "drop", "repeat", "free", "duplicate"
]

KINDS: tuple[Kind, ...] = get_args(Kind)

#: The outcomes of a run that was stopped: because its lock was lost, because its process was being stopped, and because
#: of a newer message.
LOST, STOPPED, SUPERSEDED = "LOST", "STOPPED", "SUPERSEDED"

#: The outcome of a run whose process died; the kind of its entry is "free".
CRASHED = "CRASHED"

#: The kinds of copies that were not carried out, and will not be.
REFUSALS: tuple[Kind, ...] = ("skip", "raise", "reject")

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class Entry(NamedTuple):
    """What happened to one copy; the journal stores the fields in this order.

    Attributes:
        kind: see `Kind`.
        task: the task's name.
        key: the key of the lock.
        task_id: the task id of the copy; of a "free" entry, that of the run that died; None for a duplicate that was
            not sent.
        node, pid: where it was: the worker's node name, and the process.
        began, ended: when the body ran; for a copy that did not run, when it asked for the lock and when it had its
            answer. Seconds on one clock: this host's until the entry is written, when they become seconds before that;
            for readers the server's.
        waited: seconds of waiting for the lock; for a run, since its message first met a conflict.
        outcome: for a run: Celery's state for it, LOST, STOPPED or SUPERSEDED; for a "free" entry CRASHED, or '' if
            nothing is known about the run that died; for a duplicate: what the caller got, as in `on_duplicate`, or
            "follow" for a part of a canvas.
        fence, renewals: the fence of a run's lease, and how often it was renewed.
        limit: how many may hold the lock at once.
        holder, holder_node, holder_since: the task that had the lock meanwhile, where it ran, and since when.
        scheduled: the entry of beat's schedule for which it was sent; '' if there is none, or for another kind of beat.
        label: a few words about what the digest in the key was made from; '' if unknown.
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

    @property
    def ran(self) -> bool:
        """Whether it is about a run, and says when that began: one that has ended, or died with its process."""
        return self.kind == "run" or self.outcome == CRASHED

    def mirrored(self, moment: float) -> Entry:
        """The same entry with its times as seconds before a moment; or, of such an entry, with times on its clock."""
        return self._replace(began=max(moment - self.began, 0.0), ended=max(moment - self.ended, 0.0))

    def cleaned(self) -> Entry:
        """The same entry, made safe to keep and show, whatever is in it."""
        return Entry(*(clean(value) for clean, value in zip(_CLEAN.values(), self, strict=True)))

    def dumps(self, now: float) -> str:
        """The entry for the journal; `now` is the present on the clock of its times."""
        return _encode(self.mirrored(now))

    @classmethod
    def loads(cls, text: str | bytes, written: float) -> Entry | None:
        """The entry as written by `dumps` at that moment, also by a later version, which may have more fields.

        None if something else wrote it, or if a later version wrote it with a kind that is unknown here.
        """
        fields = cleaned.array(text)
        if fields is None or len(fields) < len(cls._fields) or fields[0] not in KINDS:
            return None
        return cls(*fields[: len(cls._fields)]).cleaned().mirrored(written)


#: How each field is cleaned; the kind was checked before.
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


#: The sign of a copy that was refused.
REFUSED = "\u00d7"

#: The outcome of a run that has not ended.
RUNNING = "running"


class Ending(NamedTuple):
    """How an entry is shown.

    Attributes:
        tone: its class in the style sheet.
        sign: its mark in a timeline; '' for a run, which is a bar.
        text: what happened.
    """

    tone: str
    sign: str
    text: str


_OUTCOMES: Mapping[str, Ending] = {
    "SUCCESS": Ending("good", "", "ran"),
    "FAILURE": Ending("bad", "", "failed"),
    "RETRY": Ending("again", "", "ran, and will be retried"),
    LOST: Ending("lost", "", "lost its lock and was stopped"),
    STOPPED: Ending("lost", "", "was stopped with its process"),
    SUPERSEDED: Ending("lost", "", "was stopped for a newer message"),
    CRASHED: Ending("lost", "†", "crashed: its process died"),
    RUNNING: Ending("now", "", "running"),
}

_KINDS: Mapping[Kind, Ending] = {
    "skip": Ending("bad", REFUSED, "skipped"),
    "raise": Ending("bad", REFUSED, "refused with an error"),
    "reject": Ending("bad", REFUSED, "rejected"),
    "retry": Ending("again", "↻", "requeued, to be tried again"),
    "rerun": Ending("again", "↻", "put off until after the run, with the newest arguments"),
    "replace": Ending("again", "↻", "put off until the run has stopped for it"),
    "join": Ending("again", "↻", "joined the run"),
    "follow": Ending("again", "↻", "follows the message that has the lock"),
    "joined": Ending("again", "=", "ended as the task that it had joined"),
    "superseded": Ending("again", "»", "superseded by a newer message"),
    "stand-by": Ending("again", "↻", "stood by: another copy of this message runs"),
    "drop": Ending("again", "↻", "dropped: another copy of this message ran"),
    "repeat": Ending("again", "↻", "ended as another copy of this message had"),
    "free": Ending("lost", "†", "lock freed: its process had died"),
    "duplicate": Ending("again", "≡", "duplicate, not sent"),
}

#: What a duplicate's caller got, if its message was sent all the same.
_SENT = {
    "replace": "duplicate, sent in place of the message that waited",
    "follow": "duplicate, sent to end as the message that has the lock",
}


def ending(entry: Entry) -> Ending:
    """What happened to the copy."""
    if entry.ran:
        return _OUTCOMES.get(entry.outcome) or Ending("bad", "", f"ran: {entry.outcome.lower()}")
    found = _KINDS[entry.kind]
    if entry.kind != "duplicate" or not entry.outcome:
        return found
    return found._replace(text=_SENT.get(entry.outcome) or f"{found.text} ({entry.outcome})")


def seconds(value: float) -> str:
    """A time as it is measured: three digits, and milliseconds below a second."""
    if value >= 1000:
        return duration(value)
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def duration(seconds: float) -> str:
    """A time in whole units, for people."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
