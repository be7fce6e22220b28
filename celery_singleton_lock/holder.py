"""The owner token, by which a store distinguishes holds, and the holder, which is for people.

Protocol: `docs/protocol.md`, section 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from typing import TypeGuard

from celery_singleton_lock import cleaned

#: The length of an owner token: 128 random bits in hex, so that every script finds it by position.
OWNER_LENGTH = 32

#: The attempt (see `Holder.attempt`) of a message that is neither a retry nor a replacement.
FIRST = (0, 0)

#: The highest value of `Holder.replaced` for a lock that an operator has taken from a task, see `Holder.taken_away`. No
#: message has a negative one, so that no message takes the lock for its own.
NOBODY = -1

#: The places of the parts of a holder that the store writes, or that are left out if they say nothing: all behind the
#: fence.
FENCE, LABEL, ORDER, NEWER = 9, 10, 11, 12

_OWNER = re.compile(rf"[0-9a-f]{{{OWNER_LENGTH}}}")

_dumped = json.JSONEncoder(separators=(",", ":")).encode


def new_owner() -> str:
    """A random owner token, new for every delivery of a message, because a redelivery has the same task id."""
    return os.urandom(OWNER_LENGTH // 2).hex()


def is_owner(text: object) -> TypeGuard[str]:
    """Whether the text has the form of an owner token."""
    return isinstance(text, str) and _OWNER.fullmatch(text) is not None


def mark_of_owner(owner: str) -> str:
    """A name for a hold that may be shown: anybody who has the owner token itself could free the lock."""
    return hashlib.sha256(f"mark:{owner}".encode()).hexdigest()[:32]


# Holders are never changed. Making the class frozen would make creating one five times as slow.
@dataclass(slots=True, unsafe_hash=True)
class Holder:
    """Who holds a lock; for people, and to distinguish a redelivery from another task.

    Attributes:
        task_id: the id of the task; None outside of a task.
        retries: how often the task was retried before.
        node: the worker's node name.
        pid: the process that runs the task.
        since: when it asked for the lock, in seconds since the epoch.
        replaced: how often `Task.replace` passed the task's id on before.
        process: see `process_identity.own`.
        ttl: seconds by which each renewal extends the lock; 0 if it is not renewed, as between two attempts, and for a
            holder that does not hold it yet.
        sending: the name of the sending to which the message belongs, see `message`; by default the task's id.
            All copies of one message have the same sending, and no other message has it.
        record: the name of the message's record; by default its sending.
        label: a few words about what the digest in the lock's key was made from; empty if unknown.
        order: the order of messages (see `stores.base.Arrival`) in which a newer message stops the holder; empty if no
            message may.
        superseded_by: the id of the newer task for which the holder must stop; None if there is none.
    """

    task_id: str | None = None
    retries: int = 0
    node: str | None = None
    pid: int = 0
    since: float = 0.0
    replaced: int = 0
    process: str = ""
    ttl: float = field(default=0.0, compare=False)
    sending: str = ""
    record: str = field(default="", compare=False)
    label: str = field(default="", compare=False)
    order: str = field(default="", compare=False)
    superseded_by: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.sending and self.task_id is not None:
            self.sending = self.task_id

    @property
    def place(self) -> str:
        """Where the holder runs, for people."""
        return f"{self.node} (pid {self.pid})" if self.pid else str(self.node)

    @property
    def attempt(self) -> tuple[int, int]:
        """The place of the message in its sending: a later message has a greater one, copies of a message the same."""
        return self.replaced, self.retries

    @property
    def is_nobody(self) -> bool:
        """Whether an operator has taken the lock from this task, so that nobody gets it before the task is gone."""
        return self.replaced <= NOBODY

    def taken_away(self, node: str) -> Holder:
        """The holder that keeps the lock when an operator takes it from this one."""
        return Holder(
            self.task_id,
            self.retries,
            node,
            since=self.since,
            replaced=NOBODY - self.replaced,
            sending=self.sending,
            label=self.label,
        )

    @property
    def message(self) -> str:
        """A name for the message, the same for each copy."""
        return f"{self.record or self.sending}:{self.replaced}.{self.retries}"

    @property
    def reserved_as(self) -> str:
        """The owner token under which a lock is reserved for this holder's message."""
        # Made from what its copies have in common, so that each copy finds the reservation.
        return hashlib.sha256(f"heir:{self.message}".encode()).hexdigest()[:OWNER_LENGTH]

    @property
    def kept_as(self) -> str:
        """The owner token under which the lock may have been kept for this attempt; empty for the first one."""
        return self.reserved_as if (self.replaced, self.retries) > FIRST else ""

    @property
    def order_member(self) -> str:
        """A name for the sending, if only the newest message of a key should run: the beginning of its hold's value."""
        return f"{_dumped([self.sending, self.task_id])[:-1]},"

    def is_copy_of(self, other: Holder) -> bool:
        """Whether both carry out messages of one sending."""
        return self.sending != "" and self.sending == other.sending

    def dumps(self, ttl: float = 0.0, fence: int = 0) -> str:
        """The text that is kept beside the owner token, in the value of a lock held with this ttl and fence."""
        return self.json_around_fence(ttl).replace("\n", f",{fence}", 1)

    def json_around_fence(self, ttl: float) -> str:
        """The same in two lines: the store replaces the line's end with the fence that it assigns."""
        who = [self.sending, self.task_id, self.retries, self.node, self.pid, float(self.since)]
        after = [self.label, self.order] if self.order else [self.label] if self.label else []
        text = _dumped([*who, self.replaced, self.process, float(ttl), "\n", *after])
        return text.replace(',"\\n"', "\n", 1)  # It is nowhere else: within a text, the quote is escaped.

    @classmethod
    def loads(cls, text: str | bytes) -> Holder | None:
        """The holder as written by `dumps`, also by a later version; None if something else wrote it."""
        fields = cleaned.array(text)
        if fields is None or len(fields) <= FENCE:
            return None
        sending, task_id, retries, node, pid, since, replaced, process, ttl = fields[:FENCE]
        return cls(
            cleaned.text_or_none(task_id),
            cleaned.count(retries),
            cleaned.text_or_none(node),
            cleaned.count(pid),
            cleaned.seconds(since),
            _replaced(replaced),
            cleaned.text(process),
            cleaned.seconds(ttl),
            cleaned.text(sending),
            label=cleaned.text(fields[LABEL]) if len(fields) > LABEL else "",
            order=cleaned.text(fields[ORDER]) if len(fields) > ORDER else "",
            superseded_by=_task_of(fields[NEWER]) if len(fields) > NEWER else None,
        )


def task_of_member(name: bytes) -> str | None:
    """The task's id in what `Holder.order_member` says."""
    fields = cleaned.array(name.rstrip(b",") + b"]")
    return cleaned.text_or_none(fields[1]) if fields is not None and len(fields) > 1 else None


def _replaced(value: object) -> int:
    if isinstance(value, int) and value <= NOBODY:
        return NOBODY - cleaned.count(NOBODY - value)
    return cleaned.count(value)


def _task_of(newer: object) -> str | None:
    """The task id in the part that a store has added for a newer message (see `Holder.order_member`)."""
    return cleaned.text(newer[1]) if isinstance(newer, list) and len(newer) > 1 else None
