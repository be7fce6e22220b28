"""A return value or an exception is kept exactly, or not at all.

A record of how a task ended must not be able to harm the task. So the bytes are made here, and not by the result
backend: some backends give back the very object that they were to encode, or write into it, and each would run the
`__reduce__` or `__json__` of a user's class once more than it expects. Here none of the user's code runs, nothing is
changed, and the work ends at the limit of bytes, however large the value is.

We keep what reads back as the same by construction: values of exactly these types, nested in any way (None, bool, int,
float, str, bytes, list, tuple, set, frozenset, dict, date, time, datetime without a time zone or in UTC, timedelta,
Decimal, UUID), and exceptions of importable classes that are made of them. When a copy of the message ends in the same
way, every result backend and serializer makes the same of it as of the first one. Anything else, such as a subclass of
those types, is not kept.

The form is JSON after a mark. An object with one key that begins with `~` is a value that JSON cannot express.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

#: The bytes begin with this; bytes of another form are not read.
MARK = b"1:"

#: How deep values may be nested; this also stops at a list that contains itself.
MAX_DEPTH = 30

#: Compact JSON. A lone surrogate is an error when it becomes bytes: it would not come back as it was.
_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def dumps(value: object, limit: int) -> bytes | None:
    """A return value in at most `limit` bytes; None if it does not fit, or would not come back as the same.

    Never raises, and never runs anything of the value's.
    """
    try:
        content = MARK + _json(_Packer(limit).pack(value, 0)).encode()
    except Exception:  # noqa: BLE001 - by design, also if another thread changes the value
        return None
    return content if len(content) <= limit else None


def loads(content: bytes) -> Any:
    """The value that `dumps` was given.

    Raises:
        Exception: these bytes are not from `dumps`.
    """
    if not content.startswith(MARK):
        raise ValueError(f"what was kept begins with {content[:8]!r}; allowed: {MARK!r}")
    return json.loads(content[len(MARK) :], object_hook=_unpack)


def dumps_error(error: BaseException, limit: int) -> bytes | None:
    """An exception in at most `limit` bytes: its class by name, what it was made of, and its attributes.

    None, and never raises, as for `dumps`; also None for an exception whose class is not found by its name.
    """
    try:
        kind = type(error)
        if _class_at(kind.__module__, kind.__qualname__) is not kind or _has_slots(kind):
            return None
        _, made_of, *rest = cast("tuple[Any, ...]", _builtin_base(kind).__reduce__(error))
        return dumps((kind.__module__, kind.__qualname__, made_of, rest[0] if rest else None), limit)
    except Exception:  # noqa: BLE001 - as above
        return None


def loads_error(content: bytes) -> Exception:
    """The exception that `dumps_error` was given, made without its class's own constructor.

    A constructor may take other arguments than it passes on, and may do anything.

    Raises:
        Exception: these bytes are not from `dumps_error`, or the class is not known in this process.
    """
    module, name, made_of, attributes = loads(content)
    kind = _class_at(module, name)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{module}.{name} is not a class of exceptions")
    base: Any = _builtin_base(kind)
    error: Exception = base.__new__(kind, *made_of)
    base.__init__(error, *made_of)
    if attributes is not None:
        BaseException.__setstate__(error, attributes)
    return error


class _Packer:
    """Turns a value into what JSON can express, and stops if that would take more than a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def pack(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is str:
            self._take(len(value) + 2)
            return value
        if value is None or kind is bool or kind is float:
            self._take(3)
            return value
        if kind is int:
            self._take(value.bit_length() // 4 + 1)
            return value
        if depth == MAX_DEPTH:
            raise ValueError("too deep")
        self._take(2)
        if kind is list:
            return self._pack_items(value, depth)
        if kind is dict:
            return self._pack_dict(value, depth)
        return self._pack_other(kind, value, depth)

    def _pack_items(self, value: Any, depth: int) -> list[Any]:
        self._take(len(value))  # The commas, before any item is looked at.
        return [self.pack(item, depth + 1) for item in value]

    def _pack_dict(self, value: dict[Any, Any], depth: int) -> Any:
        self._take(3 * len(value))
        if all(type(key) is str for key in value) and not _is_tagged(value):
            self._take(sum(map(len, value)))
            return {key: self.pack(item, depth + 1) for key, item in value.items()}
        return {"~dict": [[self.pack(key, depth + 1), self.pack(item, depth + 1)] for key, item in value.items()]}

    def _pack_other(self, kind: type, value: Any, depth: int) -> Any:
        if kind in _COLLECTIONS:
            return {_COLLECTIONS[kind]: self._pack_items(value, depth)}
        if kind is bytes:
            self._take(len(value))
            return {"~bytes": b64encode(value).decode()}
        if kind in _MOMENTS and (value.fold or not (value.tzinfo is None or value.tzinfo is timezone.utc)):
            raise ValueError("a time zone of which only the offset would come back")
        if kind not in _LEAVES:
            raise TypeError(kind)
        tag, simplify, _ = _LEAVES[kind]
        return {tag: self.pack(simplify(value), depth + 1)}

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("too large")


_COLLECTIONS: dict[type, str] = {tuple: "~tuple", set: "~set", frozenset: "~frozenset"}

_MOMENTS = (datetime, time)

#: Each type's tag, how it becomes what JSON can express, and how a value is made of that again.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    datetime: ("~datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("~date", date.isoformat, date.fromisoformat),
    time: ("~time", time.isoformat, time.fromisoformat),
    timedelta: ("~timedelta", lambda it: [it.days, it.seconds, it.microseconds], lambda parts: timedelta(*parts)),
    Decimal: ("~decimal", str, Decimal),
    UUID: ("~uuid", str, UUID),
}

_UNPACK: dict[str, Callable[[Any], Any]] = {
    "~dict": dict,
    "~bytes": lambda text: b64decode(text, validate=True),
    **{tag: kind for kind, tag in _COLLECTIONS.items()},
    **{tag: make for tag, _, make in _LEAVES.values()},
}


def _is_tagged(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)).startswith("~")


def _unpack(value: dict[str, Any]) -> Any:
    if not _is_tagged(value):
        return value
    ((tag, content),) = value.items()
    return _UNPACK[tag](content)


def _class_at(module: str, name: str) -> Any:
    """Whatever has this name in a module that is already imported; None if nothing has."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _builtin_base(kind: type[BaseException]) -> type[BaseException]:
    """The built-in class that an exception class derives from."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _has_slots(kind: type) -> bool:
    """Whether it has attributes that are not in `__dict__`."""
    return any(base.__dict__.get("__slots__") for base in kind.__mro__)
