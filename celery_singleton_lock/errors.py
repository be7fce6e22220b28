"""The errors of this package.

All derive from `SingletonLockError`, survive pickle and JSON result backends (their arguments are plain values), and
have the details as attributes. A lock that somebody else holds (`LockConflict`), a lock that was lost (`LockLost`) and
a server that does not answer (`LockUnavailable`) share only the base class: they call for different reactions.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone

from celery.exceptions import ImproperlyConfigured, TaskRevokedError

from celery_singleton_lock import cleaned


def _moment(since: float) -> str:
    return datetime.fromtimestamp(since, timezone.utc).isoformat(" ", "seconds")


def with_label(key: str, label: str) -> str:
    """A key as it is shown to people."""
    return f"{key} ({label})" if label else key


class SingletonLockError(Exception):
    """The base class of every error that this package raises."""


class InvalidOption(SingletonLockError, ImproperlyConfigured):
    """A setting or task option has a value that is not allowed, or a task cannot be exclusive."""


class InvalidKey(SingletonLockError, ValueError):
    """No lock key can be made from the arguments of a call."""


#: The holder of a lock whose value has another form than ours.
FOREIGN = "something that this package did not write"


class LockConflict(SingletonLockError):
    """Another execution holds the lock.

    Attributes:
        key: the key of the lock.
        task_id: the id of the task that holds it, cut to 255 bytes and printable; None if this package did not write
            the key's value; empty if nobody holds the lock, which is left to one that has waited for longer.
        remaining: seconds until the holder's lease ends unless it is renewed; infinite for a key that somebody else
            wrote without a time to live.
        label: a few words about what the digest in the key was made from; empty if unknown.
    """

    _nameless = FOREIGN

    def __init__(self, key: str, task_id: str | None = None, remaining: float | None = 0.0, label: str = "") -> None:
        endless = remaining is None or math.isinf(remaining)
        # The arguments become JSON, which has no infinity: None is used for it.
        Exception.__init__(self, key, task_id, None if endless else remaining, *filter(None, [label]))
        self.key = key
        self.task_id = task_id
        self.remaining = math.inf if remaining is None else remaining
        self.label = label

    def __str__(self) -> str:
        holder = f"task {cleaned.text(self.task_id)}" if self.task_id else self._nameless
        key = with_label(self.key, self.label)
        if self.task_id == "":
            return f"{key} is left to one that has waited for longer"
        if math.isinf(self.remaining):
            return f"{key} is held by {holder}, and never expires"
        return f"{key} is held by {holder}; its lease ends in {self.remaining:.1f} s unless renewed"


class DuplicateTask(SingletonLockError):
    """A message was not sent, because another message that waits or runs has its lock.

    Attributes:
        key: the key of that lock.
        task_id: the id of the task that has it, cut to 255 bytes and printable.
        since: when that message was sent, in seconds since the epoch.
        label: as for a `LockConflict`.
    """

    def __init__(self, key: str, task_id: str, since: float = 0.0, *, label: str = "") -> None:
        Exception.__init__(self, key, task_id, since)
        self.key = key
        self.task_id = task_id
        self.since = since
        self.label = label

    def __str__(self) -> str:
        key = with_label(self.key, self.label)
        return f"{key} is the lock of task {cleaned.text(self.task_id)}, which was sent at {_moment(self.since)}"


class LockSuperseded(SingletonLockError, TaskRevokedError):
    """A newer task with the same key came: this one did not run because it was still waiting, or was stopped.

    Attributes:
        key: the key of the lock.
        task_id: the id of the newest task, cut to 255 bytes and printable; None if it has none.
    """

    def __init__(self, key: str, task_id: str | None = None) -> None:
        Exception.__init__(self, key, task_id)
        self.key = key
        self.task_id = task_id

    def __str__(self) -> str:
        return f"superseded: task {cleaned.text(self.task_id)} is newer, and runs instead under {self.key}"


class LockLost(SingletonLockError):
    """The lease ended, or was about to end without a renewal, while the task was running.

    Attributes:
        key: the key of the lock.
        reason: the cause, in words.
        label: as for a `LockConflict`; also empty in an error of a check by the task itself.
    """

    def __init__(self, key: str, reason: str = "", label: str = "") -> None:
        Exception.__init__(self, key, reason, *filter(None, [label]))
        self.key = key
        self.reason = reason
        self.label = label

    def __str__(self) -> str:
        return f"{with_label(self.key, self.label)}: lock lost while running: {self.reason or 'unknown reason'}"


class LockUnavailable(SingletonLockError):
    """The lock server did not answer, or refused to serve.

    Attributes:
        server: the server's URL without its password.
        reason: the last answer or error, in words.
    """

    def __init__(self, server: str, reason: str = "") -> None:
        Exception.__init__(self, server, reason)
        self.server = server
        self.reason = reason

    def __str__(self) -> str:
        return f"lock server {self.server}: {self.reason or 'no answer'}"


class NewNodes(LockUnavailable):
    """Nodes of a Redlock are new, or came back without their data, and have no vote yet; the log has said so."""


class WrongLockServer(LockUnavailable):
    """The lock server answered that it is one node of a cluster, which nobody has named.

    That is no silence: `on_unavailable="run"` and `on_send_unavailable="send"` are not for it.
    """


class StaleFence(SingletonLockError):
    """A write was refused: a later holder of the lock has written there, or the writer holds no lock at all.

    Attributes:
        target: the target of the write, in words.
        fence: the writer's fencing token; 0 if it holds no lock.
        seen: the highest token that was found there; None if that was not checked.
    """

    def __init__(self, target: str, fence: int, seen: int | None = None) -> None:
        Exception.__init__(self, target, fence, seen)
        self.target = target
        self.fence = fence
        self.seen = seen

    def __str__(self) -> str:
        if not self.fence:
            return f"{self.target}: not written with fence 0, which means that no lock is held"
        return f"{self.target}: not written with fence {self.fence}; a later holder has written with {self.seen}"


class ResultLost(SingletonLockError):
    """The task was carried out and somebody waits for its return value, which is lost.

    Attributes:
        task: the name of the task.
        task_id: the id of the task.
        limit: the most bytes of a return value that are kept beside the lock.
    """

    def __init__(self, task: str, task_id: str, limit: int = 0) -> None:
        super().__init__(task, task_id, limit)
        self.task = task
        self.task_id = task_id
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"task {self.task}[{cleaned.text(self.task_id)}] was carried out by a worker that died before it "
            f"stored the result; the result is larger than the {self.limit} bytes that are kept, or not plain JSON, "
            "and the task does not run again"
        )


class Aborted(BaseException):
    """Raised inside a task whose lock is lost, to stop it; recorded as `LockLost`.

    It is a `BaseException`, like `asyncio.CancelledError`, and for the same reason: an `except Exception` in a task's
    loop must not keep a run going that has lost its lock. Clean up in `finally`, and do not swallow it.
    """
