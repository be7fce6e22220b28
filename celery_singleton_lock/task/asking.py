"""Requests the lock of a message while the message is made: both take their time, on different machines.

Celery makes a message first, and asks for a producer to send it with then. Ours is there as soon as the lock is had: so
nothing leaves before, nor does anybody hear of it.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from kombu.exceptions import LimitExceeded

from celery_singleton_lock._celery import sends_by_its_producer
from celery_singleton_lock.errors import DuplicateTask, LockUnavailable
from celery_singleton_lock.stores.base import Asked, Held, LockRequest
from celery_singleton_lock.stores.store import Store


class Asking:
    """A lock that was asked for (`with`: until its message was sent, or is not).

    Attributes:
        refusal: why it is not had; None before the answer, and where it is had.
        found: its holder, if that is another message.
    """

    def __init__(self, store: Store, request: LockRequest) -> None:
        self.refusal: DuplicateTask | LockUnavailable | None = None
        self.found: Held | None = None
        self._store = store
        self._request = request
        self._is_answered = False
        self._asked: Asked | None = None

    def __enter__(self) -> Asking:
        if (ask := getattr(self._store, "ask", None)) is not None:
            try:
                self._asked = ask(self._request)
            except BaseException as error:  # An interruption, before it was sent or after that: nobody waits for it.
                self._store.abandon(self._request.hold())
                self.refusal = error if isinstance(error, LockUnavailable) else None
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._asked is not None and not self._is_answered:
            self._asked.drop()
        if error is not None and error is not self.refusal:  # The caller takes it for not sent.
            self._store.abandon(self._request.hold())

    def wait(self) -> None:
        """Return when the lock is had.

        Raises:
            DuplicateTask: another message has it.
            LockUnavailable: no answer, or a foreign value.
        """
        self._is_answered = True
        try:
            found = self._store.acquire(self._request) if self._asked is None else self._asked.answer()
        except LockUnavailable as error:
            self.refusal = error
            raise
        if isinstance(found, Held):
            self.found = found
            self.refusal = _why_not(found, self._request.key, self._store.server)
            raise self.refusal

    def publish(self, app: Any, publish: Callable[..., Any], named: Mapping[str, Any]) -> Any:
        """Send the message as soon as the lock is had.

        Raises:
            DuplicateTask, LockUnavailable: as `wait`; nothing was sent.
        """
        if not sends_by_its_producer(app, publish) or named.get("connection") or named.get("publisher"):
            self.wait()
            return publish(**named)
        with _Producer(app, named.get("producer"), self.wait) as producer:
            return publish(**{**named, "producer": producer})


class _Producer:
    """A producer of messages (`with`: until one was sent by it), which is there when `wait` has returned."""

    def __init__(self, app: Any, given: Any, wait: Callable[[], None]) -> None:
        self._made_of = app, given, wait
        #: Gives the producer back.
        self._context: Any = None
        self._producer: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._producer is None:
            app, given, wait = self._made_of
            wait()
            if given is None:
                # As Celery does it, which looks up a setting first, where one is free.
                with suppress(LimitExceeded):
                    self._producer = self._context = app.producer_pool.acquire()
            if self._producer is None:
                self._context = app.producer_or_acquire(given)
                self._producer = self._context.__enter__()
        return getattr(self._producer, name)

    def __enter__(self) -> _Producer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)  # kombu replaces the connection after an error.


def _why_not(found: Held, key: str, server: str) -> DuplicateTask | LockUnavailable:
    if found.holder is None or found.holder.task_id is None:
        return LockUnavailable(server, f"the lock {key} has a value that this package did not write")
    return DuplicateTask(key, found.holder.task_id, found.holder.since, label=found.holder.label)
