"""The key of a call: what makes two calls of a task the same.

The arguments are bound to the signature of `run`, defaults applied, so that `f(1, 2)`, `f(1, b=2)` and `f(1)` with
`b=2` as the default are one call. What is chosen of them is encoded canonically and hashed, so that the key is equal in
the program that sends and in the worker that receives, whatever the process and its hash seed, and so short that it
may be logged.

Values are compared as the message carries them: a tuple is a list, a dictionary's keys are text, and types are kept
apart (`1`, `"1"`, `1.0`, `True` and `Decimal("1")` are five different values).
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, time
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID
from weakref import WeakKeyDictionary

from kombu.utils import json as kombu_json

from celery_singleton_lock.errors import InvalidKey, InvalidOption

#: Stands in every key. A change to how keys are made raises it, so that two ways never meet in one lock.
VERSION = 1

#: Characters of a lock's name that its key shows; the digest covers all of it.
MAX_SHOWN = 100

#: Deeper than any argument that a message carries; a structure that contains itself ends here.
MAX_DEPTH = 100

#: Values that a template shows as text; others as a digest.
_SCALARS = (str, int, float, bool, type(None), Decimal, UUID, date, time)

_formatter = string.Formatter()


def key_of_call(
    prefix: str, lock_name: str, task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> str:
    """The key of a call with these arguments, made as `lock_key` says.

    Raises:
        InvalidKey: an argument has no stable form, or the callable or the template failed.
    """
    arguments = bind(run, args, kwargs)
    if arguments is None:
        # It does not fit the signature: the body will raise its own TypeError.
        return _key(prefix, lock_name, _encode_arguments(task_name, {"args": args, "kwargs": kwargs}))
    if lock_key is None:
        return _key(prefix, lock_name, _encode_arguments(task_name, arguments))
    if callable(lock_key):
        value = _ask(task_name, lock_key, arguments)
        return _key(prefix, lock_name, _encode_named(task_name, "what the callable lock_key returned", value))
    if isinstance(lock_key, str):
        return key_of_text(prefix, lock_name, fill(task_name, lock_key, arguments))
    return _key(prefix, lock_name, _encode_arguments(task_name, choose(run, lock_key, arguments)))


def key_of_text(prefix: str, lock_name: str, text: str) -> str:
    """The key of a call whose caller chose what stands for it."""
    return _key(prefix, lock_name, encode(text))


def key_of_beat(prefix: str, name: str) -> str:
    """The key of the lease of a schedule's leader, beside which is what was sent."""
    return _key(prefix, f"beat:{name}", b"")


def name_in(key: str) -> str:
    """The lock's name as far as a key shows it; the key itself where it was not made here."""
    return key.partition("{")[2].rpartition("}")[0].rpartition(":")[0] or key


def shown_name(lock_name: str) -> str:
    """A lock's name as its key shows it."""
    shown = "".join("_" if char in "{}" or char.isspace() or not char.isprintable() else char for char in lock_name)
    return shown[:MAX_SHOWN]


def is_key(prefix: str, text: str) -> bool:
    """Whether the text is a key as it is made here for locks with this prefix."""
    return re.fullmatch(rf"{re.escape(prefix)}:[0-9]+:\{{[^{{}}]+:[0-9a-f]{{32}}\}}", text) is not None


def check_lock_key(task_name: str, lock_key: Any, run: Callable[..., Any]) -> None:
    """Refuse a `lock_key` that cannot work, when the task is bound.

    Raises:
        InvalidOption: wrong type, or an argument that `run` does not have.
    """
    if lock_key is None or callable(lock_key):
        return
    where = f"option lock_key of task {task_name} is {lock_key!r}"
    if isinstance(lock_key, str):
        names = _template_names(where, lock_key)
    elif isinstance(lock_key, (list, tuple)) and all(isinstance(name, str) for name in lock_key):
        names = list(lock_key)
    else:
        raise InvalidOption(
            f"{where}; allowed: None (all arguments), a list of argument names, a template such as "
            "'tenant:{tenant_id}', or a callable of the dictionary of arguments"
        )
    signature = _signature(run)
    if signature is None or _takes_any_keyword(signature):
        return
    for name in names:
        if name not in signature.parameters:
            raise InvalidOption(f"{where}, but run has no argument {name!r}; it has: {', '.join(signature.parameters)}")


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


def _bind_plain(known: _Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """As `Signature.bind`, in a tenth of its time, where each argument may be given by place or by name."""
    names = known.signature.parameters.keys()
    by_place = dict(zip(names, args, strict=False))
    arguments = {**(known.defaults or {}), **by_place, **kwargs}
    if len(args) > len(names) or arguments.keys() != names or not by_place.keys().isdisjoint(kwargs):
        return None
    return {name: arguments[name] for name in names}


def choose(run: Callable[..., Any], names: Iterable[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments of `run` that have these names; they may be among its `**kwargs`."""
    named = {**_var_keyword(run, arguments), **arguments}
    return {name: named[name] for name in names if name in named}


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
    except (InvalidKey, LookupError, AttributeError, ValueError, TypeError) as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {template!r} failed: {error!r}") from error
    return "".join(filled)


def encode(value: object) -> bytes:
    """A canonical form: equal for equal values, different for different ones, the same in every process.

    Every part says its type and its length, so that no content can pass for a separator.

    Raises:
        InvalidKey: the value, or something in it, has no stable form.
    """
    return b"".join(_parts(value, "value", 0))


def _parts(value: Any, path: str, depth: int) -> Iterable[bytes]:  # noqa: PLR0912 - a branch for each type
    if depth > MAX_DEPTH:
        raise _Unstable(path, value, "is nested too deeply, or contains itself")
    if value is None:
        yield b"n"
    elif value is True:
        yield b"t"
    elif value is False:
        yield b"f"
    elif isinstance(value, str):
        yield _sized(b"s", _text(value))
    elif isinstance(value, int):
        yield _sized(b"i", format(int(value), "x").encode())
    elif isinstance(value, float):
        yield _sized(b"d", float.__repr__(value).encode())
    elif isinstance(value, (list, tuple)):
        yield b"l%d:" % len(value)
        for index, item in enumerate(value):
            yield from _parts(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, Mapping):
        yield from _mapping(value, path, depth)
    elif isinstance(value, AbstractSet):
        items = sorted(b"".join(_parts(item, f"an item of {path}", depth + 1)) for item in value)
        yield b"u%d:" % len(items)
        yield from items
    elif isinstance(value, enum.Enum):
        yield from _parts(["enum", type(value).__module__, type(value).__qualname__, value.name], path, depth + 1)
    elif hasattr(value, "model_dump"):
        yield from _parts(value.model_dump(mode="json"), path, depth + 1)
    else:
        yield from _as_message(value, path, depth)


def _mapping(value: Mapping[Any, Any], path: str, depth: int) -> Iterable[bytes]:
    by_key = {}
    for key, item in value.items():
        shown = _as_json_key(key)
        where = f"{path}[{shown!r}]"
        name = _sized(b"s", _text(shown)) if shown is not None else b"".join(_parts(key, where, depth + 1))
        by_key[name] = b"".join(_parts(item, where, depth + 1))
    yield b"m%d:" % len(by_key)
    for name in sorted(by_key):
        yield name
        yield by_key[name]


def _as_json_key(key: object) -> str | None:
    """A dictionary's key as JSON writes it: always a text. None for what JSON cannot have as a key."""
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, (bool, int, float)):
        return str(next(iter(json.loads(json.dumps({key: 0})))))
    return None


def _as_message(value: object, path: str, depth: int) -> Iterable[bytes]:
    """Everything else: as kombu's JSON makes it, which a worker's copy of it gives as well."""
    try:
        plain = json.loads(kombu_json.dumps(value))
    except Exception as error:
        raise _Unstable(path, value, "has no stable form") from error
    yield from _parts(plain, path, depth + 1)


class _Unstable(InvalidKey):
    """A value without a stable form, and where it is."""

    def __init__(self, path: str, value: object, problem: str) -> None:
        super().__init__(f"{path} (of type {type(value).__module__}.{type(value).__qualname__}) {problem}")


def _sized(tag: bytes, content: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(content), content)


def _text(value: str) -> bytes:
    return str.__str__(value).encode("utf-8", "surrogatepass")


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _key(prefix: str, lock_name: str, content: bytes) -> str:
    """What a store appends `:run` and the like to. The braces are Redis Cluster's hash tag."""
    beginning, name = _of_name(prefix, lock_name)
    return f"{beginning}{_digest(name + content)}}}"


@lru_cache(maxsize=1000)
def _of_name(prefix: str, lock_name: str) -> tuple[str, bytes]:
    """What all keys of one name begin with, and the name as it goes into the digest."""
    return f"{prefix}:{VERSION}:{{{shown_name(lock_name)}:", encode(lock_name)


def _encode_arguments(task_name: str, arguments: Mapping[str, Any]) -> bytes:
    parts = [b"m%d:" % len(arguments)]
    for name in sorted(arguments):
        parts += (_sized(b"s", _text(name)), _encode_named(task_name, f"argument {name}", arguments[name]))
    return b"".join(parts)


def _encode_named(task_name: str, name: str, value: object) -> bytes:
    """The canonical form of one value; the error names it and the way out."""
    try:
        return b"".join(_parts(value, name, 0))
    except _Unstable as error:
        raise InvalidKey(
            f"no lock key for task {task_name}: {error}; set lock_key to what makes two calls the same: "
            'a list of other arguments, a template such as "tenant:{tenant_id}", or a callable'
        ) from None


def _ask(task_name: str, lock_key: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return lock_key(arguments)
    except Exception as error:
        raise InvalidKey(f"no lock key for task {task_name}: the callable lock_key raised {error!r}") from error


def _show(value: Any, spec: str | None, conversion: str | None) -> str:
    if conversion or spec:
        return format(_formatter.convert_field(value, conversion), spec or "")
    if isinstance(value, enum.Enum):
        value = value.value
    return str(value) if isinstance(value, _SCALARS) else _digest(encode(value))


def _escape(text: str, literals: str) -> str:
    return "".join(f"%{ord(char):X};" if char in literals else char for char in text)


def _template_names(where: str, template: str) -> list[str]:
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
        if isinstance(error, InvalidOption):
            raise
        raise InvalidOption(f"{where}, which is no template: {error}") from None
    return names


class _Known(NamedTuple):
    """What is remembered of a function.

    Attributes:
        signature: without `self` of a method.
        defaults: of the arguments; None where one of these cannot be given both by place and by name.
    """

    signature: inspect.Signature
    defaults: Mapping[str, Any] | None

    @classmethod
    def of(cls, run: Callable[..., Any]) -> _Known:
        """Ask for it, which takes longer than everything else here.

        Raises:
            TypeError, ValueError: it has no signature.
        """
        signature = inspect.signature(run)
        parameters = signature.parameters.values()
        if any(it.kind is not it.POSITIONAL_OR_KEYWORD for it in parameters):
            return cls(signature, None)
        return cls(signature, {it.name: it.default for it in parameters if it.default is not it.empty})


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


def _signature(run: Callable[..., Any]) -> inspect.Signature | None:
    known = _known_of(run)
    return None if known is None else known.signature


def _takes_any_keyword(signature: inspect.Signature) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _var_keyword(run: Callable[..., Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """What came in by `**kwargs`."""
    signature = _signature(run)
    for parameter in signature.parameters.values() if signature else ():
        if parameter.kind is parameter.VAR_KEYWORD:
            found: Mapping[str, Any] = arguments.get(parameter.name, {})
            return found
    return {}
