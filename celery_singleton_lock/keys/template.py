"""A `lock_key` that is a template, such as "tenant:{tenant_id}"."""

from __future__ import annotations

import enum
import re
import string
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.keys.encoding import digest, encode

#: Values that a template shows as text; others as a digest.
SCALARS = (str, int, float, bool, type(None), Decimal, UUID, date, time)


_formatter = string.Formatter()


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
