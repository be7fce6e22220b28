"""The label beside the digest in a key: in a few words for people, what makes two calls the same."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from celery_singleton_lock import cleaned
from celery_singleton_lock.keys.template import SCALARS

#: The largest number of characters in a label.
MAX_LABEL = 60

#: Integers up to this are shown in full.
_WHOLE = 10**MAX_LABEL


def of_arguments(arguments: Mapping[str, Any]) -> str:
    """Arguments by name: `tenant_id=7, kind='full'`."""
    parts, left = list[str](), MAX_LABEL
    for name, value in arguments.items():
        parts.append(f"{name}={_in_short(value)}")
        left -= len(parts[-1]) + 2
        if left < 0:
            break  # The rest would be cut.
    return of_text(", ".join(parts))


def of_value(value: object) -> str:
    """The value that a callable returned."""
    return of_text(value if isinstance(value, str) else _in_short(value))


def of_text(text: str) -> str:
    """A text as it is, printable, cut to `MAX_LABEL` characters."""
    if len(text) <= MAX_LABEL and text.isprintable():
        return str(text)
    shown = cleaned.printable(text[: MAX_LABEL + 1])
    return shown if len(shown) <= MAX_LABEL else shown[: MAX_LABEL - 1] + "\u2026"


def _in_short(value: object) -> str:
    if type(value) is int and -_WHOLE < value < _WHOLE:  # The most common case.
        return str(value)
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return repr(value[: MAX_LABEL + 1])
    if isinstance(value, SCALARS):
        return cleaned.value_shown(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)
    # For any other object, only the type is short and quick to write.
    return f"<{type(value).__name__}>"
