"""What an operator can do from a page: release a lock whose holder is gone, and stop the task that holds a lock.

Both apply only to the hold that the operator has seen. A new holder keeps the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import cleaned
from celery_singleton_lock.diagnosis.held import HeldLock
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


@dataclass(frozen=True, slots=True)
class Wanted:
    """The hold for which an operator has pressed a button.

    Attributes:
        key: the key of the lock.
        mark: the mark of the hold that was on the page, see `mark_of`.
    """

    key: str
    mark: str

    @classmethod
    def of(cls, form: Mapping[str, str]) -> Wanted:
        return cls(form.get("key", ""), form.get("mark", ""))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action: whether it was done, and a sentence about it."""

    done: bool
    text: str


_CHANGED = Outcome(False, "The holder that you saw no longer holds it; nothing was done.")


def mark_of(lock: HeldLock) -> str:
    """The name of a hold on a page."""
    return mark_of_owner(lock.held.owner)


def act(app: Any, action: str, wanted: Wanted, who: str) -> Outcome:
    """Release the lock, or stop its task, for somebody; it is logged, whatever comes of it."""
    runtime = Runtime.of(app)
    try:
        lock = _seen(runtime, wanted)
        outcome = _CHANGED if lock is None else ACTIONS[action](app, runtime, lock)
    except LockUnavailable as error:
        outcome = Outcome(False, f"The lock server does not answer: {cleaned.line(str(error))}.")
    logger.warning("%s: %s asked the page to %s: %s", cleaned.key(wanted.key), cleaned.line(who), action, outcome.text)
    return outcome


def _stop(app: Any, _: Runtime, lock: HeldLock) -> Outcome:
    """Ask the worker to stop the task that holds a lock and then free the lock, as `celery control release_lock`."""
    if not can_be_stopped(lock):
        return Outcome(False, "No task of a worker runs under it: there is nothing to stop.")
    try:
        replies = app.control.broadcast(
            "release_lock",
            destination=[lock.holder.node],
            arguments={"key": lock.key, "mark": mark_of(lock)},
            reply=True,
            timeout=TIMEOUT,
            limit=1,
        )
    except Exception as error:  # noqa: BLE001 - every transport has its own errors
        return Outcome(False, f"The worker cannot be asked: {cleaned.line(f'{type(error).__name__}: {error}')}.")
    return _promised(lock, replies)


def can_be_stopped(lock: HeldLock) -> bool:
    """Whether a worker may be carrying out a task under the lock."""
    return not lock.is_queued and bool(lock.holder.task_id and lock.holder.node and lock.holder.pid)


def _seen(runtime: Runtime, wanted: Wanted) -> HeldLock | None:
    """The hold that the operator has seen; None if it has ended."""
    if not wanted.key.startswith(f"{runtime.settings.prefix}:"):
        return None
    locks = [HeldLock.of(wanted.key, held) for held in runtime.store.held(wanted.key)]
    return next((it for it in locks if mark_of(it) == wanted.mark), None)


def _release(app: Any, runtime: Runtime, lock: HeldLock) -> Outcome:
    """Free a lock whose holder is gone, as `celery locks release` does; refuses while the holder may be alive."""
    if is_of_queue(lock.key):
        return Outcome(
            False, f"A message has held it since it was sent; it ends by itself in {duration(lock.held.remaining)}."
        )
    holder = lock.holder_in_words()
    ((_, verdict),) = judged(runtime, app, [lock], patience=PATIENCE)
    if verdict not in TO_FREE:
        return Outcome(False, f"Not released: {holder}: {verdict.fact}.")
    return Outcome(True, f"Released: {holder}: {verdict.fact}.") if free(runtime, lock) else _CHANGED


def _promised(lock: HeldLock, replies: Any) -> Outcome:
    """What the worker answered. Anybody on the broker can answer, too, with anything."""
    for reply in replies or []:
        answer = reply.get(lock.holder.node) if isinstance(reply, Mapping) else None
        if isinstance(answer, Mapping) and "ok" in answer:
            return Outcome(True, f"The worker says: {cleaned.line(answer['ok'])}.")
        if isinstance(answer, Mapping) and "error" in answer:
            return Outcome(False, f"The worker says: {cleaned.line(answer['error'])}.")
    return Outcome(
        False, f"Worker {lock.holder.node} did not answer within {TIMEOUT:g} s; it may do it all the same, or be gone."
    )


#: The actions by their addresses.
ACTIONS: Mapping[str, Callable[[Any, Runtime, HeldLock], Outcome]] = {"release": _release, "stop": _stop}
