"""The key of a lock: a prefix, the version of the key format, the lock's name, and a digest of what makes two calls the
same, according to the task's `lock_key`. It is short enough for a log, and equal in the program that sends and in the
worker that receives. Its label says in a few words what the digest was made from.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock.errors import InvalidKey, InvalidOption
from celery_singleton_lock.keys.arguments import Bound, NotThere, argument_in, bind, name_of, possible
from celery_singleton_lock.keys.encoding import (
    SCALARS,
    Filled,
    digest,
    encode,
    encode_arguments,
    encode_named,
    fields_in,
    fields_of_valid,
    fill,
)

#: The version of the key format, part of every key. Raise it with each change of the format, so that two formats never
#: meet in one lock.
VERSION = 1

#: The suffix that turns the key of a lock into the key of the message that waits for it.
QUEUE = ":queue"

_AFTER_PREFIX = re.compile(rf":[0-9]+:\{{[^{{}}]+:[0-9a-f]{{32}}\}}({QUEUE})?")

#: How many characters of a lock's name its key shows; the digest covers the whole name.
MAX_SHOWN = 100

#: The largest number of characters in a label.
MAX_LABEL = 60

#: Integers up to this are shown in full.
_WHOLE = 10**MAX_LABEL


def key_of(prefix: str, lock_name: str, content: bytes) -> str:
    """The key of a lock. A store appends `:run` and the like. The braces are Redis Cluster's hash tag."""
    beginning, name = _of_name(prefix, lock_name)
    return f"{beginning}{digest(name + content)}}}"


def key_of_text(prefix: str, lock_name: str, text: str) -> str:
    """The key of a call whose caller chose the text for the key."""
    return key_of(prefix, lock_name, encode(text))


def key_of_queue(key: str) -> str:
    """The key that a message holds while it waits for the lock `key`: another lock, in the same slot of a cluster."""
    return f"{key}{QUEUE}"


def is_of_queue(key: str) -> bool:
    """Whether this is the key of a message that waits."""
    return key.endswith(QUEUE)


def without_queue(key: str) -> str:
    """The key of the lock that a message waits for; any other key is returned as it is."""
    return key.removesuffix(QUEUE)


def name_of_beat(name: str) -> str:
    """The name of the locks by which the beats of a schedule are seen."""
    return f"beat:{name}"


def key_of_beat(prefix: str, name: str) -> str:
    """The key beside which the record of what beat has sent is stored."""
    return key_of(prefix, name_of_beat(name), b"")


def name_in(key: str) -> str:
    """The lock's name as far as a key shows it; the key itself if it was not made here."""
    return key.partition("{")[2].rpartition("}")[0].rpartition(":")[0] or key


def shown_name(lock_name: str) -> str:
    """A lock's name as its key shows it."""
    shown = "".join("_" if char in "{}" or char.isspace() or not char.isprintable() else char for char in lock_name)
    return shown[:MAX_SHOWN]


def is_key(prefix: str, text: str) -> bool:
    """Whether the text has the form of a key for locks with this prefix."""
    return text.startswith(f"{prefix}:") and _AFTER_PREFIX.fullmatch(text, len(prefix)) is not None


def has_form_of_key(text: str) -> bool:
    """Whether the text has the form of a key with any prefix."""
    return is_key(text.rpartition(":{")[0].rpartition(":")[0], text)


@lru_cache(maxsize=1000)
def _of_name(prefix: str, lock_name: str) -> tuple[str, bytes]:
    """The beginning of all keys of one name, and the name as it goes into the digest."""
    return f"{prefix}:{VERSION}:{{{shown_name(lock_name)}:", encode(lock_name)


def label_of_arguments(arguments: Mapping[str, object]) -> str:
    """Arguments by name: `tenant_id=7, kind='full'`."""
    # No label has room for more.
    shown = [f"{name}={_in_short(value)}" for name, value in islice(arguments.items(), MAX_LABEL // 4)]
    return label_of_text(", ".join(shown))


def label_of_value(value: object) -> str:
    """The value that a callable returned."""
    return label_of_text(value if isinstance(value, str) else _in_short(value))


def label_of_text(text: str) -> str:
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


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Something that goes into a key.

    Attributes:
        value: the value for display.
        serialized: the canonical form that is hashed; equal for equal parts only.
    """

    value: str
    serialized: str


class CallKey(NamedTuple):
    """The key of a call, a label for display, and the parts that its digest was made from, by name."""

    key: str
    label: str
    counting: Mapping[str, Any]

    def parts(self) -> dict[str, KeyPart]:
        """Everything in the digest besides the lock's name."""
        return {
            name: KeyPart(value.text, _serialized(value.escaped))
            if isinstance(value, Filled)
            else KeyPart(repr(value), _serialized(value))
            for name, value in self.counting.items()
        }


def key_of_call(
    prefix: str, lock_name: str, task_name: str, lock_key: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> CallKey:
    """The key of a call with these arguments, made according to `lock_key`.

    Raises:
        InvalidKey: an argument has no stable form, or no such part, or the callable or the template failed.
    """
    if (bound := bind(run, args, kwargs)) is None:
        # The call does not fit the signature: the body will raise its own TypeError.
        counting = {"args": args, "kwargs": kwargs}
    elif lock_key is None:
        counting = bound.delivered()
    elif callable(lock_key):
        value = _ask(task_name, lock_key, bound.delivered())
        content = encode_named(task_name, "what the callable lock_key returned", value)
        return CallKey(key_of(prefix, lock_name, content), label_of_value(value), {"what lock_key returned": value})
    elif isinstance(counting := _chosen(task_name, lock_key, bound), Filled):
        return _key_of_filled(prefix, lock_name, counting)
    content = encode_arguments(task_name, counting)
    return CallKey(key_of(prefix, lock_name, content), label_of_arguments(counting), counting)


def key_of_choice(prefix: str, lock_name: str, text: str) -> CallKey:
    """The key of a call whose caller chose the text for the key."""
    return _key_of_filled(prefix, lock_name, Filled(text, text))


def _key_of_filled(prefix: str, lock_name: str, filled: Filled) -> CallKey:
    key = key_of_text(prefix, lock_name, filled.escaped)
    return CallKey(key, label_of_text(filled.text), {"the filled template": filled})


def _chosen(task_name: str, lock_key: Any, bound: Bound) -> Any:
    """What a template or a list of paths chooses from the arguments.

    Raises:
        InvalidKey: the template failed, or an argument has no such part.
    """
    try:
        if isinstance(lock_key, str):
            return fill(lock_key, bound.choose(fields_in(lock_key)))
        return bound.choose(lock_key)
    except NotThere as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {lock_key!r} leads nowhere: {error}") from None
    except Exception as error:
        raise InvalidKey(f"no lock key for task {task_name}: lock_key {lock_key!r} failed: {error!r}") from error


def _serialized(value: object) -> str:
    return encode(value).decode(errors="backslashreplace")


def check_lock_key(task_name: str, lock_key: Any, run: Callable[..., Any]) -> None:
    """Refuse a `lock_key` that cannot work, when the task is bound.

    Raises:
        InvalidOption: wrong type, or an argument that `run` does not have.
    """
    if lock_key is None or callable(lock_key):
        return
    where, allowed = f"option lock_key of task {task_name} is {lock_key!r}", possible(run)
    if isinstance(lock_key, str):
        if not (paths := fields_of_valid(where, lock_key)):
            names = [*(allowed or ["tenant_id"])]
            one = lock_key if lock_key in names else names[0]
            raise InvalidOption(
                f"{where}, a template that names no argument, so that all calls would share one lock; name one, as in "
                f"['{one}'] or '{{{one}}}', or write [] if they are to share it"
            )
    elif isinstance(lock_key, (list, tuple)) and all(isinstance(path, str) for path in lock_key):
        paths = list(lock_key)
    else:
        raise InvalidOption(
            f"{where}; allowed: None (all arguments), a list of argument names, a template such as "
            "'tenant:{tenant_id}', or a callable of the dictionary of arguments"
        )
    for path in paths:
        if (name := argument_in(path)) is None:
            raise InvalidOption(f"{where}; {path!r} is neither an argument nor a path into one, such as 'order.id'")
        if allowed is not None and name not in allowed:
            has = ", ".join(allowed) or "none"
            raise InvalidOption(f"{where}, but {name_of(run)} has no argument {name!r}; it has: {has}")


def _ask(task_name: str, lock_key: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return lock_key(arguments)
    except Exception as error:
        raise InvalidKey(
            f"no lock key for task {task_name}: the callable lock_key raised {error!r}; it gets the arguments in the "
            f"form in which a message carries them: {_in_words(arguments)}"
        ) from error


def _in_words(arguments: Mapping[str, Any]) -> str:
    """The types of the arguments; the names of the parts of those that have some."""
    return ", ".join(
        f"{name} with {', '.join(map(str, value)) or 'no parts'}"
        if isinstance(value, Mapping)
        else f"{name}, a {type(value).__name__}"
        for name, value in arguments.items()
    )
