"""What happened to a copy, for people: in words, as a sign in a picture, and the colour of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from celery_singleton_lock.journal_entry import CRASHED, LOST, STOPPED, SUPERSEDED, Entry, Kind

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
