"""The name of one *sending*: two messages with the same name are the same message.

A task id is not enough. Users freeze signatures and send them again, a chain object that is sent twice has the same id
in its last step (Celery 5.7), and tasks of one lock may be given one id. A sending is named by the id, by its place in
its canvas (root and parent), and by random digits in the header. They are new for each send, and the same in whatever
follows from it: a redelivered, put-back or retried copy, a replacement, and the next steps that a worker sends when a
task has ended. So two copies of one message send the same next step, while a chain that is sent again has new steps.

A message without them, from a program that does not have this package, is named by the rest, and by the ids of the
tasks that wait for it: in a canvas that is sent again these are new, and must not wait forever.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from celery_singleton_lock import cleaned
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task import header
from celery_singleton_lock.task.celery_types import RequestLike
from celery_singleton_lock.task.running import progress_of

_DIGITS = re.compile(r"[0-9a-f]{32}", re.ASCII)

#: A task id that a record's name shows; a longer one, or one with other characters, is left out.
_SHOWN = re.compile(r"[\w.-]{1,64}", re.ASCII)

#: Made once: making it takes as long as encoding a message's name.
_encode = json.JSONEncoder(default=repr).encode

#: Quotes a text as the encoder does.
_quoted = json.encoder.encode_basestring_ascii

#: Celery's own task that sends the body of a chord, where the result backend does not.
_UNLOCKS = "celery.chord_unlock"


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
    elif headers and (given := header.given(headers, task_id)) is not None and not _nesting(options):
        return {**given}
    else:
        carried = _new(task_id) if sender is None else _following(task_id, options, sender.request)
    if headers and (call := header.written(headers)) is not None:
        carried["call"] = call
    return carried


def _new(task_id: object) -> dict[str, Any]:
    return {"id": task_id, "sent": new_owner()}


def _following(task_id: object, options: Mapping[str, Any], request: RequestLike) -> dict[str, Any]:
    sent = _sent(header.of(request))
    if task_id == request.id:
        if _nesting(options):
            return {"id": task_id, "sent": sent or new_owner(), "replaced": sending_of(request)}
        if _goes_on(options, request):
            return header.of_next_attempt(request)
        # Its handlers send it again as it ends: a new message, but the same one for each copy of this message.
        sent = _digest("after", sent, sending_of(request), request.retries or 0)
    return {"id": task_id} if sent is None else {"id": task_id, "sent": sent}


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
    if (in_body := progress_of(request).in_body) is not None:
        return in_body
    # A plain task: nobody says when its body ends. But Celery names the root of whatever it sends on; only a chord's
    # body is sent as anybody would send it, under the id that its parts know.
    if sender.name == _UNLOCKS or options.get("root_id") == (request.root_id or request.id):
        return False
    return not (request.chord and str(options.get("task_id")) in _ids_in(request.chord))


def fixed(name: str) -> str:
    """The random part for a sending that several programs may make: with the same name, it is the same sending."""
    return _digest("fixed", name)


def sending_of(request: RequestLike) -> str:
    """The name of the sending that a message belongs to."""
    carried = header.of(request)
    if (of_replaced := _digits(carried.get("replaced"))) is not None:
        return of_replaced
    # A retry of a message without a parent, or without a root, gets its own id for that.
    parent = request.parent_id if request.parent_id != request.id else None
    return _digest(_sent(carried), request.id, request.root_id or request.id, parent, _followers_of(request))


def replaced(request: RequestLike) -> int:
    """How often the task was replaced before."""
    return cleaned.count(getattr(request, "replaced_task_nesting", 0))


def record_name(task: str, task_id: object, sending: str) -> str:
    """The name of the record of a message of this task; it begins with the task id, which people know."""
    digest = _digest(task, sending)
    # What has the same id and key is seldom more than one message, and each character of a key costs memory.
    return f"{task_id}:{digest[:10]}" if isinstance(task_id, str) and _SHOWN.fullmatch(task_id) else f"-:{digest}"


def _goes_on(options: Mapping[str, Any], request: RequestLike) -> bool:
    """Whether it is the next attempt of this message, or replaces it."""
    is_own_id = options.get("task_id") is not None and options.get("task_id") == request.id
    return bool(_nesting(options) or (is_own_id and options.get("retries")))


def _nesting(options: Mapping[str, Any]) -> int:
    return cleaned.count(options.get("replaced_task_nesting"))


def _followers_of(request: RequestLike) -> list[str]:
    """The ids of the tasks that wait for this one's end."""
    if not (request.chain or request.chord or request.callbacks or request.errbacks):
        return []
    return sorted({*_ids_in([request.chain, request.chord, request.callbacks, request.errbacks])})


def _ids_in(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name == "task_id":
                yield str(value)
            else:
                yield from _ids_in(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _ids_in(value)


def _sent(carried: Mapping[str, Any]) -> str | None:
    """The random part of a message's name; None if it has none, or others wrote it."""
    return _digits(carried.get("sent"))


def _digits(part: object) -> str | None:
    return part if isinstance(part, str) and _DIGITS.fullmatch(part) else None


def _digest(*parts: object) -> str:
    text = f"[{', '.join(map(_dumps, parts))}]"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _dumps(part: object) -> str:
    """A part in JSON. Most parts are texts or None, for which the encoder would take three times as long."""
    if part is None:
        return "null"
    if type(part) is str:
        return _quoted(part)
    return "[]" if part == [] else _encode(part)
