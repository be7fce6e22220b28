"""The name of each option and setting, and the values that it may have.

Every value is checked by its rule before anything is sent or locked. A rule's comparison may raise anything; the value
is then refused.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from celery_singleton_lock import cleaned
from celery_singleton_lock.errors import InvalidOption

#: What an execution does when it meets a held lock.
ConflictPolicy = Literal["skip", "raise", "retry", "reject", "rerun", "replace", "join"]
POLICIES: tuple[ConflictPolicy, ...] = get_args(ConflictPolicy)

#: The policy under which an execution takes the result of the task that holds the lock.
JOIN: ConflictPolicy = "join"

#: The policies under which only the newest waiting message runs; REPLACE also stops the older message that is running.
#: They must be known before a lock is asked for: no callable can choose them.
REPLACE: ConflictPolicy = "replace"
NEWEST_POLICIES: tuple[ConflictPolicy, ...] = ("rerun", REPLACE)

#: The policies under which a message that met a held lock waits.
WAITING_POLICIES: tuple[ConflictPolicy, ...] = ("retry", JOIN, *NEWEST_POLICIES)

#: What happens to a call that is sent while the message of another call has the lock, waiting or running.
DuplicatePolicy = Literal["existing", "raise", "skip", "replace"]
DUPLICATE_POLICIES: tuple[DuplicatePolicy, ...] = get_args(DuplicatePolicy)

#: When the lock of a task is held. All scopes but the first begin when its message is sent.
WHILE_EXECUTING, UNTIL_EXECUTING, UNTIL_EXECUTED, UNTIL_AND_WHILE_EXECUTING, UNTIL_EXPIRED = SCOPES = (
    "while_executing",
    "until_executing",
    "until_executed",
    "until_and_while_executing",
    "until_expired",
)

#: A lease shorter than this cannot be renewed three times over a network.
MIN_TTL = 1.0

#: A longer lease would keep a dead worker's lock for more than a day.
MAX_TTL = 86_400.0

#: The longest time in seconds for which a finished message is remembered: 30 days.
MAX_DONE_TTL = 2_592_000.0

#: The longest time in seconds for which a waiting message keeps others from being sent: 30 days.
MAX_QUEUE_TTL = 2_592_000.0

#: For how long a message that waits keeps its lock if nothing says how long, beyond its countdown.
QUEUE_TTL = 3600.0

#: The most entries that a journal can keep, each of some hundred bytes.
MAX_JOURNAL = 1_000_000

#: With more holders of one key than this, it is not a lock any more: each acquire looks at all of them.
MAX_LIMIT = 1000

#: No integer that is larger is a float.
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True)
class Rule:
    """A test of a value, and its description for an error message."""

    allows: Callable[[Any], bool]
    words: str

    def require(self, value: Any, where: str, *, secret: bool = False) -> Any:
        """The value; an error says where it was found, and shows it unless it is secret.

        Raises:
            InvalidOption: the value is not allowed.
        """
        try:
            allowed = self.allows(value)
        except Exception:  # noqa: BLE001 - comparing may raise anything, as it does for a numpy array
            allowed = False
        if not allowed:
            found = "of the wrong type" if secret else cleaned.value_shown(value)
            raise InvalidOption(f"{where} is {found}; allowed: {self.words}")
        return value


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name on a task and in the settings, its default, and its rule."""

    attribute: str
    setting: str
    default: Any
    rule: Rule


def is_seconds(value: object) -> bool:
    """Whether the value is a finite number, of either sign."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def is_whole(value: object, least: int, most: int) -> bool:
    """Whether the value is an integer within these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def one_of(*names: str) -> Rule:
    return Rule(lambda value: value in names, " or ".join(map(repr, names)))


def _seconds_to(most: float, *, least: float = 0.0) -> Rule:
    return Rule(
        lambda value: is_seconds(value) and least <= value <= most, f"a number of seconds from {least:g} to {most:.15g}"
    )


def _seconds(end: str = "") -> Rule:
    return Rule(lambda value: is_seconds(value) and value >= 0, f"a number of seconds, 0 or more{end}")


def _whole_to(most: int, *, least: int = 0, of_least: str = "") -> Rule:
    return Rule(lambda value: is_whole(value, least, most), f"a whole number from {least}{of_least} to {most}")


TTL = _seconds_to(MAX_TTL, least=MIN_TTL)
BOOLEAN = Rule(lambda value: isinstance(value, bool), "True or False")
TEXT = Rule(lambda value: isinstance(value, str) and value != "", "a non-empty text")

_RETRIES = Rule(
    lambda value: value is None or is_whole(value, 0, cleaned.MAX_COUNT),
    "a whole number, 0 or more, or None for no limit",
)


def takes(function: Any, count: int) -> bool:
    """Whether it can be called with so many arguments; True for a function without a signature, as some in C are."""
    if not callable(function):
        return False
    try:
        with suppress(ValueError):  # It has no signature.
            inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _policy(names: Sequence[str], given: str, *, not_chosen: Sequence[str] = ()) -> Rule:
    """One of these policies, or a callable that chooses one."""
    but = f" except {one_of(*not_chosen).words}" if not_chosen else ""
    return Rule(
        lambda value: takes(value, 2) or (isinstance(value, str) and value in names),
        f"{one_of(*names).words}, or a callable of (task, {given}) that returns one of these{but}",
    )


#: The options of a task, by their names in `Options`.
OPTIONS: Mapping[str, Option] = {
    "scope": Option("lock_scope", "singleton_lock_scope", WHILE_EXECUTING, one_of(*SCOPES)),
    "ttl": Option("lock_ttl", "singleton_lock_ttl", 30.0, TTL),
    "wait": Option("lock_wait", "singleton_lock_wait", 0.0, _seconds()),
    "on_conflict": Option(
        "on_conflict", "singleton_lock_on_conflict", "skip", _policy(POLICIES, "conflict", not_chosen=NEWEST_POLICIES)
    ),
    "conflict_retries": Option("lock_conflict_retries", "singleton_lock_conflict_retries", None, _RETRIES),
    "on_lock_lost": Option("on_lock_lost", "singleton_lock_on_lock_lost", "abort", one_of("abort", "warn")),
    "on_unavailable": Option(
        "on_unavailable", "singleton_lock_on_unavailable", "retry", one_of("retry", "raise", "run")
    ),
    "retain_on_retry": Option("lock_retain_on_retry", "singleton_lock_retain_on_retry", False, BOOLEAN),
    "limit": Option("lock_limit", "singleton_lock_limit", 1, _whole_to(MAX_LIMIT, least=1)),
    "at_least_for": Option("lock_at_least_for", "singleton_lock_at_least_for", 0.0, _seconds_to(MAX_TTL)),
    "on_duplicate": Option(
        "on_duplicate", "singleton_lock_on_duplicate", "existing", _policy(DUPLICATE_POLICIES, "duplicate")
    ),
    "queue_ttl": Option("lock_queue_ttl", "singleton_lock_queue_ttl", None, _seconds_to(MAX_QUEUE_TTL, least=1.0)),
    "on_send_unavailable": Option(
        "on_send_unavailable", "singleton_lock_on_send_unavailable", "send", one_of("send", "raise")
    ),
}

#: Task attributes of this package without an app-wide default.
KEY_ATTRIBUTES = ("lock_key", "lock_name")

#: Every option of a task, by its name on the task.
TASK_OPTIONS = (*KEY_ATTRIBUTES, *(option.attribute for option in OPTIONS.values()))

#: Options that a call may not change: they decide whether it duplicates another call, or mean nothing to a worker.
_OF_THE_TASK = ("scope", "limit", "on_duplicate", "queue_ttl", "on_send_unavailable")

#: The keys that `singleton_lock={...}` of a call may have.
CALL_KEYS = ("key", *(name for name in OPTIONS if name not in _OF_THE_TASK))


class CallOptions(TypedDict, total=False):
    """What `singleton_lock={...}` of a call may contain, for type checkers: see `SingletonTask.apply_async`."""

    key: str
    ttl: float
    wait: float
    at_least_for: float
    on_conflict: ConflictPolicy
    conflict_retries: int | None
    on_lock_lost: Literal["abort", "warn"]
    on_unavailable: Literal["retry", "raise", "run"]
    retain_on_retry: bool


#: The name of `singleton_lock=False` in `singleton_lock_accept`, and all names that this setting may contain.
DISABLE = "disable"
ACCEPTABLE = (DISABLE, *CALL_KEYS)


#: App settings other than the defaults of task options.
LOCK_SETTINGS: Mapping[str, Rule] = {
    "singleton_lock_backend": Rule(lambda value: isinstance(value, str), "a URL"),
    "singleton_lock_transport_options": Rule(
        lambda value: isinstance(value, Mapping), "a dictionary, as for broker_transport_options"
    ),
    "singleton_lock_prefix": Rule(
        lambda value: isinstance(value, str) and re.fullmatch(r"[\w.:/-]{1,100}", value, re.ASCII) is not None,
        "1 to 100 letters, digits, or any of _ . : / -",
    ),
    "singleton_lock_enabled": BOOLEAN,
    "singleton_lock_labels": BOOLEAN,
    "singleton_lock_done_ttl": _seconds_to(MAX_DONE_TTL),
    "singleton_lock_journal": _whole_to(MAX_JOURNAL, of_least=" (no journal)"),
    "singleton_lock_blocked_after": Rule(
        lambda value: is_whole(value, 0, cleaned.MAX_COUNT), "a whole number, 0 (never) or more"
    ),
    "singleton_lock_accept": Rule(
        lambda value: (
            value in ("all", "none")
            or (isinstance(value, (list, tuple, set, frozenset)) and all(name in ACCEPTABLE for name in value))
        ),
        f"'all', 'none', or a list of any of {', '.join(map(repr, ACCEPTABLE))}",
    ),
}

#: Settings of beat's exclusive scheduler.
BEAT_SETTINGS: Mapping[str, Rule] = {
    "singleton_lock_beat_scheduler": Rule(
        lambda value: (isinstance(value, str) and value != "") or isinstance(value, type),
        "a scheduler class, or its name such as 'celery.beat:PersistentScheduler'",
    ),
    "singleton_lock_beat_ttl": TTL,
    "singleton_lock_beat_catch_up": _seconds(", or None for no limit"),
    "singleton_lock_beat_name": TEXT,
}

#: Every setting of this package.
SETTINGS: Mapping[str, Rule] = {
    **LOCK_SETTINGS,
    **{option.setting: option.rule for option in OPTIONS.values()},
    **BEAT_SETTINGS,
}

#: Settings whose values may contain a password, and are not shown.
SECRET = ("singleton_lock_backend", "singleton_lock_transport_options")


def setting(conf: Any, name: str, default: Any = None) -> Any:
    """A setting of an app, checked; the default if it is not set.

    Raises:
        InvalidOption: the value is not allowed.
    """
    value = conf.get(name)
    return default if value is None else SETTINGS[name].require(value, f"setting {name}", secret=name in SECRET)
