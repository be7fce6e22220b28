"""A `lock_key` that is a template, such as "tenant:{tenant_id}"."""

from __future__ import annotations

import enum
import string
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys.encoding import digest, encode

#: Values that a template shows as text; others as a digest.
_SCALARS = (str, int, float, bool, type(None), Decimal, UUID, date, time)


_formatter = string.Formatter()


def fill(task_name: str, template: str, arguments: Mapping[str, Any]) -> str:
    """The template with its values, in which whatever could pass for a part of the template is escaped.

    Raises:
        InvalidKey: it needs something that is not there, or that has no stable form.
    """
    literals = "%" + "".join(literal for literal, *_ in _formatter.parse(template))
    filled = []
    try:
        for literal, field, spec, conversion in _formatter.parse(template):
            filled.append(literal)
            if field is not None:
                value, _ = _formatter.get_field(field, (), arguments)
                filled.append(_escape(_show(value, spec, conversion), literals))
    except Exception as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {template!r} failed: {error!r}") from error
    return "".join(filled)


def _show(value: Any, spec: str | None, conversion: str | None) -> str:
    if conversion or spec:
        return format(_formatter.convert_field(value, conversion), spec or "")
    if isinstance(value, enum.Enum):
        value = value.value
    return str(value) if isinstance(value, _SCALARS) else digest(encode(value))


def _escape(text: str, literals: str) -> str:
    return "".join(f"%{ord(char):X};" if char in literals else char for char in text)


def names_in(where: str, template: str) -> list[str]:
    """The arguments that a template uses."""
    names, after_field = [], False
    try:
        for literal, field, _, _ in _formatter.parse(template):
            if field is None:
                continue
            if after_field and not literal:
                raise InvalidOption(f"{where}, which has two fields with nothing between: 1, 23 and 12, 3 would be one")
            after_field = True
            name = str(field).replace("[", ".").partition(".")[0]
            if not name or name.isdigit():
                raise InvalidOption(f"{where}; allowed in a template: names of arguments, such as {{tenant_id}}")
            names.append(name)
    except ValueError as error:
        raise InvalidOption(f"{where}, which is no template: {error}") from None
    return names
