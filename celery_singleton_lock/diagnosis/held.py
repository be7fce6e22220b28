"""A held lock, as it is shown to people and to programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock import clock, process_identity
from celery_singleton_lock.errors import FOREIGN, with_label
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal_entry import duration
from celery_singleton_lock.keys.key import is_of_queue, name_in, name_of_beat
from celery_singleton_lock.options.rules import UNTIL_EXPIRED, WHILE_EXECUTING
from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task.queue_lock import is_by_time

#: What to do about a lock whose holder's process has provably ended.
GONE = "its process is gone: celery locks release frees it"


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A held lock.

    Attributes:
        key: the whole key.
        held: the hold, with its holder.
        held_for: seconds since the lock was requested; None if another program wrote the value.
    """

    key: str
    held: Held
    held_for: float | None

    @classmethod
    def of(cls, key: str, held: Held) -> HeldLock:
        return cls(key, held, round(max(clock.wall() - held.holder.since, 0.0), 3) if held.holder else None)

    @property
    def name(self) -> str:
        """The name of the task, or "beat:" and the name of a schedule."""
        return name_in(self.key)

    @property
    def is_queued(self) -> bool:
        """Whether it is the lock of a message, taken when that was sent; no task runs under it."""
        return is_of_queue(self.key) and self.held.holder is not None

    @property
    def is_of_beat(self) -> bool:
        """Whether it only shows that a beat runs; no task runs under it."""
        return self.holder.task_id is None and self.name.startswith(name_of_beat(""))

    @property
    def is_left_behind(self) -> bool:
        """Whether the process of the holder ran on this host and has ended; False if that cannot be proven."""
        return not self.is_queued and process_identity.is_dead(self.holder.process)

    @property
    def holder(self) -> Holder:
        """The holder; an empty one if another program wrote the value."""
        return self.held.holder or Holder()

    @property
    def expires_in(self) -> float | None:
        """Seconds until it expires unless it is renewed; None if never, because another program wrote it that way."""
        return None if math.isinf(self.held.remaining) else round(self.held.remaining, 3)

    @property
    def ttl(self) -> float | None:
        """Seconds by which each renewal extends it; None if it is not renewed, as between two attempts."""
        return None if self.is_queued else self.holder.ttl or None

    @property
    def scope(self) -> str | None:
        """When the lock is held: "queued" until a message has ended, whatever that means for its `lock_scope`; None if
        no task holds it.
        """
        if self.is_queued:
            return UNTIL_EXPIRED if is_by_time(self.held) else "queued"
        return WHILE_EXECUTING if self.holder.task_id else None

    def fields(self) -> dict[str, Any]:
        """For programs. All times are seconds; an unknown value is null, and the pid is 0 if no task runs."""
        return {
            "key": self.key,
            "name": self.name,
            "label": self.holder.label,
            "task_id": self.holder.task_id,
            "node": self.holder.node,
            "pid": self.holder.pid,
            "held_for": self.held_for,
            "expires_in": self.expires_in,
            "ttl": self.ttl,
            "waiters": self.held.waiters,
            "scope": self.scope,
            "superseded_by": self.holder.superseded_by,
            "left_behind": self.is_left_behind,
            "foreign": self.held.holder is None,
        }

    @property
    def shown_name(self) -> str:
        """The lock's name; the whole key of a value that somebody may want to delete."""
        return self.key if self.held.holder is None else self.name

    def __str__(self) -> str:
        return with_label(self.shown_name, self.holder.label)

    @property
    def who(self) -> str:
        """The holder, without the place where it runs."""
        holder = self.held.holder
        if holder is None:
            return FOREIGN
        if holder.task_id is None:
            return "beat" if self.is_of_beat else "nobody (kept)"
        if self.is_queued:
            return f"message of task {holder.task_id} ({self.scope})"
        return f"task {holder.task_id}" if holder.pid else f"kept for task {holder.task_id}"

    def holder_in_words(self) -> str:
        """The holder, and where it runs."""
        if self.is_queued:
            return f"{self.who}, sent from {self.holder.node} {duration(self.held_for or 0)} ago"
        return self.who if self.holder.node is None else f"{self.who} on {self.holder.place}"

    def end_in_words(self) -> str:
        if self.expires_in is None:
            return "never expires"
        if self.is_queued:
            end = " at the latest"
        elif self.ttl:
            end = f" unless renewed (ttl {self.ttl:g} s)"
        else:
            end = "; nobody renews it" if self.held.holder else ""
        return f"expires in {duration(self.expires_in)}{end}"


def held_locks(store: Store, prefix: str) -> list[HeldLock]:
    """The locks with this prefix, by name, key and age; each once, though a search may find a lock twice.

    Raises:
        LockUnavailable: no answer, or an error.
    """
    once = {(key, held.owner): HeldLock.of(key, held) for key, held in store.all_held(prefix)}
    return sorted(once.values(), key=lambda it: (it.name, it.key, it.holder.since, it.held.owner))


def holds_of(store: Store, key: str) -> list[HeldLock]:
    """The holds of one key.

    Raises:
        LockUnavailable: no answer, or an error.
    """
    return [HeldLock.of(key, held) for held in store.held(key)]
