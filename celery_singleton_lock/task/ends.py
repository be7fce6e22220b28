"""How a message ended, the record of that, and what the result backend has of it.

A copy of the message that finds it ends in the same way (`conclude`). Protocol: `docs/protocol.md`, section 6.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from celery import states
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock._celery import keeps_results, may_be_asked, record_end
from celery_singleton_lock.errors import LockSuperseded
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import UNTIL_EXPIRED
from celery_singleton_lock.options.task import raw_attribute
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.task.message import RequestLike, TaskLike

logger = get_logger(__name__)

#: Compact. A lone surrogate is an error when it becomes bytes.
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

#: The most bytes of a return value or an exception that are kept.
MAX_CONTENT = 4096

#: The assumed age of a record in an unknown format: old enough that its worker has finished reporting.
OLD = 10.0

#: Parts of a record's first line; a mark follows them, if there is one.
_FIELDS = 4

#: Seconds by which the clocks of two workers may differ before a stored result is taken for an older one.
CLOCKS_DIFFER = 60.0

#: Takes the place of a content if a body ended with `Ignore`: another task has its id now, and will end.
REPLACED = b"replaced"

#: Takes the place of a state in a notice.
FOLLOWED = "FOLLOWED"


#: What has become of a message: another delivery of it is carried out, or will be; it is recorded as revoked; the same,
#: since it came too late; the worker has to reject it, without a failure; nothing is left to do.
Kind = Literal["continues", "revoked", "expired", "rejected", "over"]


class Concluded(Ignore):
    """Ends an execution without a run, once all is recorded. The worker's main process reads `kind`."""

    def __init__(self, why: str, kind: Kind) -> None:
        super().__init__(why, kind)
        self.why = why
        self.kind = kind

    def __str__(self) -> str:
        return self.why


def why_it_continues(text: str) -> str | None:
    """The reason in the repr of a `Concluded` whose message continues; None for other texts."""
    found = re.fullmatch(rf"{Concluded.__name__}\('([^'\\]*)', 'continues'\)", text)
    return found and found[1]


class End(NamedTuple):
    """An execution returns `value`, or raises `error`."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


class Outcome(NamedTuple):
    """How a message ended.

    Attributes:
        state: Celery's.
        content: the return value or exception as JSON; None if that is not kept.
        settled: whether all was sent: callbacks, chain, result; or nothing has to be, and nothing that goes on has the
            lock that the message brought.
        mark: distinguishes records of one message that are otherwise the same; '' if that does not matter.
    """

    state: str
    content: bytes | None = None
    settled: bool = False
    mark: str = ""

    def record_of(self, holder: Holder, seconds: float) -> Record:
        """The record of the holder's message, which says for `seconds` that the message has ended."""
        if self == _PLAIN:
            return Record(holder.message, b"%d" % math.ceil(seconds), seconds)
        fields = [self.state, seconds, self.content is not None, self.settled, *([self.mark] if self.mark else [])]
        return Record(holder.message, json.dumps(fields).encode() + b"\n" + (self.content or b""), seconds)


#: The end of most messages. Its record is its life alone, in whole seconds: the shortest value that Redis has.
_PLAIN = Outcome(states.SUCCESS, settled=True)


def read(record: Record) -> tuple[Outcome, float]:
    """The outcome and its age in seconds; if others wrote the record, only that there is one."""
    if (life := cleaned.whole(record.content)) is not None:
        return _PLAIN, max(cleaned.seconds(life) - record.seconds, 0.0)
    head, _, content = record.content.partition(b"\n")
    fields = cleaned.array(head)
    if fields is None or len(fields) < _FIELDS:
        return Outcome(states.SUCCESS), OLD
    # A later version may append more.
    state, seconds, has_content, settled = fields[:_FIELDS]
    mark = cleaned.text(fields[_FIELDS]) if len(fields) > _FIELDS else ""
    outcome = Outcome(cleaned.text(state), content if has_content else None, settled is True, mark)
    return outcome, max(cleaned.seconds(seconds) - record.seconds, 0.0)


def notice(name: Holder, content: Sequence[Any], seconds: float) -> Record:
    """A record that says something of a message to those that are to end as it does."""
    return Outcome(FOLLOWED, json.dumps(content).encode()).record_of(name, seconds)


def noticed(found: Record | None) -> list[Any] | None:
    """What such a record says; None if there is none, or others wrote it."""
    if found is None:
        return None
    outcome, _ = read(found)
    return cleaned.array(outcome.content) if outcome.state == FOLLOWED and outcome.content is not None else None


def end_of(outcome: Outcome) -> End | None:
    """The recorded end; None if nothing was kept, or it cannot be read."""
    if outcome.content is None:
        return None
    try:
        kept = json.loads(outcome.content)
        return End(kept) if outcome.state == states.SUCCESS else End(error=_error_of(*kept))
    except Exception:
        logger.exception("the recorded end of a task cannot be read")
        return None


def succeeded(value: object, *, is_awaited: bool) -> Outcome:
    return Outcome(states.SUCCESS, _as_json(value)) if is_awaited else _PLAIN


def failed(error: Exception, *, is_awaited: bool) -> Outcome:
    content = _as_json(error, _parts_of) if is_awaited else None
    return Outcome(states.FAILURE, content)


def superseded(error: LockSuperseded, *, is_awaited: bool) -> Outcome:
    return failed(error, is_awaited=is_awaited)._replace(state=states.REVOKED)


def ended_by(task: TaskLike, error: BaseException, *, is_awaited: bool, is_replaced: bool = False) -> Outcome | None:
    """The outcome of a body that raised `error`; None if that is not the message's end.

    A rejected message is given back: to its queue, or to a dead-letter exchange that may well send it again on purpose.
    """
    if isinstance(error, Ignore):
        return Outcome(states.IGNORED, REPLACED if is_replaced else None)
    if isinstance(error, Retry):
        return Outcome(states.RETRY)
    if isinstance(error, Exception) and not isinstance(error, Reject) and not _rejects_failed(task):
        return failed(error, is_awaited=is_awaited)
    return None  # The process is being stopped; whatever stops it decides what becomes of the message.


def is_awaited(task: TaskLike, request: RequestLike) -> bool:
    """Whether anybody learns how it ended."""
    if request.callbacks or request.chain or request.chord or request.errbacks:
        return True
    return not ignores_result(task, request) and keeps_results(task.backend)


def backend_knows(task: TaskLike, request: RequestLike) -> bool:
    """Whether the result backend knows what becomes of a task."""
    return not ignores_result(task, request) and may_be_asked(task.backend)


def may_be_followed(task: Any, settings: Settings, scope: str) -> bool:
    """Whether a worker can tell how another message of the task has ended."""
    if raw_attribute(task, "ignore_result") or settings.done_ttl <= 0 or not may_be_asked(task.backend):
        return False
    # A leader with that scope never names its run, so it must be known which task's result has its id.
    return scope != UNTIL_EXPIRED or not raw_attribute(task, "lock_name")


def stored_end(task: TaskLike, task_id: str, age: float) -> Mapping[str, Any] | None:
    """What the result backend has of the end of the task with this id; None if it has none.

    A result that was stored before the body ended, `age` seconds ago, is that of another task with this id.

    Raises:
        Exception: whatever the backend raises.
    """
    if task.backend.get_state(task_id) not in states.READY_STATES:
        return None
    # What was there a moment ago may be forgotten by now.
    stored: Mapping[str, Any] = task.backend.get_task_meta(task_id)
    stored_at = _moment(stored.get("date_done"))
    is_of_this = stored_at is None or stored_at > clock.wall() - age - CLOCKS_DIFFER
    return stored if stored["status"] in states.READY_STATES and is_of_this else None


def report(task: TaskLike, error: Exception, state: str, *, task_id: str | None = None) -> None:
    """Store the end of a message without a run, under its own id or another, and so end the rest of its chain and its
    part in a chord.

    Celery ends the rest of a chain only if it stores a result for this step, so we store one even if it is ignored.
    """
    request = task.request
    if request.id is None or request.is_eager:
        return
    record_end(
        task.backend,
        task_id or request.id,
        error,
        request,
        state=state,
        store_result=bool(request.chain) or not ignores_result(task, request),
        call_errbacks=state == states.FAILURE,
    )


def ignores_result(task: TaskLike, request: RequestLike) -> bool:
    """Whether nobody wants this execution's result: as the call says, or else the task."""
    of_call = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if of_call is None else of_call)


def _as_json(value: Any, plain: Callable[[Any], object] = lambda it: it) -> bytes | None:
    """What `plain` makes of it, if that is plain JSON: not too long, and equal when it is read again. Never raises."""
    size, parts = 0, []
    try:
        value = plain(value)
        for part in _JSON.iterencode(value):
            size += len(part)
            if size > MAX_CONTENT:  # However large the value is, the work ends here.
                return None
            parts.append(part)
        content = "".join(parts).encode()
        return content if len(content) <= MAX_CONTENT and json.loads(content) == value else None
    except Exception:  # noqa: BLE001 - by design
        return None


def _parts_of(error: Exception) -> list[Any]:
    """An exception's class, arguments and attributes, by which it is made again. An `OSError` has more than `args`."""
    kind = type(error)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        raise TypeError(f"{kind} has attributes that are not in __dict__")
    _, args, *attributes = _built_in(kind).__reduce__(error)
    return [kind.__module__, kind.__qualname__, list(args), *attributes]


def _error_of(module: str, name: str, args: list[Any], attributes: dict[str, Any] | None = None) -> Exception:
    """The exception again, made without its class's own constructor, which may take other arguments."""
    kind = attrgetter(name)(sys.modules[module])
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{module}.{name} is not a class of exceptions")
    error: Exception = _built_in(kind).__new__(kind, *args)
    _built_in(kind).__init__(error, *args)
    BaseException.__setstate__(error, attributes)
    return error


def _built_in(kind: type[Exception]) -> Any:
    """The built-in class that a class of exceptions derives from."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _rejects_failed(task: TaskLike) -> bool:
    """Whether Celery rejects the message of a task that failed, instead of acknowledging it."""
    acks = getattr(task, "acks_on_failure", None)  # Since Celery 5.7.
    return bool(task.acks_late and not (task.acks_on_failure_or_timeout if acks is None else acks))


def _moment(date: Any) -> float | None:
    """A result backend's date in seconds since the epoch; None if there is none, or it has no time zone.

    Without a zone, some are UTC, and some are local: Django's, say, with `USE_TZ = False`.
    """
    try:
        found = maybe_iso8601(date)
        return None if found is None or found.tzinfo is None else float(found.timestamp())
    except Exception:  # noqa: BLE001 - every backend has its own
        return None
