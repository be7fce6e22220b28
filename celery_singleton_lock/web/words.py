"""What happened to a copy, and why, in words."""

from __future__ import annotations

from collections.abc import Mapping

from celery_singleton_lock.journal_entry import CRASHED, LOST, STOPPED, SUPERSEDED, Entry, Kind

_OUTCOMES = {
    "SUCCESS": "ran",
    "FAILURE": "ran and failed",
    "RETRY": "ran, and will be retried",
    LOST: "lost its lock and was stopped",
    STOPPED: "was stopped with its process",
    SUPERSEDED: "was stopped for a newer message",
    CRASHED: "died with its process; its lock was freed",
}

_ENDINGS: Mapping[Kind, str] = {
    "skip": "skipped",
    "raise": "refused with an error",
    "reject": "rejected",
    "retry": "requeued, to be tried again",
    "rerun": "put off until after the run, with the newest arguments",
    "replace": "put off until the run has stopped for it",
    "join": "joined the run",
    "follow": "follows the message that has the lock",
    "joined": "ended as the task that it had joined",
    "superseded": "superseded by a newer message",
    "stand-by": "stood by: another copy of this message runs",
    "drop": "dropped: another copy of this message ran",
    "repeat": "ended as another copy of this message had",
    "free": "lock freed: its process had died",
    "duplicate": "a duplicate, not sent",
}

#: What a duplicate's caller got, if its message was sent all the same.
_SENT = {
    "replace": "a duplicate, sent in place of the message that waited",
    "follow": "a duplicate, sent to end as the message that has the lock",
}


def ending(entry: Entry) -> str:
    """What happened to the copy."""
    if entry.ran:
        return _OUTCOMES.get(entry.outcome, f"ran: {entry.outcome.lower()}")
    if entry.kind == "duplicate":
        return _SENT.get(entry.outcome, _ENDINGS[entry.kind])
    return _ENDINGS.get(entry.kind, entry.kind)


def tone(entry: Entry) -> str:
    """The entry's class in the style sheet."""
    if entry.kind == "run":
        return {"SUCCESS": "good", "RETRY": "again", LOST: "lost", STOPPED: "lost", SUPERSEDED: "lost"}.get(
            entry.outcome, "bad"
        )
    return {"skip": "bad", "raise": "bad", "reject": "bad", "free": "lost"}.get(entry.kind, "again")
