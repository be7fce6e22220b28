"""Collects what happened to the locks of this process, writes it to the journal, and warns of what that counts.

A separate thread writes every few seconds, so no task, no renewal and no caller ever waits for it; a program that ends
writes the rest. If the process is killed, the entries of its last seconds are lost.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks, signals
from celery_singleton_lock.background import BackgroundJob
from celery_singleton_lock.errors import FOREIGN, LockUnavailable, with_label
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal_entry import CRASHED, Entry
from celery_singleton_lock.stores.store import Journal

logger = get_logger(__name__)

#: Seconds from the first entry until it is written, together with all that came meanwhile.
WRITE_AFTER = 5.0

#: Seconds until a failed write is tried again.
RETRY_AFTER = 15.0

#: The most entries that are kept until the next write; if there are more, only their counts are kept.
MOST = 500


class JournalWriter:
    """Collects entries and writes them; warns, in the log and with a signal, of copies that are refused in a row.

    Args:
        journal: where to write; None: nothing is collected.
        app: the app whose tasks are the senders of the signal; None once it is gone.
        blocked_after: refusals in a row after which to warn, and again after twice as many, and so on; 0: never.
    """

    def __init__(self, journal: Journal | None, app: Callable[[], Any], blocked_after: int) -> None:
        self._journal, self._app, self._blocked_after = journal, app, blocked_after
        self._job = BackgroundJob("singleton-lock-journal", self._write_later, after=WRITE_AFTER)
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        # Reentrant: a signal's handler may have interrupted `add`, and run a task itself.
        self._mutex, self._writing = threading.RLock(), threading.RLock()
        #: Those that are not counted yet; then the counts of the others, and the latest of those.
        self._new: list[Entry] = []
        self._counts: Counter[metrics.Count] = Counter()
        self._entries: deque[Entry] = deque(maxlen=MOST)

    def add(self, entry: Entry, *, at_once: bool = False) -> None:
        """Count an entry and keep it for the journal; its times are of this host's clock.

        A thread writes it later; or, with `at_once`, this call does, for a caller that may look for leftover threads.
        """
        if self._journal is None:
            return
        with self._mutex:
            self._new.append(entry)
            if len(self._new) >= MOST:
                self._count()
        if at_once:
            self.write()
        else:
            self._job.schedule()

    def write(self) -> bool:
        """Write what was collected; False if that failed."""
        if self._journal is None:
            return True
        with self._writing:
            with self._mutex:
                self._count()
                counts, entries = self._counts, list(self._entries)
                self._counts = Counter()
                self._entries.clear()
            if not counts and not entries:  # No server is asked: a process that ends must not wait for a silent one.
                return True
            try:
                self._write(self._journal, counts, entries)
            except LockUnavailable as error:
                logger.debug("journal: not written, trying again: %s", error)
                with self._mutex:
                    # Some may have been written: better to count them twice than not at all.
                    self._counts.update(counts)
                    self._entries.extendleft(reversed(entries[: MOST - len(self._entries)]))
                return False
            return True

    def _write_later(self) -> float | None:
        if not self.write():
            return RETRY_AFTER
        return WRITE_AFTER if self._counts or self._new else None

    def _count(self) -> None:
        """Count the new entries; not as they come, so that no task waits for it."""
        new, self._new = self._new, []
        for entry in new:
            for count, by in metrics.of(entry):
                self._counts[count] += by
        self._entries.extend(new)

    def _write(self, journal: Journal, counts: Counter[metrics.Count], entries: list[Entry]) -> None:
        # Cleaned here, so that no task waits for it: what came from a sender was bounded when the entry was made.
        entries = [entry.cleaned() for entry in entries]
        rows = journal.write({metrics.dumps(count): by for count, by in counts.items()}, entries, now=clock.now())
        for entry, in_a_row in zip(entries, rows, strict=True):
            if self._is_worth_a_warning(in_a_row):
                self._warn(entry, in_a_row)
                with self._mutex:
                    self._counts[metrics.Count("blocked", entry.task)] += 1

    def _is_worth_a_warning(self, in_a_row: int) -> bool:
        if not (in_a_row and self._blocked_after):
            return False
        times, rest = divmod(in_a_row, self._blocked_after)
        return not (rest or times & (times - 1))  # 1, 2, 4, 8...

    def _warn(self, entry: Entry, in_a_row: int) -> None:
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


def crash(task: str, key: str, holder: Holder | None, *, limit: int, fence: int = 0) -> Entry:
    """The entry of a lock that was freed because the process of its holder, on this host, had died.

    Args:
        task: the task's name, or the lock's name if that is unknown.
        key: the key of the lock.
        holder: the holder; None if it is unknown.
        limit: how many may hold the lock at once.
        fence: the fence of its lease; 0 if unknown.
    """
    now = clock.now()
    if holder is None or not is_of_run(holder):
        return Entry("free", task, key, None, None, os.getpid(), now, now, limit=limit)
    began = now - max(clock.wall() - holder.since, 0.0)
    where = holder.task_id, holder.node, holder.pid
    return Entry("free", task, key, *where, began, now, outcome=CRASHED, fence=fence, limit=limit, label=holder.label)


def is_of_run(holder: Holder) -> bool:
    """Whether a process held the lock to run a task, and it is known since when; not one that is kept for a retry."""
    return bool(holder.task_id and holder.pid and holder.ttl and holder.since)
