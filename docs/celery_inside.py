"""Writes docs/celery-inside.md, the private parts of other libraries that we touch: `python -m docs.celery_inside`.

Made from the docstrings in `_celery.py` and the like; `tests/unit/test_celery_private.py` fails if the page is out of
date, and looks for each of these parts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from celery_singleton_lock import _celery
from celery_singleton_lock.stores.redis import _redis_py

PAGE = Path(__file__).parent / "celery-inside.md"

#: The only modules that use private parts.
ROOMS: tuple[ModuleType, ...] = (_celery, _redis_py)

BEGINNING = """<!-- Made from the code by `python -m docs.celery_inside`; do not edit. -->
# Celery's internals

This package mostly uses Celery's documented interface. Some promises need more: parts of Celery, kombu, billiard,
redis-py and Python that are private, or not documented. Only `celery_singleton_lock/_celery.py` touches them
(for redis-py `stores/redis/_redis_py.py`), each in a function that is named after its meaning.

A new version may change such a part without notice. So `tests/unit/test_celery_private.py` checks each of them, and
is the first to fail; `make prereleases` runs it on versions that are not released yet.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """What one function or class of this package touches.

    Attributes:
        name: the function or class.
        meaning: what it is for.
        promise: what depends on it.
        touches: the dotted names of the private parts.
    """

    name: str
    meaning: str
    promise: str
    touches: tuple[str, ...]


def page() -> str:
    """The whole page."""
    versions = {library: seen for room in ROOMS for library, seen in room.LOOKED_AT.items()}
    read = "; ".join(f"{library} {', '.join(seen)}" for library, seen in versions.items())
    return f"{BEGINNING}\nThis is based on the code of these versions: {read}.\n\n" + "\n".join(map(_section, parts()))


def parts() -> Iterator[Part]:
    """All of them, in the order of the code."""
    for room in ROOMS:
        for name, it in _own(room).items():
            text = " ".join(inspect.cleandoc(it.__doc__ or "").split())
            meaning, _, rest = text.partition("Promise: ")
            promise, _, touches = rest.partition(" Touches: ")
            yield Part(name, meaning.strip(), promise.strip(), tuple(touches.split(", ")) if touches else ())


def _own(room: ModuleType) -> Mapping[str, Any]:
    made = {name: it for name, it in vars(room).items() if getattr(it, "__module__", None) == room.__name__}
    return {name: it for name, it in made.items() if inspect.isfunction(it) or inspect.isclass(it)}


def _section(part: Part) -> str:
    touched = ", ".join(f"`{name}`" for name in part.touches)
    promise = re.sub(r"^as for `(\w+)`", r"as for [\1](#\1)", part.promise)
    return f"## {part.name}\n\n{part.meaning}\n\n- what depends on it: {promise}\n- touches: {touched}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
