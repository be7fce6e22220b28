"""The arguments of a call by name, with defaults applied: `f(1, 2)`, `f(1, b=2)` and `f(1)` with the default `b=2` are
the same call. Keys are made from the form in which a message carries them, where a call is sent and where it runs:
there it is all that is left of the caller's values.

That form is what kombu's JSON makes of a value: a tuple is a list, an object with `__json__` is what that returns. What
has no such form (a set, a dataclass) can only be sent by another serializer, such as pickle, and stays as it is. The
fields of a pydantic model count by their names, whether it was dumped by alias or not, and so do the defaults that were
left out. A default that a function makes does not count: it would be another one in each process.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kombu.utils import json as kombu_json

#: A path to an argument or to a part of one: `order`, `order.id`, `order[id]`.
_PATH = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[[^\]]+\])*")

_STEP = re.compile(r"(?<=\[)[^\]]+|[^.\[\]]+")

#: Values that every serializer delivers as they are.
_PLAIN = frozenset({str, int, float, bool, type(None)})

_UNIONS = (typing.Union, types.UnionType)


class NotThere(LookupError):
    """A path that leads nowhere; its text says where it ends, and what there is."""


class Bound(NamedTuple):
    """The arguments of a call.

    Attributes:
        run: the function that is called.
        its: what is known of it.
        arguments: by name, with defaults applied.
    """

    run: Callable[..., Any]
    its: _Parameters
    arguments: Mapping[str, Any]

    def delivered(self) -> dict[str, Any]:
        """The arguments in the form in which a message carries them."""
        hints = self.its.hints_of(self.run)
        return {
            name: value if type(value) in _PLAIN else delivered(value, hints.get(name))
            for name, value in self.arguments.items()
        }

    def choose(self, paths: Iterable[str]) -> dict[str, Any]:
        """What is at these paths, in the form in which a message carries it.

        An argument that is not given, as may be among `**kwargs`, is left out.

        Raises:
            NotThere: an argument has no such part.
        """
        others = self.arguments.get(self.its.takes_others or "", {})
        named, hints, found = {**others, **self.arguments}, self.its.hints_of(self.run), {}
        for path in paths:
            name, *steps = _STEP.findall(path)
            if name in named:
                value, at = delivered(named[name], hints.get(name)), name
                for step in steps:
                    value, at = _part(value, step, at, self.run), f"{at}.{step}"
                found[path] = value
        return found


def bind(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound | None:
    """The arguments of a call; None if they do not fit or there is no signature."""
    if (its := _parameters_of(run)) is None:
        return None
    try:
        return Bound(run, its, (_bind if its.defaults is None else _bind_plain)(its, args, kwargs))
    except TypeError:
        return None


def argument_in(text: str) -> str | None:
    """The name of the argument that a path begins with; None if the text has not the form of a path."""
    return str(_STEP.findall(text)[0]) if _PATH.fullmatch(text) else None


def name_of(run: Callable[..., Any]) -> str:
    """The name of a function, as its author knows it."""
    return str(getattr(run, "__qualname__", run)).rpartition("<locals>.")[2]


def _part(value: Any, step: str, at: str, run: Callable[..., Any]) -> Any:
    """An item or an attribute."""
    try:
        if isinstance(value, Mapping):
            return value[step]
        return value[int(step)] if isinstance(value, (list, tuple)) else getattr(value, step)
    except (LookupError, AttributeError, ValueError):
        parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", ())
        is_empty = isinstance(value, Sized) and not len(value)
        is_a = f"it is {'an empty' if is_empty else 'a'} {type(value).__name__}"
        has = f"it has: {', '.join(map(str, parts))}" if parts else is_a
        raise NotThere(f"the argument {at} of {name_of(run)} has no {step!r}; {has}") from None


def possible(run: Callable[..., Any]) -> Collection[str] | None:
    """The names that arguments of `run` may have; None if any name is allowed, or there is no signature."""
    its = _parameters_of(run)
    return None if its is None or its.takes_others is not None else its.signature.parameters


def _bind(its: _Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    bound = its.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _bind_plain(its: _Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`_bind` in a tenth of its time, for functions whose every argument may be positional or named."""
    names = its.names
    if len(args) == len(names) and not kwargs:
        return dict(zip(names, args, strict=True))
    by_place = dict(zip(names, args, strict=False))
    arguments = {**(its.defaults or {}), **by_place, **kwargs}
    if len(args) > len(names) or arguments.keys() != names or not by_place.keys().isdisjoint(kwargs):
        raise TypeError(f"{args} and {kwargs} do not fit")
    return {name: arguments[name] for name in names}


@dataclass(slots=True)
class _Parameters:
    """The parameters of a function, as they are cached.

    Attributes:
        signature: the signature, without the `self` of a method.
        names: the names of the parameters.
        defaults: the defaults; None if some parameter cannot be given both by position and by name.
        takes_others: the name of its `**kwargs`, if it has them.
        hints: the types of those that have to do with models; None while one of them is unknown.
    """

    signature: inspect.Signature
    names: KeysView[str]
    defaults: Mapping[str, Any] | None
    takes_others: str | None
    hints: Mapping[str, Any] | None = None

    def hints_of(self, run: Callable[..., Any]) -> Mapping[str, Any]:
        """The types of the arguments that have to do with models, as far as they are known."""
        if self.hints is None:
            with suppress(Exception):  # A name may be unknown until its module is imported.
                self.hints = model_hints(getattr(run, "__func__", run))
        return self.hints or {}

    @classmethod
    def of(cls, run: Callable[..., Any]) -> _Parameters:
        """Inspect the function, which takes longer than everything else here.

        Raises:
            TypeError, ValueError: it has no signature.
        """
        signature = inspect.signature(run)
        names, parameters = signature.parameters.keys(), signature.parameters.values()
        takes_others = next((it.name for it in parameters if it.kind is it.VAR_KEYWORD), None)
        defaults = {it.name: it.default for it in parameters if it.default is not it.empty}
        is_plain = all(it.kind is it.POSITIONAL_OR_KEYWORD for it in parameters)
        return cls(signature, names, defaults if is_plain else None, takes_others)


#: The parameters, by function and by whether it was bound.
_functions: WeakKeyDictionary[Any, dict[bool, _Parameters]] = WeakKeyDictionary()


def _parameters_of(run: Callable[..., Any]) -> _Parameters | None:
    function = getattr(run, "__func__", run)
    is_bound = function is not run
    try:
        its = _functions.setdefault(function, {})
        if is_bound not in its:
            its[is_bound] = _Parameters.of(run)
        return its[is_bound]
    except (TypeError, ValueError):
        return None


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
