"""The message that another one follows, as the header of the follower names it.

It has the lock that the follower was refused as that was sent. What is known of it then is its id and that lock; what
it is as it runs, it says itself, in a record beside its lock, as it frees that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import may_be_asked
from celery_singleton_lock.holder import OWNER_LENGTH, Holder, is_owner, stem
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import UNTIL_EXPIRED
from celery_singleton_lock.options.task import raw_attribute
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task.joined import Joined
from celery_singleton_lock.task.outcome import Outcome, read

#: In the place of a state, in the record that names the one as which followers end in a leader's place.
FOLLOWED = "FOLLOWED"


class Run(NamedTuple):
    """A message as it runs.

    Attributes:
        key: of the lock of its run.
        joined: the attempt whose end counts.
    """

    task: str
    key: str
    joined: Joined


class Leader(NamedTuple):
    """The message that is followed.

    Attributes:
        token: stands for its lock.
        since: when it was sent, seconds since the epoch.
        run: what it is as it runs; None while that is not known.
    """

    task_id: str
    token: str
    since: float
    run: Run | None = None

    @classmethod
    def of(cls, held: Held) -> Leader | None:
        """The message that has a lock; None if that is no message."""
        if held.holder is None or held.holder.task_id is None:
            return None
        return cls(held.holder.task_id, token_of(held.owner), held.holder.since)

    @classmethod
    def read(cls, value: object) -> Leader | None:
        """As it is in a header, or a record; None for what others wrote."""
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
        """As it is in a header.

        Not as it is in its own message: a search for that message must not find it here.
        """
        run = None if self.run is None else [self.run.task, self.run.key, list(self.run.joined)]
        return [self.task_id.encode().hex(), self.token, self.since, run]

    def has(self, held: Held) -> bool:
        """Whether the lock is its own: also as its next attempt has taken it."""
        is_of_task = held.holder is not None and held.holder.task_id == self.task_id
        return is_of_task or token_of(held.owner) == self.token

    @property
    def heirs_name(self) -> Holder:
        """Under which name the message is recorded that is followed in its place."""
        return Holder(record=f"heir:{self.token}")


def token_of(owner: str) -> str:
    """What stands for the lock of this owner."""
    # Of what a Redlock shows as the owner: each attempt to get a majority has a name of its own.
    return hashlib.sha256(stem(owner).encode()).hexdigest()[:OWNER_LENGTH]


def named(token: str) -> Holder:
    """Under which name it is recorded what the message is as it runs."""
    return Holder(record=f"runs:{token}")


def record(name: Holder, content: Sequence[Any], seconds: float) -> Record:
    """Something about a leader, for its followers."""
    return Outcome(FOLLOWED, json.dumps(content).encode()).record_of(name, seconds)


def recorded(found: Record | None) -> list[Any] | None:
    """What such a record says; None for none, or what others wrote."""
    if found is None:
        return None
    outcome, _ = read(found)
    return cleaned.array(outcome.content) if outcome.state == FOLLOWED and outcome.content is not None else None


def run_in(found: Record | None) -> Run | None:
    """What a message is as it runs, as it has recorded that."""
    return _run(recorded(found))


def may_be_followed(task: Any, settings: Settings, scope: str) -> bool:
    """Whether a worker can tell how another message of the task has ended."""
    if raw_attribute(task, "ignore_result") or settings.done_ttl <= 0 or not may_be_asked(task.backend):
        return False
    # That one never says what it is as it runs, so it has to be known whose result has its id.
    return scope != UNTIL_EXPIRED or not raw_attribute(task, "lock_name")


def _run(value: object) -> Run | None:
    if not isinstance(value, (list, tuple)) or len(value) < len(Run._fields):
        return None
    task, key, joined = value[: len(Run._fields)]
    found = Joined.read(joined)
    if found is None or not (isinstance(task, str) and isinstance(key, str) and key == cleaned.key(key)):
        return None
    return Run(cleaned.text(task), key, found)
