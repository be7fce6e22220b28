"""The lock that a call of a task takes."""

from __future__ import annotations

from typing import NamedTuple

from celery_singleton_lock.options.task import Options


class TaskLock(NamedTuple):
    """How, and which.

    Attributes:
        options: how it is taken.
        key: of the lock.
        label: what the digest in the key is of, in a few words; empty where nobody is to see that.
    """

    options: Options
    key: str
    label: str = ""
