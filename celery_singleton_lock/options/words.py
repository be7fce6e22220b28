"""Names that would do nothing, and what was meant: mistyped, of another package, or in the wrong place."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from celery_singleton_lock import cleaned
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.rules import CALL_KEYS, KEY_ATTRIBUTES, OPTIONS, TASK_OPTIONS

#: How similar two names must be for one to be a typing error of the other: whole names, what is left without the
#: beginning of all, and names that may be the user's own, such as "log_key" and "on_conflict_mail".
_ALIKE, _END_ALIKE, _VERY_ALIKE = 0.8, 0.65, 0.87

#: Options of other packages, by name: the package, and the types of the values that it may have there; other attributes
#: may have the same name.
_FOREIGN: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "once": ("celery-once", (Mapping,)),
    "unique_on": ("celery-singleton", (list, tuple, str)),
    "raise_on_duplicate": ("celery-singleton", (bool,)),
    "lock_expiry": ("celery-singleton", (object,)),
    "heimdall": ("celery-heimdall", (Mapping,)),
}

#: The page with what to write instead of them.
_MIGRATING = "https://celery-singleton-lock.readthedocs.io/en/latest/migrating.html"

#: The argument of a call that holds its options for this package.
_CALL = "singleton_lock"

#: The options whose names begin like some of Celery's.
_POLICIES = tuple(name for name in TASK_OPTIONS if name.startswith("on_"))

#: How a call names each option; None for an option that only a task can have.
_IN_A_CALL: Mapping[str, str | None] = {
    **dict.fromkeys(KEY_ATTRIBUTES),
    **{option.attribute: name if name in CALL_KEYS else None for name, option in OPTIONS.items()},
    "lock_key": "key",
}


def did_you_mean(name: object, allowed: Collection[str]) -> str:
    """The end of an error message about an unknown name."""
    given = cleaned.text(name).lower()
    ends = {_end(it): it for it in allowed}
    whole = () if given.startswith("singleton_lock_") else allowed
    meant = ends.get(_nearest(_end(given), ends, _END_ALIKE)) or _nearest(given, whole, _ALIKE)
    return f"; did you mean {meant!r}?" if meant else f"; allowed: {', '.join(allowed)}"


def misspelled_setting(name: str, settings: Iterable[str]) -> str | None:
    """The setting of this package that was meant, where the name does not begin as they do; None if there is none."""
    return None if name.startswith("singleton_lock_") else _nearest(name, settings, _VERY_ALIKE) or None


def check_attributes(task: Any, base: type) -> None:
    """Refuse attributes of a task class that look like options but are not: their names belong neither to an option nor
    to an attribute of `base`, from which the class is derived.

    Raises:
        InvalidOption: there is such an attribute.
    """
    # Not with hasattr(): asking a base for its app would bind it to one.
    known: set[str] = set().union(TASK_OPTIONS, *map(vars, base.__mro__))
    for cls in (cls for cls in task.__mro__ if cls not in base.__mro__):
        for name, value in [*vars(cls).items()]:  # A signal's handler, or a thread, may use the task meanwhile.
            if name not in known and (why := _foreign(name, value) or _wrong_attribute(name, value)):
                raise InvalidOption(f"task {task.name} has the attribute {name!r}{why}")


def wrong_in_call(options: Mapping[str, Any], task_name: str) -> InvalidOption | None:
    """An error for an option beside `singleton_lock` that would only be carried along in the message; None if there is
    no such option.
    """
    for name, value in options.items():
        if isinstance(name, str) and (why := _foreign(name, value) or _wrong_option(name)):
            return InvalidOption(f"a call of {cleaned.text(task_name)} has the option {cleaned.value_shown(name)}{why}")
    return None


def _foreign(name: str, value: Any) -> str | None:
    """Why an option does nothing that another package has, and what to do; None for any other."""
    package, types = _FOREIGN.get(name, ("", ()))
    return f", an option of {package}; what to write instead is in {_MIGRATING}" if isinstance(value, types) else None


def _wrong_attribute(name: str, value: Any) -> str | None:
    """Why an attribute does nothing that is meant for this package, and what to do; None for any other."""
    if isinstance(value, property):
        return None
    if callable(value):  # Many methods have names that are similar to options.
        is_wrong = any(sorted(it) == sorted(name) for it in TASK_OPTIONS)
    elif name == _CALL:
        return ", an option of a call; on a task, set lock_ttl, lock_wait, on_conflict and the others"
    elif name.startswith("lock_"):
        return f"{did_you_mean(name, TASK_OPTIONS)} (only options of this package are allowed to begin with lock_)"
    else:
        is_wrong = name.startswith(_CALL) or _is_slip(name, TASK_OPTIONS if name.startswith("l") else _POLICIES)
    return did_you_mean(name, TASK_OPTIONS) if is_wrong else None


def _wrong_option(name: str) -> str | None:
    """Why an option of a call does nothing that is meant for this package, and what to do; None for any other."""
    if name in _IN_A_CALL:
        of_call = _IN_A_CALL[name]
        use = "set it on the task" if of_call is None else f"use singleton_lock={{{of_call!r}: …}}"
        return f", which a call does not have; {use}"
    if name.startswith(("lock_", _CALL)) or _is_slip(name, (_CALL, *_POLICIES)):
        return f"; for an option of this package, use singleton_lock={{…}} with any of {', '.join(CALL_KEYS)}"
    return None


# An app has few names of attributes and options, on many tasks and in many calls.
@lru_cache(maxsize=1024)
def _is_slip(name: str, allowed: tuple[str, ...]) -> bool:
    """Whether the name is one of these, mistyped, though it does not begin as only their names may."""
    return bool(_nearest(name, allowed, _VERY_ALIKE))


def _end(name: str) -> str:
    """A name without what many have in common, which would make any two of them similar."""
    return name.removeprefix("singleton_").removeprefix("lock_")


def _nearest(name: str, names: Iterable[str], cutoff: float) -> str:
    """The most similar of these names; an empty text if none is similar enough."""
    return next(iter(difflib.get_close_matches(name, tuple(names), n=1, cutoff=cutoff)), "")
