"""The calls that each execution makes, an acquire and a free, as they go over the wire.

Most of such a command is the same each time. So `lock_commands` writes it once, with marks in place of what differs:
the stencil for all commands whose parts have the same lengths. Rare calls have no stencil.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from operator import itemgetter

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis.connection import packed
from celery_singleton_lock.stores.redis.keyspace import Name
from celery_singleton_lock.stores.redis.script import Call, Ready

#: Stencils that are kept: one for each combination of lengths, of which a task has a few.
_MOST = 1024

#: Messages that are remembered, from the acquire to the free.
_LATEST = 64

#: The characters of marks: none of them is in a digest, or between the parts of a command.
_MARKS = "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0b\x0c"

_MARK = re.compile(rb"([%b])\1*" % _MARKS.encode())


def acquire(request: LockRequest, name: str) -> Ready | None:
    """As `lock_commands.acquire`; None for a rare call."""
    key, holder = request.key, request.holder
    if request.limit != 1 or request.given_up or request.in_line or holder.replaced or holder.retries or not key:
        return None
    if request.arrival is not None:
        return None
    parts = [*_of_key(key), request.owner.encode(), name.encode(), holder.around_fence(request.ttl).encode()]
    if request.waiting:
        parts.append(str(lock_commands.asked_at(request)).encode())
    if request.once:
        parts += _of_message(key, holder.message)
    stencil = _for_acquire(type(key), request.ttl, request.waiting, request.once, tuple(map(len, parts)))
    return Ready(lock_commands.ACQUIRE, stencil.filled(parts), partial(lock_commands.acquire, request, name))


def free(hold: Hold, record: Record | None) -> Ready | None:
    """As `lock_commands.free`; None for a rare call."""
    key, lives = hold.key, None
    if hold.limit != 1 or hold.slot or not key:
        return None
    parts = [*_of_key(key), hold.owner.encode()]
    if record is not None:
        if not (record.message and record.content):
            return None
        lives = record.seconds, record.content_for
        parts += [record.message.encode()] if record.content_for is None else _of_message(key, record.message)
    stencil = _for_free(type(key), hold.ttl, lives, tuple(map(len, parts)))
    if record is not None:
        parts.append(_bulk(record.content))
    whole = partial(lock_commands.free, hold, record=record, began=clock.now())
    return Ready(lock_commands.FREE, stencil.filled(parts), whole)


class _Stencil:
    """A command with marks in it.

    Args:
        call: its keys and arguments are made of marks. Each mark repeats one character, whose number is that of a part.
        any_length: the mark of a part that comes with its length, as from `_bulk`; it is an argument by itself.
    """

    def __init__(self, call: Call, any_length: str = "") -> None:
        whole = packed(call.by_digest)
        if any_length:
            whole = whole.replace(_bulk(any_length.encode()), any_length.encode())
        self._in_order = itemgetter(*(_MARKS.index(chr(mark[0][0])) for mark in _MARK.finditer(whole)))
        #: What is the same each time, with room for the parts.
        self._written = _MARK.sub(b"%b", whole.replace(b"%", b"%%"))

    def filled(self, parts: Sequence[bytes]) -> bytes:
        """The command with these parts."""
        filled: bytes = self._written % self._in_order(parts)
        return filled


class _MarkedHolder(Holder):
    """A holder whose texts are marks."""

    @property
    def message(self) -> str:
        return self.record

    def around_fence(self, ttl: float) -> str:
        return self.process


@lru_cache(maxsize=_MOST)
def _for_acquire(kind: type[str], ttl: float, waiting: bool, once: bool, lengths: tuple[int, ...]) -> _Stencil:
    key, base, shared, owner, name, holder, *rest = _marks(lengths)
    asked_at = rest.pop(0) if waiting else 0
    message, *ended = rest or [""]
    marked = _MarkedHolder(record=message, process=holder)
    request = LockRequest(_marked_key(kind, key, base), owner, ttl, marked, waiting=waiting, once=once)
    keys, asked = lock_commands.question(request, name, shared=shared)
    call = Call(lock_commands.ACQUIRE, keys, lock_commands.said(asked._replace(asked_at_ms=asked_at)))
    return _Stencil(_with_ended(call, request.key, message, shared, *ended) if ended else call)


@lru_cache(maxsize=_MOST)
def _for_free(
    kind: type[str], ttl: float, lives: tuple[float, float | None] | None, lengths: tuple[int, ...]
) -> _Stencil:
    key, base, shared, owner, *left = _marks(lengths)
    hold, content = Hold(_marked_key(kind, key, base), owner, ttl=ttl), _MARKS[len(lengths)]
    if lives is None:
        return _Stencil(lock_commands.ending(hold, owner, shared=shared))
    # Results have many lengths: otherwise each length would need its own stencil.
    message, *ended = left
    call = lock_commands.ending(hold, owner, record=Record(message, content.encode(), *lives), shared=shared)
    return _Stencil(_with_ended(call, hold.key, message, shared, *ended) if ended else call, any_length=content)


def _with_ended(call: Call, key: str, message: str, shared: str, name: str, more: str) -> Call:
    """The call with marks for the name under which a message is over, and for the key where that is noted."""
    own = keyspace.ended_name(key, message)
    marks: dict[object, str] = {own: name, keyspace.ended_keys(shared, own)[1]: more}
    return call._replace(
        keys=[marks.get(each, each) for each in call.keys], args=[marks.get(each, each) for each in call.args]
    )


def _marks(lengths: Sequence[int]) -> list[str]:
    """Texts of these lengths, each made of a character that is in no other."""
    return [mark * length for mark, length in zip(_MARKS, lengths, strict=False)]


def _bulk(text: bytes) -> bytes:
    """An argument as it goes over the wire."""
    return b"$%d\r\n%b\r\n" % (len(text), text)


@lru_cache(maxsize=_MOST, typed=True)
def _of_key(key: str) -> tuple[bytes, bytes, bytes]:
    """A key, the prefix of the keys beside it, and the prefix of the keys that it shares."""
    own = key.encode()
    return own, key.base.encode() if isinstance(key, Name) else own, keyspace.shared(key).encode()


@lru_cache(maxsize=_LATEST)
def _of_message(key: str, message: str) -> tuple[bytes, bytes, bytes]:
    """A message, the name under which it is over, and where else that may be noted."""
    name = keyspace.ended_name(key, message)
    return message.encode(), name, keyspace.ended_keys(keyspace.shared(key), name)[1].encode()


def _marked_key(kind: type[str], key: str, base: str) -> str:
    if kind is not Name:
        return key
    marked = Name(key)
    marked.base = base
    return marked
