"""Celery's tasks and requests, as far as this package uses them, and the lock that a task takes for a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from celery_singleton_lock.options.task import Options


class RequestLike(Protocol):
    """A message on its way through a worker, or a call by `apply`: Celery's `Context`.

    What a message contains may be anything: such parts are `Any`, and are cleaned where they are read.
    """

    id: Any
    root_id: Any
    parent_id: Any
    retries: Any
    eta: Any
    expires: Any
    headers: Any
    callbacks: Any
    errbacks: Any
    chain: Any
    chord: Any
    #: About this delivery: the worker or `apply` writes it, and no sender can; read in `delivery`.
    delivery_info: Any
    properties: Any
    hostname: Any
    is_eager: bool
    called_directly: bool


class TaskLock(NamedTuple):
    """The lock that a call of a task takes.

    Attributes:
        options: how it is taken.
        key: the lock's key.
        label: what the digest in the key is made of, in a few words; empty if nobody is to see that.
    """

    options: Options
    key: str
    label: str = ""


class TaskLike(Protocol):
    """An exclusive task."""

    name: str
    acks_late: bool
    acks_on_failure_or_timeout: bool
    tracks_started: ClassVar[bool]

    @property
    def app(self) -> Any: ...

    @property
    def request(self) -> RequestLike: ...

    @property
    def backend(self) -> Any: ...

    @property
    def retry(self) -> Callable[..., Any]: ...

    @property
    def signature_from_request(self) -> Callable[..., Any]: ...

    def lock_options(self, request: RequestLike) -> Options | None: ...

    def lock_of(self, request: RequestLike, args: Any, kwargs: Mapping[str, Any]) -> TaskLock | None: ...
