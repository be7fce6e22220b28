"""The name of one *sending*: two messages with the same name are the same message.

A task id is not enough. Users freeze signatures and send them again, a chain object that is sent twice has the same id
in its last step (Celery 5.7), and tasks of one lock may be given one id. A sending is named by the id, by its place in
its canvas (root and parent), and by a random header. The header is new for each send, and the same in whatever follows
from it: a redelivered, put-back or retried copy, a replacement, and the next steps that a worker sends when a task has
ended. So two copies of one message send the same next step, while a chain that is sent again has new steps.

A message without the header, from a program that does not have this package, is named by the rest, and by the ids of
the tasks that wait for it: in a canvas that is sent again these are new, and must not wait forever.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task.celery_types import RequestLike
from celery_singleton_lock.task.running import progress_of

#: The message header with the random part of a sending's name: `<random>[/<replaced>/<sending>]`, the latter two if a
#: task was replaced: its replacement belongs to the sending of the task itself.
SENT_HEADER = "singleton_lock_sent"

_HEADER = re.compile(r"([0-9a-f]{32})(?:/([0-9]{1,4})/([0-9a-f]{32}))?", re.ASCII)

#: A task id that a record's name shows; a longer one, or one with other characters, is left out.
_SHOWN = re.compile(r"[\w.-]{1,64}", re.ASCII)

#: Made once: making it takes as long as encoding a message's name.
_encode = json.JSONEncoder(default=repr).encode

#: Quotes a text as the encoder does.
_quoted = json.encoder.encode_basestring_ascii


class _SentHeader(NamedTuple):
    """The header, parsed."""

    random: str
    replaced: int = 0
    sending: str | None = None

    def __str__(self) -> str:
        return self.random if self.sending is None else f"{self.random}/{self.replaced}/{self.sending}"


class _Fixed(str):
    """A header that was set on purpose, and did not just come along with the headers of another message."""

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(self)


def header_for(options: Mapping[str, Any], sender: Any) -> str | None:
    """The header of a message that is about to be sent with these options; None for none.

    What the body of a task sends is new. What a worker sends for a task that has ended (its next step, its callbacks,
    its chord's body) follows from the task's message, and so do its retries and replacements.

    Args:
        options: the options of the call.
        sender: see `current_worker_task`.
    """
    headers = options.get("headers")  # Anything else is not headers, as Celery will say.
    given = headers.get(SENT_HEADER) if headers is not None and isinstance(headers, Mapping) else None
    if isinstance(given, _Fixed):
        return str(given)
    if sender is None:
        return new_owner()
    request = sender.request
    nesting = cleaned.count(options.get("replaced_task_nesting"))
    is_own_id = options.get("task_id") is not None and options.get("task_id") == request.id
    sent = _sent(request)
    if is_new(options, request):
        return new_owner()
    if nesting and is_own_id:
        random = sent.random if sent is not None else new_owner()
        return str(_SentHeader(random, min(nesting, 9999), sending_of(request)))
    if is_own_id and not _goes_on(options, request):
        # Its handlers send it again as it ends: a new message, but the same one for each copy of this message.
        return _digest("after", sent.random if sent is not None else None, sending_of(request), request.retries or 0)
    return None if sent is None else str(sent if is_own_id else _SentHeader(sent.random))


def is_new(options: Mapping[str, Any], request: RequestLike) -> bool:
    """Whether the body of this request sends a new message with these options, whatever its id; not its next attempt,
    nor its replacement.
    """
    return progress_of(request).in_body and not _goes_on(options, request)


def passed_on(request: RequestLike) -> dict[str, str]:
    """The header for a copy of the message; an empty one, which counts as none, if the message has none.

    Without any header, the copy would get a new one when it is sent, and belong to another sending.
    """
    sent = _sent(request)
    return {SENT_HEADER: _Fixed(str(sent) if sent is not None else "")}


def fixed(name: str) -> str:
    """The header for a sending that several programs may make: with the same name, it is the same sending."""
    return _Fixed(_digest("fixed", name))


def sending_of(request: RequestLike) -> str:
    """The name of the sending that a message belongs to."""
    sent = _sent(request)
    if sent is not None and sent.sending is not None:
        return sent.sending
    # A retry of a message without a parent, or without a root, gets its own id for that.
    parent = request.parent_id if request.parent_id != request.id else None
    random = sent.random if sent is not None else None
    return _digest(random, request.id, request.root_id or request.id, parent, _followers_of(request))


def replaced(request: RequestLike) -> int:
    """How often the task was replaced before; message protocol 1 has no field for that."""
    sent = _sent(request)
    return max(cleaned.count(getattr(request, "replaced_task_nesting", 0)), sent.replaced if sent is not None else 0)


def record_name(task: str, task_id: object, sending: str) -> str:
    """The name of the record of a message of this task; it begins with the task id, which people know."""
    name = task_id if isinstance(task_id, str) and _SHOWN.fullmatch(task_id) else "-"
    return f"{name}:{_digest(task, sending)[:16]}"


def _goes_on(options: Mapping[str, Any], request: RequestLike) -> bool:
    """Whether it is the next attempt of this message, or replaces it."""
    is_own_id = options.get("task_id") is not None and options.get("task_id") == request.id
    return bool(cleaned.count(options.get("replaced_task_nesting")) or (is_own_id and options.get("retries")))


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


def _sent(request: RequestLike) -> _SentHeader | None:
    """The header, if this package wrote it; None if there is none, or others wrote it."""
    header = cleaned.headers(request).get(SENT_HEADER, getattr(request, SENT_HEADER, None))
    return _read(header) if isinstance(header, str) else None


@lru_cache(maxsize=64)
def _read(header: str) -> _SentHeader | None:
    """Parse a header; cached, since each message's header is needed several times in a row."""
    found = _HEADER.fullmatch(header)
    return None if found is None else _SentHeader(found[1], int(found[2] or 0), found[3])


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
