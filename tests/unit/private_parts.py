"""The private parts of other libraries that the package touches, from the docstrings in `_celery.py` and the like."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from celery_singleton_lock import _celery
from celery_singleton_lock.stores.redis import _redis_py

#: The only modules that use private parts.
ROOMS: tuple[ModuleType, ...] = (_celery, _redis_py)


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
