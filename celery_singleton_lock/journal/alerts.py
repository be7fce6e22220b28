"""Warns of what the journal finds: copies that are refused again and again, and runs that overlap."""

from __future__ import annotations

from typing import Any
from weakref import ref

from celery.utils.log import get_logger

from celery_singleton_lock import signals
from celery_singleton_lock.errors import FOREIGN, with_label
from celery_singleton_lock.journal_entry import Entry

logger = get_logger(__name__)


class Alerts:
    """Warns in the log and with signals.

    Args:
        app: the app whose tasks are the senders of the signals.
        blocked_after: refusals in a row after which to warn, and again after twice as many, and so on; 0: never.
    """

    def __init__(self, app: ref[Any], blocked_after: int) -> None:
        self._app = app
        self._blocked_after = blocked_after

    def blocked(self, entry: Entry, in_a_row: int) -> bool:
        """Note that copies were refused `in_a_row` times, last `entry`; whether that was worth a warning."""
        if not self._blocked_after or in_a_row % self._blocked_after:
            return False
        times = in_a_row // self._blocked_after
        if times & (times - 1):
            return False  # Not 1, 2, 4, 8...
        held = None if entry.holder is None else max(entry.ended - entry.holder_since, 0.0)
        logger.warning(
            "task %s%s was refused %d times in a row: %s %s",
            entry.task,
            f" (beat's entry {entry.scheduled!r})" if entry.scheduled else "",
            in_a_row,
            with_label(entry.key, entry.label),
            f"is held by {FOREIGN}"
            if held is None
            else f"has been held by task {entry.holder} on {entry.holder_node} for {held:.0f} s",
        )
        details = {"in_a_row": in_a_row, "holder": entry.holder, "node": entry.holder_node, "held": held}
        self._send(signals.lock_blocked, entry, **details)
        return True

    def overlapped(self, entry: Entry, other: Entry) -> None:
        """Two executions held one lock at the same time."""
        seconds = min(entry.ended, other.ended) - max(entry.began, other.began)
        logger.error(
            "%s was held twice at the same time, for %.3f s: by %s and by %s",
            with_label(entry.key, entry.label or other.label),
            seconds,
            _in_words(entry),
            _in_words(other),
        )
        self._send(signals.overlap_detected, entry, seconds=seconds, runs=(entry, other))

    def _send(self, signal: Any, entry: Entry, **details: Any) -> None:
        app = self._app()
        sender = None if app is None else app.tasks.get(entry.task)
        signal.send(sender=sender, task_id=entry.task_id, key=entry.key, **details)


def _in_words(entry: Entry) -> str:
    return f"task {entry.task}[{entry.task_id}] on {entry.node} (pid {entry.pid}, fence {entry.fence})"
