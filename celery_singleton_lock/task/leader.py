"""The message that another one follows, as the header of the follower names it.

The leader has the lock that the follower was refused when it was sent. At that time only the leader's id and its lock
are known. The leader itself names its run, in a record beside its lock, as it frees the lock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import may_be_asked
from celery_singleton_lock.holder import OWNER_LENGTH, Holder, is_owner
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import UNTIL_EXPIRED
from celery_singleton_lock.options.task import raw_attribute
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task.joined import Joined
from celery_singleton_lock.task.outcome import Outcome, read

#: Takes the place of a state in the records that a leader's followers read.
FOLLOWED = "FOLLOWED"


class RunIdentity(NamedTuple):
    """A message as it runs.

    Attributes:
        key: the key of the lock of its run.
        joined: the attempt whose end counts.
    """

    task: str
    key: str
    joined: Joined


class Leader(NamedTuple):
    """The message that is followed.

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
                return cls(task_id, token, cleaned.seconds(since), _run(run))
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


def token_of(owner: str) -> str:
    """The token of this owner's lock."""
    return hashlib.sha256(owner.encode()).hexdigest()[:OWNER_LENGTH]


def named(token: str) -> Holder:
    """The name under which the leader's run is recorded."""
    return Holder(record=f"runs:{token}", retries=1)  # As of a follower that takes the lock: see `holder_of_message`.


def record(name: Holder, content: Sequence[Any], seconds: float) -> Record:
    """Something about a leader, for its followers."""
    return Outcome(FOLLOWED, json.dumps(content).encode()).record_of(name, seconds)


def recorded(found: Record | None) -> list[Any] | None:
    """What such a record says; None if there is none, or others wrote it."""
    if found is None:
        return None
    outcome, _ = read(found)
    return cleaned.array(outcome.content) if outcome.state == FOLLOWED and outcome.content is not None else None


def run_in(found: Record | None) -> RunIdentity | None:
    """A message's run, as the message has recorded it."""
    return _run(recorded(found))


def may_be_followed(task: Any, settings: Settings, scope: str) -> bool:
    """Whether a worker can tell how another message of the task has ended."""
    if raw_attribute(task, "ignore_result") or settings.done_ttl <= 0 or not may_be_asked(task.backend):
        return False
    # A leader with that scope never names its run, so it must be known which task's result has its id.
    return scope != UNTIL_EXPIRED or not raw_attribute(task, "lock_name")


def _run(value: object) -> RunIdentity | None:
    if not isinstance(value, (list, tuple)) or len(value) < len(RunIdentity._fields):
        return None
    task, key, joined = value[: len(RunIdentity._fields)]
    found = Joined.read(joined)
    if found is None or not (isinstance(task, str) and isinstance(key, str) and key == cleaned.key(key)):
        return None
    return RunIdentity(cleaned.text(task), key, found)
