"""The arguments of a call by name, with defaults applied: `f(1, 2)`, `f(1, b=2)` and `f(1)` with the default `b=2` are
the same call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from celery_singleton_lock.keys.delivered import delivered, model_hints

#: A path to an argument or to a part of one: `order`, `order.id`, `order[id]`.
_PATH = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[[^\]]+\])*")

_STEP = re.compile(r"(?<=\[)[^\]]+|[^.\[\]]+")


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
        return {name: delivered(value, hints.get(name)) for name, value in self.arguments.items()}

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
