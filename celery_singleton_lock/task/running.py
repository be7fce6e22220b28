"""How far this process has got with each request, and what each thread is doing.

Each header of a message becomes an attribute of its request, whatever its name. So what only this process may say about
a request is kept beside the request, and not in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.task.abort import Body
from celery_singleton_lock.task.celery_types import RequestLike


@dataclass(slots=True, eq=False)
class Progress:
    """How far this process has got with a request. Nothing in here refers to the request: it would then stay forever.

    Attributes:
        lease: the lease under which the body runs, or ran; None without a lock.
        body: the body that runs under the lease.
        in_body: whether the body runs; afterwards, what is sent follows from the message. None if that is not known, as
            of a plain task.
        gives_up: the owner that a copy of the message names as given up: it has asked for the lock without an answer,
            or in a queue, where the request may still be carried out for a moment.
        is_begun: whether the lock that this message brought with it has ended, as its body began, or with it, or
            belongs to what goes on.
        is_replaced: whether another task has its id now.
        is_retried: whether its retry was sent with that lock.
        passes_on: that lock, as what was sent under the message's id has it: its next attempt, or its replacement.
        settle: makes the record say that all was sent; None if there is nothing to say.
    """

    lease: Lease | None = None
    body: Body | None = None
    in_body: bool | None = None
    gives_up: str | None = None
    is_begun: bool = False
    is_replaced: bool = False
    is_retried: bool = False
    passes_on: Hold | None = None
    settle: Callable[[], None] | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the message goes on, with the lock that it brought."""
        return self.is_retried or (self.is_replaced and self.passes_on is not None)


_of_request: WeakKeyDictionary[RequestLike, Progress] = WeakKeyDictionary()


def progress_of(request: RequestLike) -> Progress:
    """How far this process has got with `request`."""
    progress = _of_request.get(request)
    return progress if progress is not None else _of_request.setdefault(request, Progress())


def share(progress: Progress, copy: RequestLike) -> None:
    """Have a copy of a request be as far as that is."""
    _of_request[copy] = progress


class _ThisThread(threading.local):
    """This thread.

    Attributes:
        owners: the owners under which it runs bodies, one inside the other: waiting for them would never end.
    """

    def __init__(self) -> None:
        self.owners: list[str] = []


this_thread = _ThisThread()
