"""The entry of a run that died with its process: whoever frees its lock writes it."""

from __future__ import annotations

import os

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal_entry import CRASHED, Entry


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
