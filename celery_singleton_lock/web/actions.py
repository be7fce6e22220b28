"""What an operator can do from a page: release a lock whose holder is gone, and stop the task that holds a lock.

Both apply only to the hold that the operator has seen. A new holder keeps the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import cleaned
from celery_singleton_lock.diagnosis.held import HeldLock, holds_of
from celery_singleton_lock.diagnosis.verdict import TO_FREE, free, judged
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import mark_of_owner
from celery_singleton_lock.journal_entry import duration
from celery_singleton_lock.keys.key import is_of_queue
from celery_singleton_lock.runtime import Runtime

logger = get_logger(__name__)

#: The longest time in seconds that a page waits until it is known whether a holder is gone.
PATIENCE = 60.0

#: The seconds that a worker has to answer.
TIMEOUT = 2.0


_CHANGED = "The holder that you saw no longer holds it; nothing was done."


def mark_of(lock: HeldLock) -> str:
    """The name of a hold on a page."""
    return mark_of_owner(lock.held.owner)


def act(app: Any, action: str, *, key: str, mark: str, who: str) -> str:
    """Release a lock, or stop its task, for somebody; it is logged, whatever comes of it.

    Args:
        app: the Celery app.
        action: one of `ACTIONS`.
        key: the key of the lock.
        mark: the mark of the hold that was on the page, see `mark_of`.
        who: who has pressed the button.

    Returns:
        What came of it, in a sentence.
    """
    runtime = Runtime.of(app)
    try:
        lock = _seen(runtime, key, mark)
        said = _CHANGED if lock is None else ACTIONS[action](app, runtime, lock)
    except LockUnavailable as error:
        said = f"The lock server does not answer: {cleaned.line(str(error))}."
    logger.warning("%s: %s asked the page to %s: %s", cleaned.key(key), cleaned.line(who), action, said)
    return said


def _seen(runtime: Runtime, key: str, mark: str) -> HeldLock | None:
    """The hold that the operator has seen; None if it has ended."""
    if not key.startswith(f"{runtime.settings.prefix}:"):
        return None
    return next((it for it in holds_of(runtime.store, key) if mark_of(it) == mark), None)


def _stop(app: Any, _: Runtime, lock: HeldLock) -> str:
    """Ask the worker to stop the task that holds a lock and then free the lock, as `celery control release_lock`."""
    node, arguments = lock.holder.node, {"key": lock.key, "mark": mark_of(lock)}
    asked: dict[str, Any] = {"destination": [node], "arguments": arguments, "reply": True, "timeout": TIMEOUT}
    try:
        replies = app.control.broadcast("release_lock", limit=1, **asked) or []
    except Exception as error:  # noqa: BLE001 - every transport has its own errors
        return f"The worker cannot be asked: {cleaned.line(f'{type(error).__name__}: {error}')}."
    # Anybody on the broker can answer, too, with anything.
    for answer in (reply.get(node) for reply in replies if isinstance(reply, Mapping)):
        if isinstance(answer, Mapping) and (said := answer.get("ok") or answer.get("error")):
            return f"The worker says: {cleaned.line(said)}."
    return f"Worker {node} did not answer within {TIMEOUT:g} s; it may do it all the same, or be gone."


def can_be_stopped(lock: HeldLock) -> bool:
    """Whether a worker may be carrying out a task under the lock."""
    return not lock.is_queued and bool(lock.holder.task_id and lock.holder.node and lock.holder.pid)


def _release(app: Any, runtime: Runtime, lock: HeldLock) -> str:
    """Free a lock whose holder is gone, as `celery locks release` does; refuses while the holder may be alive."""
    if is_of_queue(lock.key):
        return f"A message has held it since it was sent; it ends by itself in {duration(lock.held.remaining)}."
    holder = lock.holder_in_words()
    ((_, verdict),) = judged(runtime.store, app, [lock], patience=PATIENCE)
    if verdict not in TO_FREE:
        return f"Not released: {holder}: {verdict.fact}."
    return f"Released: {holder}: {verdict.fact}." if free(runtime, lock) else _CHANGED


#: The actions by their addresses.
ACTIONS: Mapping[str, Callable[[Any, Runtime, HeldLock], str]] = {"release": _release, "stop": _stop}
