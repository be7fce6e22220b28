"""Finds names on a task, or in a call of one, that were surely meant for this package but would do nothing there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_singleton_lock import cleaned
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.rules import CALL_KEYS, KEY_ATTRIBUTES, OPTIONS, SCOPES, TASK_OPTIONS
from celery_singleton_lock.options.words import FOREIGN, MIGRATING, did_you_mean, is_anagram, is_slip

#: The options whose names begin like some of Celery's.
_POLICIES = tuple(name for name in TASK_OPTIONS if name.startswith("on_"))

#: How a call names each option; None for an option that only a task can have.
_IN_A_CALL: Mapping[str, str | None] = {
    **dict.fromkeys(KEY_ATTRIBUTES),
    **{option.attribute: name if name in CALL_KEYS else None for name, option in OPTIONS.items()},
    "lock_key": "key",
}

#: The argument of a call that holds its options for this package, and the beginning of an app's settings.
_CALL, _SETTING = "singleton_lock", "singleton_"


def check_attributes(task: Any, base: type) -> None:
    """Refuse attributes of a task class that look like options but are not: their names belong neither to an option nor
    to an attribute of `base`, from which the class is derived.

    Raises:
        InvalidOption: there is such an attribute.
    """
    # Not with hasattr(): asking a base for its app would bind it to one.
    known: set[str] = set().union(*map(vars, base.__mro__))
    for cls in (cls for cls in task.__mro__ if cls not in base.__mro__):
        for name, value in [*vars(cls).items()]:  # A signal's handler, or a thread, may use the task meanwhile.
            if name not in known and (why := _wrong_attribute(name, value)) is not None:
                raise InvalidOption(f"task {task.name} has the attribute {name!r}{why}")


def _wrong_attribute(name: str, value: Any) -> str | None:
    """Why the attribute does nothing, and what to do; None for an option, or if it is not meant for this package."""
    if (foreign := _foreign(name, value)) is not None:
        return foreign
    if name in TASK_OPTIONS or isinstance(value, property):
        return None
    if callable(value):  # Many methods have names that are similar to options.
        return did_you_mean(name, TASK_OPTIONS) if is_anagram(name, TASK_OPTIONS) else None
    return _unknown(name, value)


def _unknown(name: str, value: Any) -> str | None:
    """The same for an attribute that is neither an option nor a method."""
    if name == _CALL:
        return ", an option of a call; on a task, set lock_ttl, lock_wait, on_conflict and the others"
    if name.startswith(_CALL):
        return did_you_mean(name.removeprefix(_SETTING), TASK_OPTIONS)
    if name.startswith("lock_"):
        return f"{did_you_mean(name, TASK_OPTIONS)} (only options of this package are allowed to begin with lock_)"
    if name == "scope" and isinstance(value, str) and value in SCOPES:
        return "; did you mean 'lock_scope'?"
    may_be_ours = TASK_OPTIONS if name.startswith("l") else _POLICIES
    return did_you_mean(name, TASK_OPTIONS) if is_slip(name, may_be_ours) else None


def _foreign(name: str, value: Any) -> str | None:
    foreign = FOREIGN.get(name)
    if foreign is None or not foreign.looks_so(value):
        return None
    return f", an option of {foreign.package}; what to write instead is in {MIGRATING}"


def wrong_in_call(options: Mapping[str, Any], task_name: str) -> InvalidOption | None:
    """An error for an option beside `singleton_lock` that would only be carried along in the message; None if there is
    no such option.
    """
    for name, value in options.items():
        if isinstance(name, str) and (why := _wrong_option(name, value)) is not None:
            return InvalidOption(f"a call of {cleaned.text(task_name)} has the option {cleaned.value_shown(name)}{why}")
    return None


def _wrong_option(name: str, value: Any) -> str | None:
    """As `_wrong_attribute`."""
    if (foreign := _foreign(name, value)) is not None:
        return foreign
    if name in _IN_A_CALL:
        of_call = _IN_A_CALL[name]
        use = "set it on the task" if of_call is None else f"use singleton_lock={{{of_call!r}: …}}"
        return f", which a call does not have; {use}"
    if name.startswith(("lock_", _CALL)) or is_slip(name, (_CALL, *_POLICIES)):
        return f"; for an option of this package, use singleton_lock={{…}} with any of {', '.join(CALL_KEYS)}"
    return None
