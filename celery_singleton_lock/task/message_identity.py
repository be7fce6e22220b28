"""The name of one *sending*, which makes two messages the same.

A task id is no name for that. Users freeze signatures and send them again, a chain object that is sent twice has the
same id in its last step (Celery 5.7), and tasks of one lock may be given one id. A sending is named by the id, by where
its place in its canvas (root and parent), and by a random header that is new for each send, and the same in whatever
follows from it: a redelivered, put-back or retried copy, a replacement, and the next steps that a worker sends when a
task has ended. So the step that two copies of one message send is one, and a step of a chain that is sent again is not.

A message without the header, from a program that does not have this package, is named by the rest; to that belong the
ids of the tasks that wait for it: those of a canvas that is sent again are new, and must not wait forever.
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

#: The message header with what is random about a sending: `<random>[/<replaced>/<sending>]`, the latter two where a
#: task was replaced: its replacement belongs to the sending of the task itself.
SENT_HEADER = "singleton_lock_sent"

_HEADER = re.compile(r"([0-9a-f]{32})(?:/([0-9]{1,4})/([0-9a-f]{32}))?", re.ASCII)

#: Characters of a task id that a record's name shows; a longer one, or one of other characters, is left out.
_SHOWN = re.compile(r"[\w.-]{1,64}", re.ASCII)

#: Made once: it takes as long as to write down a message's name with it.
_encode = json.JSONEncoder(default=repr).encode

#: A text in JSON, as the encoder has it.
_quoted = json.encoder.encode_basestring_ascii


class _Sent(NamedTuple):
    """The header, read."""

    random: str
    replaced: int = 0
    sending: str | None = None

    def __str__(self) -> str:
        return self.random if self.sending is None else f"{self.random}/{self.replaced}/{self.sending}"


class _Fixed(str):
    """A header that was chosen on purpose. One that only came along with the headers of another message is not that."""

    __slots__ = ()

    def __str__(self) -> str:
        return "".join(self)


def header_for(options: Mapping[str, Any], sender: Any) -> str | None:
    """The header of a message that is about to be sent with these options; None for none.

    What the body of a task sends is new. What a worker sends for a task that has ended, its next step, its callbacks,
    its chord's body, follows from its message, and so do its retries and replacements.

    Args:
        options: of the call.
        sender: see `current_worker_task`.
    """
    headers = options.get("headers")  # Others may not be headers at all, as Celery then says.
    given = headers.get(SENT_HEADER) if headers is not None and isinstance(headers, Mapping) else None
    if isinstance(given, _Fixed):
        return str(given)
    if sender is None:
        return new_owner()
    request = sender.request
    nesting = cleaned.count(options.get("replaced_task_nesting"))
    is_own_id = options.get("task_id") is not None and options.get("task_id") == request.id
    goes_on = nesting or (is_own_id and options.get("retries"))
    sent = _sent(request)
    if progress_of(request).in_body and not goes_on:
        return new_owner()
    if nesting and is_own_id:
        random = sent.random if sent is not None else new_owner()
        return str(_Sent(random, min(nesting, 9999), sending_of(request)))
    if is_own_id and not goes_on:
        # Its handlers send it again, as it ends: another message, and the same one for each copy of this.
        return _digest("after", sent.random if sent is not None else None, sending_of(request), request.retries or 0)
    return None if sent is None else str(sent if is_own_id else _Sent(sent.random))


def passed_on(request: RequestLike) -> dict[str, str]:
    """The header as a copy of the message has it; an empty one, which counts as none, where the message has none.

    A header that is only left out would be made anew as the copy is sent, and name another sending.
    """
    sent = _sent(request)
    return {SENT_HEADER: _Fixed(str(sent) if sent is not None else "")}


def fixed(name: str) -> str:
    """The header for a sending that several programs may make, which is one if they give it the same name."""
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
    """How often the task was replaced before; message protocol 1 has no place of its own for that."""
    sent = _sent(request)
    return max(cleaned.count(getattr(request, "replaced_task_nesting", 0)), sent.replaced if sent is not None else 0)


def record_name(task: str, task_id: object, sending: str) -> str:
    """A name for what is remembered of a message of this task, whose beginning people know."""
    name = task_id if isinstance(task_id, str) and _SHOWN.fullmatch(task_id) else "-"
    return f"{name}:{_digest(task, sending)[:16]}"


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


def _sent(request: RequestLike) -> _Sent | None:
    """The header as it was written here; None where there is none, or others wrote it."""
    header = cleaned.headers(request).get(SENT_HEADER, getattr(request, SENT_HEADER, None))
    return _read(header) if isinstance(header, str) else None


@lru_cache(maxsize=64)
def _read(header: str) -> _Sent | None:
    """A message's header is asked for several times, one after the other."""
    found = _HEADER.fullmatch(header)
    return None if found is None else _Sent(found[1], int(found[2] or 0), found[3])


def _digest(*parts: object) -> str:
    text = f"[{', '.join(map(_dumps, parts))}]"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _dumps(part: object) -> str:
    """A part in JSON. Most are texts or nothing, which an encoder would take three times as long to write down."""
    if part is None:
        return "null"
    if type(part) is str:
        return _quoted(part)
    return "[]" if part == [] else _encode(part)
