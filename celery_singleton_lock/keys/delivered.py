"""The form in which a message carries an argument. Keys are made from it, where a call is sent and where it runs: there
it is all that is left of the caller's values.

It is what kombu's JSON makes of a value: a tuple is a list, an object with `__json__` is what that returns. What has no
such form (a set, a dataclass) can only be sent by another serializer, such as pickle, and stays as it is. The fields of
a pydantic model count by their names, whether it was dumped by alias or not, and so do the defaults that were left out.
A default that a function makes does not count: it would be another one in each process.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kombu.utils import json as kombu_json

#: Values that every serializer delivers as they are.
_PLAIN = frozenset({str, int, float, bool, type(None)})

_UNIONS = (typing.Union, types.UnionType)


def delivered(value: Any, hint: Any = None) -> Any:
    """The value as a worker gets it.

    Args:
        value: the caller's value, or a worker's, which is returned as it is.
        hint: the type of the argument, if that has to do with models (see `model_hints`).
    """
    if type(value) in _PLAIN:
        return value
    with suppress(Exception):
        value = kombu_json.loads(kombu_json.dumps(value))
    return value if hint is None else _by_name(_dumped(value), hint)


def model_hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of the arguments that are models, or contain some.

    Raises:
        Exception: a type is not known, maybe only until its module is imported.
    """
    return {name: hint for name, hint in typing.get_type_hints(function).items() if _has_model(hint)}


def _dumped(value: Any) -> Any:
    """What a model's own dump makes of a value; the value itself if it has no such form."""
    with suppress(Exception):
        from pydantic_core import to_jsonable_python

        return to_jsonable_python(value, by_alias=False)
    return value


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "model_fields") and hasattr(hint, "model_validate")


def _has_model(hint: Any) -> bool:
    return _is_model(hint) or any(map(_has_model, typing.get_args(hint)))


def _by_name(value: Any, hint: Any) -> Any:
    """A dumped model with the names of its fields, and with the defaults that were left out; others as they are."""
    if _is_model(hint):
        if getattr(hint, "__pydantic_root_model__", False):
            return _by_name(value, hint.model_fields["root"].annotation)
        return _fields(value, hint) if isinstance(value, dict) else value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _by_name(value, args[0])
    if origin in _UNIONS:  # Of several models, only a validation would find which one it is.
        args = tuple(each for each in args if each is not type(None))
        return _by_name(value, args[0]) if len(args) == 1 else value
    if isinstance(value, list) and args:
        hints = args if len(args) == len(value) and args[-1] is not ... else [args[0]] * len(value)
        value = [_by_name(item, each) for item, each in zip(value, hints, strict=True)]
    elif isinstance(value, dict) and len(args) == 2:
        value = {key: _by_name(item, args[1]) for key, item in value.items()}
    return value


def _fields(value: dict[str, Any], model: Any) -> dict[str, Any]:
    found = dict(value)
    for name, field in model.model_fields.items():
        for alias in _aliases(field):
            if name not in found and alias in found:
                found[name] = found.pop(alias)
        if name not in found and field.default_factory is None and not field.is_required():
            found[name] = _dumped(field.default)
        if name in found:
            found[name] = _by_name(found[name], field.annotation)
    return found


def _aliases(field: Any) -> list[str]:
    given = field.validation_alias
    return [each for each in (*getattr(given, "choices", [given]), field.alias) if isinstance(each, str)]
