"""The messages that a message waits for, as its header names them."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock.holder import NOBODY, OWNER_LENGTH, Holder, is_owner
from celery_singleton_lock.stores.base import Held

#: A task id that a record's name shows; a longer one, or one with other characters, is left out.
_SHOWN = re.compile(r"[\w.-]{1,64}", re.ASCII)


def digest(*parts: object) -> str:
    """A name made of parts that JSON can hold, in hex digits."""
    return hashlib.blake2b(ascii(parts).encode(), digest_size=16).hexdigest()


def record_name(task: str, task_id: object, sending: str) -> str:
    """The name of the record of a message of this task; it begins with the task id, which people know."""
    own = digest(task, sending)
    # What has the same id and key is seldom more than one message, and each character of a key costs memory.
    return f"{task_id}:{own[:10]}" if isinstance(task_id, str) and _SHOWN.fullmatch(task_id) else f"-:{own}"


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
        record = record_name(task_name, self.task_id, self.sending)
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


class RunIdentity(NamedTuple):
    """A message as it runs.

    Attributes:
        key: the key of the lock of its run.
        joined: the attempt whose end counts.
    """

    task: str
    key: str
    joined: Joined

    @classmethod
    def read(cls, value: object) -> RunIdentity | None:
        """Read a part of a leader, or what a record says; None if others wrote it."""
        if not isinstance(value, (list, tuple)) or len(value) < len(cls._fields):
            return None
        task, key, joined = value[: len(cls._fields)]
        found = Joined.read(joined)
        if found is None or not (isinstance(task, str) and isinstance(key, str) and key == cleaned.key(key)):
            return None
        return cls(cleaned.text(task), key, found)


class Leader(NamedTuple):
    """The message that another one, its follower, is to end as. It has the lock that the follower was refused when it
    was sent: then, only its id and its lock are known. It names its run itself, in a record, as it frees the lock.

    Attributes:
        token: identifies its lock.
        since: when it was sent, seconds since the epoch.
        run: its run; None while that is not known.
    """

    task_id: str
    token: str
    since: float
    run: RunIdentity | None = None

    @classmethod
    def of(cls, held: Held) -> Leader | None:
        """The message that has a lock; None if the holder is not a message."""
        if held.holder is None or held.holder.task_id is None:
            return None
        return cls(held.holder.task_id, token_of(held.owner), held.holder.since)

    @classmethod
    def read(cls, value: object) -> Leader | None:
        """Read the value of a header or a record; None if others wrote it."""
        if not isinstance(value, (list, tuple)) or len(value) < len(cls._fields):
            return None
        hidden, token, since, run = value[: len(cls._fields)]
        if not (isinstance(hidden, str) and is_owner(token)):
            return None
        with suppress(ValueError):
            if task_id := cleaned.text(bytes.fromhex(hidden).decode()):
                return cls(task_id, token, cleaned.seconds(since), RunIdentity.read(run))
        return None

    def header(self) -> list[Any]:
        """Its value for a header.

        The id does not look as it does in its own message: a search for that message must not find it here.
        """
        run = None if self.run is None else [self.run.task, self.run.key, list(self.run.joined)]
        return [self.task_id.encode().hex(), self.token, self.since, run]

    def has(self, held: Held) -> bool:
        """Whether the lock is its own, also if its next attempt has taken it."""
        is_of_task = held.holder is not None and held.holder.task_id == self.task_id
        return is_of_task or token_of(held.owner) == self.token

    @property
    def heirs_name(self) -> Holder:
        """The name under which the message to follow in its place is recorded."""
        return Holder(record=f"heir:{self.token}")

    @property
    def name_of_run(self) -> Holder:
        """The name under which its run is recorded."""
        return name_of_run(self.token)


def token_of(owner: str) -> str:
    """The token of this owner's lock."""
    return hashlib.sha256(owner.encode()).hexdigest()[:OWNER_LENGTH]


def name_of_run(token: str) -> Holder:
    """The name under which the run of the message is recorded that has, or had, the lock of this token."""
    return Holder(record=f"runs:{token}", retries=1)  # As of a follower that takes the lock: see `holder_of_message`.
