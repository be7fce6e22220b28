"""The arguments of a call by their names, defaults applied: `f(1, 2)`, `f(1, b=2)` and `f(1)` with `b=2` as the default
are one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary


def bind(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments by name, defaults applied; None when they do not fit or there is no signature."""
    known = _known_of(run)
    if known is None:
        return None
    try:
        if known.defaults is not None:
            return _bind_plain(known, args, kwargs)
        bound = known.signature.bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def choose(run: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments of `run` that have these names; they may be among its `**kwargs`."""
    known = _known_of(run)
    others = arguments.get(known.takes_others, {}) if known is not None and known.takes_others is not None else {}
    named = {**others, **arguments}
    return {name: named[name] for name in names if name in named}


def possible(run: Callable[..., Any]) -> Collection[str] | None:
    """The names that arguments of `run` may have; None for any, and where there is no signature."""
    known = _known_of(run)
    return None if known is None or known.takes_others is not None else known.signature.parameters


def _bind_plain(known: _Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `Signature.bind`, in a tenth of its time, where each argument may be given by place or by name."""
    names = known.signature.parameters.keys()
    by_place = dict(zip(names, args, strict=False))
    arguments = {**(known.defaults or {}), **by_place, **kwargs}
    if len(args) > len(names) or arguments.keys() != names or not by_place.keys().isdisjoint(kwargs):
        return None
    return {name: arguments[name] for name in names}


class _Known(NamedTuple):
    """Remembered of a function.

    Attributes:
        signature: without `self` of a method.
        defaults: of the arguments; None where one of these cannot be given both by place and by name.
        takes_others: the name of its `**kwargs`, if it has these.
    """

    signature: inspect.Signature
    defaults: Mapping[str, Any] | None
    takes_others: str | None

    @classmethod
    def of(cls, run: Callable[..., Any]) -> _Known:
        """Ask for it, which takes longer than everything else here.

        Raises:
            TypeError, ValueError: it has no signature.
        """
        signature = inspect.signature(run)
        parameters = signature.parameters.values()
        takes_others = next((it.name for it in parameters if it.kind is it.VAR_KEYWORD), None)
        if any(it.kind is not it.POSITIONAL_OR_KEYWORD for it in parameters):
            return cls(signature, None, takes_others)
        return cls(signature, {it.name: it.default for it in parameters if it.default is not it.empty}, takes_others)


#: By function, and whether it was bound.
_functions: WeakKeyDictionary[Any, dict[bool, _Known]] = WeakKeyDictionary()


def _known_of(run: Callable[..., Any]) -> _Known | None:
    function, bound = getattr(run, "__func__", run), hasattr(run, "__func__")
    try:
        known = _functions.setdefault(function, {})
        if bound not in known:
            known[bound] = _Known.of(run)
        return known[bound]
    except (TypeError, ValueError):
        return None
