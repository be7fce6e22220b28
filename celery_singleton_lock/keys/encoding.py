"""The canonical encoding of a value: equal for equal values, different for different ones, the same in every process.

Values are compared as the message carries them: a tuple is a list, a dictionary's keys are text, and types are kept
apart (`1`, `"1"`, `1.0`, `True` and `Decimal("1")` are five different values). Every part begins with its type and its
length, so no content can pass for a separator.

A `lock_key` may also be a template, such as "tenant:{tenant_id}": its values are shown as text, and escaped.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
import string
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from kombu.utils import json as kombu_json

from celery_singleton_lock.errors import InvalidKey, InvalidOption

#: Deeper than any argument in a message; the walk through a structure that contains itself ends here.
MAX_DEPTH = 100

#: Values that a template shows as text; others as a digest.
SCALARS = (str, int, float, bool, type(None), Decimal, UUID, date, time)


_formatter = string.Formatter()


def encode(value: object) -> bytes:
    """The canonical form of a value.

    Raises:
        InvalidKey: the value, or something in it, has no stable form.
    """
    return _form(value, "value", 0)


def encode_arguments(task_name: str, arguments: Mapping[str, Any]) -> bytes:
    """The canonical form of a dictionary of arguments; errors name the task and the argument."""
    parts = [b"m%d:" % len(arguments)]
    for name in sorted(arguments):
        parts += (_of_text(name), encode_named(task_name, f"argument {name}", arguments[name]))
    return b"".join(parts)


def encode_named(task_name: str, name: str, value: object) -> bytes:
    """The canonical form of one value; the error names the task, the value and the way out."""
    try:
        return _form(value, name, 0)
    except _Unstable as error:
        raise InvalidKey(
            f"no lock key for task {task_name}: {error}; set lock_key to what makes two calls the same: "
            'a list of other arguments, a template such as "tenant:{tenant_id}", or a callable'
        ) from None


def digest(content: bytes) -> str:
    """The digest as keys contain it: 32 hex digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _form(value: Any, path: str, depth: int) -> bytes:  # noqa: PLR0911 - one for each type
    if depth > MAX_DEPTH:
        raise _Unstable(path, value, "is nested too deeply, or contains itself")
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, int):
        if value is True or value is False:
            return b"t" if value else b"f"
        return _sized(b"i", format(int(value), "x").encode())
    if value is None:
        return b"n"
    if isinstance(value, float):
        return _sized(b"d", float.__repr__(value).encode())
    if isinstance(value, (list, tuple)):
        items = [_form(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
        return b"l%d:%b" % (len(items), b"".join(items))
    if isinstance(value, Mapping):
        return _mapping(value, path, depth)
    if isinstance(value, AbstractSet):
        items = sorted(_form(item, f"an item of {path}", depth + 1) for item in value)
        return b"u%d:%b" % (len(items), b"".join(items))
    if isinstance(value, enum.Enum):
        # Not each combination of flags has a name.
        member = value.value if isinstance(value, enum.Flag) else value.name
        return _form(["enum", type(value).__module__, type(value).__qualname__, member], path, depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _form({each.name: getattr(value, each.name) for each in dataclasses.fields(value)}, path, depth + 1)
    return _as_message(value, path, depth)


def _mapping(value: Mapping[Any, Any], path: str, depth: int) -> bytes:
    by_key = {}
    for key, item in value.items():
        shown = _as_json_key(key)
        where = f"{path}[{shown!r}]"
        name = _of_text(shown) if shown is not None else _form(key, where, depth + 1)
        by_key[name] = _form(item, where, depth + 1)
    return b"m%d:%b" % (len(by_key), b"".join(part for name in sorted(by_key) for part in (name, by_key[name])))


def _as_json_key(key: object) -> str | None:
    """A dictionary's key as JSON writes it: always a text. None if JSON does not allow it as a key."""
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, (bool, int, float)):
        return str(next(iter(json.loads(json.dumps({key: 0})))))
    return None


def _as_message(value: Any, path: str, depth: int) -> bytes:
    """Everything else: as kombu's JSON writes it, or a model that was pickled writes itself."""
    try:
        is_model = hasattr(value, "model_dump")
        plain = value.model_dump(mode="json") if is_model else json.loads(kombu_json.dumps(value))
    except Exception as error:
        raise _Unstable(path, value, "has no stable form") from error
    return _form(plain, path, depth + 1)


class _Unstable(InvalidKey):
    """A value without a stable form, and where it is."""

    def __init__(self, path: str, value: object, problem: str) -> None:
        super().__init__(f"{path} (of type {type(value).__module__}.{type(value).__qualname__}) {problem}")


def _sized(tag: bytes, content: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(content), content)


def _of_text(value: str) -> bytes:
    text = str.__str__(value).encode("utf-8", "surrogatepass")
    return b"s%d:%b" % (len(text), text)


class Filled(NamedTuple):
    """A template with its values.

    Attributes:
        text: the text for display.
        escaped: the same, with everything escaped that could pass for a part of the template: equal for equal values
            only.
    """

    text: str
    escaped: str


def fill(template: str, values: Mapping[str, Any]) -> Filled:
    """Put the values of a call into its template, each by its field (see `fields_in`).

    Raises:
        Exception: the template needs something that is missing, or that has no stable form.
    """
    literals = "%" + "".join(literal for literal, *_ in _formatter.parse(template))
    text, escaped = list[str](), list[str]()
    for literal, field, spec, conversion in _formatter.parse(template):
        shown = "" if field is None else _show(values[field], spec, conversion)
        text += (literal, shown)
        escaped += (literal, _escape(shown, literals))
    return Filled("".join(text), "".join(escaped))


def fields_in(template: str) -> list[str]:
    """The fields of a template that is valid: paths in the arguments."""
    return [field for _, field, _, _ in _formatter.parse(template) if field is not None]


def _show(value: Any, spec: str | None, conversion: str | None) -> str:
    if conversion or spec:
        return format(_formatter.convert_field(value, conversion), spec or "")
    if isinstance(value, enum.Enum):
        value = value.value
    return str(value) if isinstance(value, SCALARS) else digest(encode(value))


def _escape(text: str, literals: str) -> str:
    return "".join(f"%{ord(char):X};" if char in literals else char for char in text)


def fields_of_valid(where: str, template: str) -> list[str]:
    """The fields of a template.

    Raises:
        InvalidOption: it is no template that can work; `where` begins the message.
    """
    try:
        parts = [(literal, field) for literal, field, *_ in _formatter.parse(template)]
    except ValueError as error:
        raise InvalidOption(f"{where}, which is not a valid template: {error}") from None
    if any(None not in (before, field) and not literal for (_, before), (literal, field) in pairwise(parts)):
        raise InvalidOption(
            f"{where}, which has two fields with nothing between them: 1, 23 and 12, 3 would be the same"
        )
    fields = fields_in(template)
    if any(not (name := re.split(r"[.[]", field)[0]) or name.isdigit() for field in fields):
        raise InvalidOption(f"{where}; allowed in a template: names of arguments, such as {{tenant_id}}")
    return fields
