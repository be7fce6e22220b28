"""The canonical encoding of a value: equal for equal values, different for different ones, the same in every process.

Values are compared as the message carries them: a tuple is a list, a dictionary's keys are text, and types are kept
apart (`1`, `"1"`, `1.0`, `True` and `Decimal("1")` are five different values). Every part says its type and its length,
so that no content can pass for a separator.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from kombu.utils import json as kombu_json

from celery_singleton_lock.errors import InvalidKey

#: Deeper than any argument that a message carries; a structure that contains itself ends here.
MAX_DEPTH = 100


def encode(value: object) -> bytes:
    """The canonical form of a value.

    Raises:
        InvalidKey: the value, or something in it, has no stable form.
    """
    return b"".join(_parts(value, "value", 0))


def encode_arguments(task_name: str, arguments: Mapping[str, Any]) -> bytes:
    """The canonical form of a dictionary whose errors name the task and the argument."""
    parts = [b"m%d:" % len(arguments)]
    for name in sorted(arguments):
        parts += (_sized(b"s", _text(name)), encode_named(task_name, f"argument {name}", arguments[name]))
    return b"".join(parts)


def encode_named(task_name: str, name: str, value: object) -> bytes:
    """The canonical form of one value; the error names the task, the value and the way out."""
    try:
        return b"".join(_parts(value, name, 0))
    except _Unstable as error:
        raise InvalidKey(
            f"no lock key for task {task_name}: {error}; set lock_key to what makes two calls the same: "
            'a list of other arguments, a template such as "tenant:{tenant_id}", or a callable'
        ) from None


def digest(content: bytes) -> str:
    """As it is in keys: 32 hex digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _parts(value: Any, path: str, depth: int) -> Iterable[bytes]:  # noqa: PLR0912 - a branch for each type
    if depth > MAX_DEPTH:
        raise _Unstable(path, value, "is nested too deeply, or contains itself")
    if value is None:
        yield b"n"
    elif value is True:
        yield b"t"
    elif value is False:
        yield b"f"
    elif isinstance(value, str):
        yield _sized(b"s", _text(value))
    elif isinstance(value, int):
        yield _sized(b"i", format(int(value), "x").encode())
    elif isinstance(value, float):
        yield _sized(b"d", float.__repr__(value).encode())
    elif isinstance(value, (list, tuple)):
        yield b"l%d:" % len(value)
        for index, item in enumerate(value):
            yield from _parts(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, Mapping):
        yield from _mapping(value, path, depth)
    elif isinstance(value, AbstractSet):
        items = sorted(b"".join(_parts(item, f"an item of {path}", depth + 1)) for item in value)
        yield b"u%d:" % len(items)
        yield from items
    elif isinstance(value, enum.Enum):
        yield from _parts(["enum", type(value).__module__, type(value).__qualname__, value.name], path, depth + 1)
    elif hasattr(value, "model_dump"):
        yield from _parts(value.model_dump(mode="json"), path, depth + 1)
    else:
        yield from _as_message(value, path, depth)


def _mapping(value: Mapping[Any, Any], path: str, depth: int) -> Iterable[bytes]:
    by_key = {}
    for key, item in value.items():
        shown = _as_json_key(key)
        where = f"{path}[{shown!r}]"
        name = _sized(b"s", _text(shown)) if shown is not None else b"".join(_parts(key, where, depth + 1))
        by_key[name] = b"".join(_parts(item, where, depth + 1))
    yield b"m%d:" % len(by_key)
    for name in sorted(by_key):
        yield name
        yield by_key[name]


def _as_json_key(key: object) -> str | None:
    """A dictionary's key as JSON writes it: always a text. None for what JSON cannot have as a key."""
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, (bool, int, float)):
        return str(next(iter(json.loads(json.dumps({key: 0})))))
    return None


def _as_message(value: object, path: str, depth: int) -> Iterable[bytes]:
    """Everything else: as kombu's JSON makes it, which a worker's copy of it gives as well."""
    try:
        plain = json.loads(kombu_json.dumps(value))
    except Exception as error:
        raise _Unstable(path, value, "has no stable form") from error
    yield from _parts(plain, path, depth + 1)


class _Unstable(InvalidKey):
    """A value without a stable form, and where it is."""

    def __init__(self, path: str, value: object, problem: str) -> None:
        super().__init__(f"{path} (of type {type(value).__module__}.{type(value).__qualname__}) {problem}")


def _sized(tag: bytes, content: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(content), content)


def _text(value: str) -> bytes:
    return str.__str__(value).encode("utf-8", "surrogatepass")
