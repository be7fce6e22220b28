"""How far this process has got with each request, and what each thread is in the middle of.

Each header of a message becomes an attribute of its request, whatever it is called. So what only this process may say
of a request does not stand there, but beside it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.task.celery_types import RequestLike


class Unsettled(NamedTuple):
    """A record to be written when all that follows on its message was sent, and where."""

    runtime: Runtime
    key: str
    record: Record


@dataclass(slots=True, eq=False)
class Progress:
    """How far this process has got with a request. Nothing in here refers to the request, which would stay for ever.

    Attributes:
        lease: under which the body runs, or ran; None without a lock.
        in_body: whether the body runs; afterwards, what is sent follows from the message.
        unsettled: None where nothing is to be said.
    """

    lease: Lease | None = None
    in_body: bool = False
    unsettled: Unsettled | None = None


_of_request: WeakKeyDictionary[RequestLike, Progress] = WeakKeyDictionary()


def progress_of(request: RequestLike) -> Progress:
    """How far this process has got with `request`."""
    progress = _of_request.get(request)
    return progress if progress is not None else _of_request.setdefault(request, Progress())


class _ThisThread(threading.local):
    """This thread.

    Attributes:
        owners: under which it runs bodies, one inside the other: to wait for them would be to wait for ever.
    """

    def __init__(self) -> None:
        self.owners: list[str] = []


this_thread = _ThisThread()
