"""Warns of copies that are refused again and again, as the journal finds."""

from __future__ import annotations

from typing import Any
from weakref import ref

from celery.utils.log import get_logger

from celery_singleton_lock import clock, signals
from celery_singleton_lock.errors import FOREIGN, with_label
from celery_singleton_lock.journal_entry import Entry

logger = get_logger(__name__)


class Alerts:
    """Warns in the log and with a signal.

    Args:
        app: the app whose tasks are the senders of the signal.
        blocked_after: refusals in a row after which to warn, and again after twice as many, and so on; 0: never.
    """

    def __init__(self, app: ref[Any], blocked_after: int) -> None:
        self._app = app
        self._blocked_after = blocked_after

    def blocked(self, entry: Entry, in_a_row: int) -> bool:
        """Note that copies were refused `in_a_row` times, last `entry`; whether that was worth a warning."""
        if not (in_a_row and self._blocked_after) or in_a_row % self._blocked_after:
            return False
        times = in_a_row // self._blocked_after
        if times & (times - 1):
            return False  # Not 1, 2, 4, 8...
        held = None if entry.holder is None else max(clock.wall() - entry.holder_since, 0.0)
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
        app = self._app()
        signals.lock_blocked.send(
            sender=None if app is None else app.tasks.get(entry.task),
            task_id=entry.task_id,
            key=entry.key,
            in_a_row=in_a_row,
            holder=entry.holder,
            node=entry.holder_node,
            held=held,
        )
        return True
