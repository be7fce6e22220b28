"""A hold, with what the main process knows about the run that has it."""

from __future__ import annotations

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.keys.key import name_in
from celery_singleton_lock.lease import Hold


class RunHold(Hold):
    """The hold of a run.

    Attributes:
        task: the task's name; the lock's name if that is unknown.
        holder: who and where it is, and since when it has been running or waiting for the lock.
    """

    __slots__ = ("holder", "task")

    def __init__(self, hold: Hold, holder: Holder, task: str = "") -> None:
        super().__init__(hold.key, hold.owner, ttl=hold.ttl, limit=hold.limit)
        self.holder = holder
        self.task = task or name_in(hold.key)

    def __str__(self) -> str:
        return f"task {self.task}[{self.holder.task_id}] on {self.holder.place}"
