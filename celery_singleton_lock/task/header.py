"""Our header of a message that is about to be sent; see `message` for what is in it, and who reads it.

Its random digits are new for each send, and the same in whatever follows from it: a redelivered, put-back or retried
copy, a replacement, and the next steps that a worker sends when a task has ended. So two copies of one message send the
same next step, while a chain that is sent again has new steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import cleaned
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task.message import HEADER, RequestLike, carried_in, digest, ids_in
from celery_singleton_lock.task.turn import message_of, turn_of

logger = get_logger(__name__)

#: Celery's own task that sends the body of a chord, where the result backend does not.
_UNLOCKS = "celery.chord_unlock"


class Made(dict[str, Any]):
    """A header that was made for the very message that is about to be sent, and did not just come along."""


def header_for(task_id: object, options: Mapping[str, Any], sender: Any) -> dict[str, Any]:
    """Our header of a message that is about to be sent with these options.

    What the body of a task sends is new. What a worker sends for a task that has ended (its next step, its callbacks,
    its chord's body) follows from the task's message, and so do its retries and replacements.

    Args:
        sender: see `current_worker_task`.
    """
    headers = options.get("headers")
    if sender is not None and is_new(options, sender):
        carried = _new(task_id)
    elif headers and (made := given(headers, task_id)) is not None and not _nesting(options):
        return {**made}
    else:
        carried = _new(task_id) if sender is None else _following(task_id, options, sender.request)
    if headers and (call := written(headers)) is not None:
        carried["call"] = call
    return carried


def of_next_attempt(request: RequestLike) -> dict[str, Any]:
    """What the next attempt of a message carries. Its number in the order of its key is all that stays of copies."""
    header = {**message_of(request).carried, "id": request.id}
    put_back = header.pop("put_back", None)
    if isinstance(put_back, dict) and "arrived" in put_back:
        header["put_back"] = {"arrived": put_back["arrived"]}
    return header


def is_new(options: Mapping[str, Any], sender: Any) -> bool:
    """Whether the body of this task sends a new message with these options, whatever its id; not its next attempt, nor
    its replacement.
    """
    return is_sent_by_body(options, sender) and not _goes_on(options, sender.request)


def is_sent_by_body(options: Mapping[str, Any], sender: Any) -> bool:
    """Whether the body of a task that a worker carries out sends a message with these options; otherwise Celery sends
    it for the task, which has ended.
    """
    request = sender.request
    if (in_body := turn_of(request).in_body) is not None:
        return in_body
    # A plain task: nobody says when its body ends. But Celery names the root of whatever it sends on; only a chord's
    # body is sent as anybody would send it, under the id that its parts know.
    if sender.name == _UNLOCKS or options.get("root_id") == (request.root_id or request.id):
        return False
    return not (request.chord and str(options.get("task_id")) in ids_in(request.chord))


def fixed(name: str) -> str:
    """The random part for a sending that several programs may make: with the same name, it is the same sending."""
    return digest("fixed", name)


def given(headers: Any, task_id: object) -> Made | None:
    """The header that was made for this message, among the headers that it is about to be sent with; None if there is
    none.
    """
    header = headers.get(HEADER) if isinstance(headers, Mapping) else None
    return header if isinstance(header, Made) and header["id"] == task_id else None


def written(headers: Any) -> Any:
    """The lock options in the headers of a call that is about to be sent, if somebody put them there on purpose."""
    header = headers.get(HEADER) if isinstance(headers, Mapping) else None
    if isinstance(header, Made):
        return header.get("call")
    return None if isinstance(header, dict) and "id" in header else header


def added(headers: Any, header: object) -> Any:
    """The headers with this one; anything that cannot be headers is left as it is, for Celery to refuse."""
    if not headers:
        return {HEADER: header}
    try:
        return {**dict(headers), HEADER: header}
    except (TypeError, ValueError):
        return headers


_reported: list[str] = []


def report_if_stripped(headers: Mapping[str, Any]) -> None:
    """Log, once in a process, that a message came without our header although its sender wrote one."""
    inner = headers.get("headers")
    is_moved = isinstance(inner, Mapping) and "id" in carried_in({**inner, "id": headers.get("id")})
    if _reported or not (is_moved or headers.get("retries")):
        return
    _reported.append(HEADER)
    logger.warning(
        "task %s[%s] came without the header %r at the top level of its message%s: what it waits for, has joined, or "
        "took when it was sent is not known. Look for what rewrites headers between the sender and this worker (an "
        "own apply_async, a receiver of before_task_publish, instrumentation, a bridge between brokers), or for a "
        "worker without this package that sends retries. Logged once in this process.",
        cleaned.text(headers.get("task")),
        cleaned.text(headers.get("id")),
        HEADER,
        ", but in its inner headers" if is_moved else ", though it is a retry",
    )


def _new(task_id: object) -> dict[str, Any]:
    return {"id": task_id, "sent": new_owner()}


def _following(task_id: object, options: Mapping[str, Any], request: RequestLike) -> dict[str, Any]:
    message = message_of(request)
    sent = message.sent
    if sent is None and options.get("root_id"):  # Not a chord's body, which any of its parts may send.
        sent = digest("of", message.sending)
    if task_id == request.id:
        if _nesting(options):
            return {"id": task_id, "sent": sent or new_owner(), "replaced": message.sending}
        if _goes_on(options, request):
            return of_next_attempt(request)
        # Its handlers send it again as it ends: a new message, but the same one for each copy of this message.
        sent = digest("after", sent, message.sending, request.retries or 0)
    return {"id": task_id} if sent is None else {"id": task_id, "sent": sent}


def _goes_on(options: Mapping[str, Any], request: RequestLike) -> bool:
    """Whether it is the next attempt of this message, or replaces it."""
    is_own_id = options.get("task_id") is not None and options.get("task_id") == request.id
    return bool(_nesting(options) or (is_own_id and options.get("retries")))


def _nesting(options: Mapping[str, Any]) -> int:
    return cleaned.count(options.get("replaced_task_nesting"))
