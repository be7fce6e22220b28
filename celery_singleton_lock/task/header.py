"""The one header of ours: what a message carries from its sender to its worker, and on to its next attempt.

Other people write into headers, too. If one of them puts a dictionary `headers` into a message's headers, Celery takes
that for all there are: `request.headers` shows nothing else, and a retry takes nothing else along. So our header is at
the top level of the message, and only this module reads it, as the message was delivered. It names the task id that it
was made for: copied to another message, it has no effect. What a message gets is decided in `message_identity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import cleaned
from celery_singleton_lock.task.celery_types import RequestLike

logger = get_logger(__name__)

#: The name of the header: a dictionary of `id`, the task id, and what else the message needs: `sent` and `replaced`
#: (see `message_identity`); `call`, the lock options of this call; `queue`, the lock that was taken when it was sent
#: (`queue_lock`); `put_back`, what a copy has to know (`requeue`); `due` and `entry`, of a tick of beat. A header
#: without an `id` was written by hand, and is the `call` itself.
HEADER = "singleton_lock"

_NOTHING: Mapping[str, Any] = {}


class Made(dict[str, Any]):
    """A header that was made for the very message that is about to be sent, and did not just come along."""


def of(request: RequestLike) -> Mapping[str, Any]:
    """What a message carries. Others may have written it: each part is checked where it is used."""
    attributes = request.__dict__  # Celery makes each header of a message one.
    if HEADER in attributes:
        return _parts(attributes[HEADER], request.id)
    if request.is_eager and isinstance(request.headers, Mapping):  # `apply` puts what it is given nowhere else.
        return _parts(request.headers.get(HEADER), request.id)
    return _NOTHING


def of_message(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same, from the headers of a message as it was delivered."""
    return _parts(headers.get(HEADER), headers.get("id"))


def of_next_attempt(request: RequestLike) -> dict[str, Any]:
    """What the next attempt of a message carries. Its number in the order of its key is all that stays of copies."""
    header = {**of(request), "id": request.id}
    put_back = header.pop("put_back", None)
    if isinstance(put_back, dict) and "arrived" in put_back:
        header["put_back"] = {"arrived": put_back["arrived"]}
    return header


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


def _parts(header: Any, task_id: object) -> Mapping[str, Any]:
    # This is called several times for each message, and `isinstance` costs a call.
    if (type(header) is dict or type(header) is Made) and "id" in header:
        return header if task_id is not None and header["id"] == task_id else _NOTHING
    return _NOTHING if header is None else {"call": header}


_reported: list[str] = []


def report_if_stripped(headers: Mapping[str, Any]) -> None:
    """Log, once in a process, that a message came without our header although its sender wrote one."""
    inner = headers.get("headers")
    is_moved = isinstance(inner, Mapping) and "id" in _parts(inner.get(HEADER), headers.get("id"))
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
