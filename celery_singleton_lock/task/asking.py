"""Requests the lock of a message while Celery makes the message: both take time, on different machines.

Celery makes a message first, and then asks for a producer to send it with. Our producer is not ready before the lock is
granted: so nothing is sent before that, nor announced by a signal.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from celery_singleton_lock._celery import context_of_producer, sends_by_its_producer
from celery_singleton_lock.errors import FOREIGN, DuplicateTask, LockUnavailable
from celery_singleton_lock.stores.base import Held, LockRequest, PendingAnswer
from celery_singleton_lock.stores.store import Store


class Asking:
    """A request for a lock (`with`: until its message was sent, or will not be).

    Attributes:
        refusal: why the lock was not granted; None before the answer, and if it was granted.
        found: the lock's holder, if that is another message.
    """

    def __init__(self, store: Store, request: LockRequest) -> None:
        self.refusal: DuplicateTask | LockUnavailable | None = None
        self.found: Held | None = None
        self._store = store
        self._request = request
        self._is_answered = False
        self._pending: PendingAnswer | None = None

    def __enter__(self) -> Asking:
        if (ask := getattr(self._store, "ask", None)) is not None:
            try:
                self._pending = ask(self._request)
            except BaseException as error:  # Interrupted before or after it was sent: nobody waits for the answer.
                self._store.abandon(self._request.hold())
                self.refusal = error if isinstance(error, LockUnavailable) else None
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pending is not None and not self._is_answered:
            self._pending.drop()
        if error is not None and error is not self.refusal:  # For the caller, nothing was sent.
            self._store.abandon(self._request.hold())

    def wait(self) -> None:
        """Return when the lock is granted.

        Raises:
            DuplicateTask: another message has it.
            LockUnavailable: no answer, or a foreign value.
        """
        self._is_answered = True
        try:
            found = self._store.acquire(self._request) if self._pending is None else self._pending.answer()
        except LockUnavailable as error:
            self.refusal = error
            raise
        if isinstance(found, Held):
            self.found = found
            self.refusal = _why_not(found, self._request.key, self._store.server)
            raise self.refusal

    def publish(self, app: Any, publish: Callable[..., Any], named: Mapping[str, Any]) -> Any:
        """Send the message as soon as the lock is granted.

        Raises:
            DuplicateTask, LockUnavailable: as `wait`; nothing was sent.
        """
        if not sends_by_its_producer(app, publish) or named.get("connection") or named.get("publisher"):
            self.wait()
            return publish(**named)
        with _Producer(app, named.get("producer"), self.wait) as producer:
            return publish(**{**named, "producer": producer})


class _Producer:
    """A producer of messages (`with`: until it has sent one), which is acquired when `wait` has returned."""

    def __init__(self, app: Any, given: Any, wait: Callable[[], None]) -> None:
        self._made_of = app, given, wait
        #: Gives the producer back.
        self._context: Any = None
        self._producer: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._producer is None:
            app, given, wait = self._made_of
            wait()
            self._context = context_of_producer(app, given)
            self._producer = self._context.__enter__()
        return getattr(self._producer, name)

    def __enter__(self) -> _Producer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            self._context.__exit__(*error)  # kombu replaces the connection after an error.


def _why_not(found: Held, key: str, server: str) -> DuplicateTask | LockUnavailable:
    if found.holder is None or found.holder.task_id is None:
        return LockUnavailable(server, f"the lock {key} is held by {FOREIGN}")
    return DuplicateTask(key, found.holder.task_id, found.holder.since, label=found.holder.label)
