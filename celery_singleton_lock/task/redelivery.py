"""What is remembered of a message that was carried out, and what another copy of it ends with.

Brokers deliver a message again when its acknowledgement was lost or late. The release of a lock leaves a record of how
the message ended; a copy that finds it does not run the body, but ends in the same way, so that Celery stores the
result and sends callbacks and the chain's next step in case that had not happened when the first worker died.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.errors import ResultLost
from celery_singleton_lock.options.rules import ConflictPolicy
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.task import on_conflict, requeue, value_codec

logger = get_logger(__name__)

#: Bytes of a return value or an exception that are kept at most (see `kept`).
MAX_CONTENT = 4096

#: Seconds after the end of the body in which its own process may still be sending callbacks and storing the result.
SETTLING = 10.0

#: Seconds by which the clocks of two workers may differ, where a stored result is taken for an older one.
CLOCKS_DIFFER = 60.0

#: Parts of a record's first line.
_FIELDS = 4

#: States of a message that has nothing more to tell anybody.
_SILENT = (states.RETRY, states.IGNORED)


class Outcome(NamedTuple):
    """How a message ended.

    Attributes:
        state: Celery's.
        content: the return value or exception (see `kept`); None when that is not kept.
        settled: whether all was sent: callbacks, chain, result.
    """

    state: str
    content: bytes | None = None
    settled: bool = False

    def dumps(self, seconds: float) -> bytes:
        """The record of a mark that lives for so long."""
        return _head(self.state, seconds, self.content is not None, self.settled) + (self.content or b"")


class End(NamedTuple):
    """What an execution ends with.

    Attributes:
        value: what it returns.
        error: what it raises instead.
    """

    value: Any = None
    error: Exception | None = None


@lru_cache(maxsize=100)
def _head(state: str, seconds: float, has_content: bool, settled: bool) -> bytes:
    return json.dumps([state, seconds, has_content, settled]).encode() + b"\n"


def succeeded(task: Any, request: Any, value: Any) -> Outcome:
    """The body returned `value`."""
    return Outcome(states.SUCCESS, _content(task, request, value, states.SUCCESS))


def failed(task: Any, request: Any, error: Exception) -> Outcome:
    """The message of `request` ended with `error`."""
    return Outcome(states.FAILURE, _content(task, request, error, states.FAILURE))


def refused(task: Any, request: Any, policy: ConflictPolicy, error: Exception) -> Outcome | None:
    """The message of `request` is not carried out, and ends with `error`; None if that is not its end."""
    return ended_by(task, request, error) if policy == "raise" else Outcome(states.REVOKED)


def ended_by(task: Any, request: Any, error: BaseException) -> Outcome | None:
    """The body raised `error`; None if that is not the message's end.

    A rejected message is given back: to its queue, or to a dead-letter exchange that may well send it again on purpose.
    """
    if isinstance(error, Ignore):
        return Outcome(states.IGNORED)
    if isinstance(error, Retry):
        return Outcome(states.RETRY)
    if isinstance(error, Exception) and not isinstance(error, Reject) and not _rejects_failed(task):
        return failed(task, request, error)
    return None  # The process is being stopped; whoever does that knows what becomes of the message.


def needs_settling(task: Any, request: Any, outcome: Outcome) -> bool:
    """Whether a later copy of the message has to know that what follows on it was sent."""
    return outcome.state in states.READY_STATES and _is_awaited(task, request)


def can_be_asked(task: Any, request: Any) -> bool:
    """Whether the result backend knows what became of a task. The results of rpc:// are in the caller's queue."""
    if on_conflict.ignores_result(task, request) or isinstance(task.backend, DisabledBackend):
        return False
    return str(task.backend.as_uri()) != "rpc://"


def answer(task: Any, done: Record, given_up: str | None = None) -> End:
    """What this copy of a message ends with that was carried out: the same return value or exception.

    Args:
        task: whose `request` is the copy.
        done: what was recorded.
        given_up: see `requeue.put_back`.

    Raises:
        Ignore: nothing is left to be done, or the copy was put back, for the first execution may still be storing its
            result.
        Skipped: the first one was revoked, which was recorded again.
    """
    request = task.request
    outcome, age = loads(done)
    is_over = outcome.settled or outcome.state in _SILENT
    if is_over or not _is_awaited(task, request) or _is_recorded(task, age, given_up):
        state = f"{outcome.state}, settled" if outcome.settled else outcome.state
        logger.info("task %s[%s] is already done (%s); this copy is dropped", *_named(task), state)
        raise Ignore("already done")
    if age < SETTLING:
        logger.info("task %s[%s] is already done; a copy looks later whether that was stored", *_named(task))
        requeue.put_back(task, reason="copy", delay=SETTLING - age, given_up=given_up)
    logger.warning(
        "task %s[%s] is already done (%s), but its result was not stored; its recorded end is told again",
        *(*_named(task), outcome.state),
    )
    if outcome.state == states.REVOKED:
        on_conflict.revoke(task, on_conflict.Skipped("revoked or skipped before"))
    return _recorded(task, outcome)


def loads(done: Record) -> tuple[Outcome, float]:
    """The outcome and its age in seconds; of what others wrote only that it is there."""
    head, _, content = done.content.partition(b"\n")
    fields = cleaned.array(head)
    if fields is None or len(fields) < _FIELDS:
        return Outcome(states.SUCCESS), SETTLING
    # What a later version may add stands behind.
    state, seconds, has_content, settled = fields[:_FIELDS]
    outcome = Outcome(cleaned.text(state), content if has_content else None, settled is True)
    return outcome, max(cleaned.seconds(seconds) - done.seconds, 0.0)


def _content(task: Any, request: Any, value: Any, state: str) -> bytes | None:
    if not _is_awaited(task, request):
        return None
    return (value_codec.dumps if state == states.SUCCESS else value_codec.dumps_error)(value, MAX_CONTENT)


def _recorded(task: Any, outcome: Outcome) -> End:
    """What was recorded; `ResultLost` where nothing was kept (see `kept`)."""
    if outcome.content is not None:
        try:
            if outcome.state == states.SUCCESS:
                return End(value_codec.loads(outcome.content))
            return End(error=value_codec.loads_error(outcome.content))
        except Exception:
            logger.exception("task %s[%s]: the recorded end cannot be read", *_named(task))
    return End(error=ResultLost(task.name, task.request.id, MAX_CONTENT))


def _rejects_failed(task: Any) -> bool:
    """Whether Celery rejects the message of a task that failed, instead of acknowledging it."""
    acks = getattr(task, "acks_on_failure", None)  # Since Celery 5.7.
    return bool(task.acks_late and not (task.acks_on_failure_or_timeout if acks is None else acks))


def _is_awaited(task: Any, request: Any) -> bool:
    """Whether anybody gets to know how it ended."""
    if request.callbacks or request.chain or request.chord or request.errbacks:
        return True
    return not (on_conflict.ignores_result(task, request) or isinstance(task.backend, DisabledBackend))


def _is_recorded(task: Any, age: float, given_up: str | None) -> bool:
    """Whether the result backend has the end of this task; while it does not answer, a copy waits.

    What was stored before the body ended, `age` seconds ago, is the end of another task with this id.
    """
    if not can_be_asked(task, task.request):
        return False
    try:
        if task.backend.get_state(task.request.id) not in states.READY_STATES:
            return False
        stored_at = _moment(task.backend.get_task_meta(task.request.id).get("date_done"))
        return stored_at is None or stored_at > clock.wall() - age - CLOCKS_DIFFER
    except Exception as error:  # noqa: BLE001 - every backend has its own
        logger.warning("task %s[%s]: the result backend cannot be asked: %r", *_named(task), error)
        requeue.put_back(task, reason="copy", delay=SETTLING, given_up=given_up)


def _moment(date: Any) -> float | None:
    """Seconds since the epoch, of a date as a result backend gives it; None if it gives none, or one of no zone.

    Some are UTC then, some local: Django's, say, with `USE_TZ = False`.
    """
    try:
        found = maybe_iso8601(date)
        return None if found is None or found.tzinfo is None else float(found.timestamp())
    except Exception:  # noqa: BLE001 - every backend has its own
        return None


def _named(task: Any) -> tuple[str, str]:
    """The task's name, and the id as a log may show it."""
    return task.name, cleaned.text(task.request.id)
