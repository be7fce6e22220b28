"""The task that a copy has joined, as the header of the copy names it."""

from __future__ import annotations

from typing import NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock.holder import NOBODY, Holder
from celery_singleton_lock.task import message_identity


class Joined(NamedTuple):
    """The attempt of a task whose end is awaited.

    Attributes:
        replaced, retries: which of the messages of that sending.
        since: when it got the lock, which distinguishes its deliveries; 0 if that is not known.
        goes_on: whether an earlier attempt has ended: this one may run later, while others have the lock.
    """

    task_id: str
    sending: str
    replaced: int
    retries: int
    since: float
    goes_on: bool = False

    @classmethod
    def of(cls, holder: Holder) -> Joined | None:
        """The holder of a lock, or the task from which an operator has taken it; None if that is not a task."""
        if holder.task_id is None or not holder.sending:
            return None
        replaced = NOBODY - holder.replaced if holder.is_nobody else holder.replaced
        # If no process has the lock, it is kept for an attempt that has not begun, or rests.
        since = holder.since if holder.pid or holder.is_nobody else 0.0
        return cls(holder.task_id, holder.sending, replaced, holder.retries, since)

    @classmethod
    def read(cls, value: object) -> Joined | None:
        """Read the value of a header; None if others wrote it."""
        if not isinstance(value, (list, tuple)) or len(value) < len(cls._fields):
            return None
        task_id, sending, replaced, retries, since, goes_on = value[: len(cls._fields)]
        if not (isinstance(task_id, str) and isinstance(sending, str) and task_id and sending):
            return None
        return cls(
            cleaned.text(task_id),
            cleaned.text(sending),
            cleaned.count(replaced),
            cleaned.count(retries),
            cleaned.seconds(since),
            goes_on is True,
        )

    def message(self, task_name: str) -> str:
        """The name of its message (see `Holder.message`), if that is a message of the task `task_name`."""
        record = message_identity.record_name(task_name, self.task_id, self.sending)
        return Holder(
            self.task_id, retries=self.retries, replaced=self.replaced, sending=self.sending, record=record
        ).message

    def name_of_begin(self, task_name: str) -> Holder:
        """The name under which it is recorded since when this attempt has had the lock."""
        return Holder(record=f"began:{self.message(task_name)}")

    def has_begun_as(self, holder: Holder) -> bool:
        """Whether the holder of a lock is this attempt; not if the lock is merely kept for it."""
        attempt = holder.sending, holder.replaced, holder.retries
        return holder.pid != 0 and attempt == (self.sending, self.replaced, self.retries)

    def next_attempt(self) -> Joined:
        return self._replace(retries=self.retries + 1, since=0.0, goes_on=True)

    def attempt_before(self) -> Joined:
        return self._replace(retries=max(self.retries - 1, 0))
