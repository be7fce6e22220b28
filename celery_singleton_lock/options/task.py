"""The options of one execution: looked up in the call (`singleton_lock={...}`), on the task (`lock_ttl = 60`), in the
app's settings (`singleton_lock_ttl = 60`), and last in the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import may_be_asked
from celery_singleton_lock.backend import Kind
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import (
    ACCEPTABLE,
    CALL_KEYS,
    DISABLE,
    JOIN,
    MAX_LIMIT,
    NEWEST_POLICIES,
    OPTIONS,
    REPLACE,
    TEXT,
    UNTIL_AND_WHILE_EXECUTING,
    UNTIL_EXECUTED,
    UNTIL_EXECUTING,
    UNTIL_EXPIRED,
    ConflictPolicy,
    DuplicatePolicy,
    Option,
    is_seconds,
    takes,
)
from celery_singleton_lock.options.words import check_attributes, did_you_mean

#: The most seconds that a message may ask for, unless the task or the settings say more themselves.
MAX_ASKED = 3600.0

#: The options of a call with that bound: for this long, a message may keep others out, or occupy a worker's slot.
_BOUNDED = ("ttl", "wait", "at_least_for")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one execution locks: the task options of these names, and `key`, a text from the caller that replaces the one
    made from the arguments. All times are seconds. `on_unavailable` is "wait" only for an item of a map, which keeps
    asking.
    """

    scope: str
    ttl: float
    wait: float
    on_conflict: ConflictPolicy | Callable[..., Any]
    conflict_retries: int | None
    on_lock_lost: Literal["abort", "warn"]
    on_unavailable: Literal["retry", "raise", "run", "wait"]
    retain_on_retry: bool
    limit: int
    at_least_for: float
    on_duplicate: DuplicatePolicy | Callable[..., Any]
    queue_ttl: float | None
    on_send_unavailable: Literal["send", "raise"]
    key: str | None = None


def options_for(task: Any, settings: Settings, call: Mapping[str, Any] | None = None) -> Options:
    """The options of one execution of `task`; `call` is what the caller gave as `singleton_lock={...}`.

    Raises:
        InvalidOption: a value is not allowed.
    """
    # Not type(task): this may be Celery's proxy for a task.
    given, own = _attributes(task), task.__class__
    latest: tuple[Any, Settings, Options] | None = own.__dict__.get(_LATEST)
    if latest is None or latest[0] != given or latest[1] is not settings:
        latest = given, settings, _options_of(task, settings)
        setattr(own, _LATEST, latest)
    options = latest[2]
    if call:
        check_together(task, options := replace(options, **call), settings)
    return options


#: The attribute of a task's class that keeps the options of its last execution, and what they were made from, because
#: attributes may be set at any time. Not a weak dictionary: an option may be a method, which refers to the class.
_LATEST = "_singleton_lock_latest"

_attributes = attrgetter(*(option.attribute for option in OPTIONS.values()))


#: Defaults of a scope, where neither the task nor the app sets the option: a message that waits behind a run must be
#: carried out, and nothing else may run between two attempts of a task that is exclusive until its end.
_DEFAULTS_OF_SCOPE: Mapping[str, Mapping[str, Any]] = {
    UNTIL_AND_WHILE_EXECUTING: {"on_conflict": "retry"},
    UNTIL_EXECUTED: {"retain_on_retry": True},
}


def _options_of(task: Any, settings: Settings) -> Options:
    given = {
        name: option.rule.require(value, f"option {option.attribute} of task {task.name}")
        for name, option in OPTIONS.items()
        if (value := raw_attribute(task, option.attribute)) is not None
    }
    values = {**settings.defaults, **given}
    for name, value in _DEFAULTS_OF_SCOPE.get(values["scope"], {}).items():
        if name not in given and name not in settings.given:
            values[name] = value
    check_together(task, options := Options(**values), settings)
    return options


def replaces(task: Any, options: Options, settings: Settings) -> bool:
    """Whether a callable `on_duplicate` may choose "replace"."""
    return _conflict(task, replace(options, on_duplicate="replace"), settings) is None


def check_together(task: Any, options: Options, settings: Settings) -> None:
    """Refuse options that cannot work together, or not with the other settings.

    Raises:
        InvalidOption: the error says why, and what to do instead.
    """
    if (why := _conflict(task, options, settings)) is not None:
        raise InvalidOption(why)


def _conflict(task: Any, options: Options, settings: Settings) -> str | None:
    for conflict in CONFLICTS:
        if conflict.is_met(options, task, settings):
            where = f"option {OPTIONS[conflict.option].attribute} of task {task.name}"
            why = conflict.why.format(its=options, settings=settings)
            return f"{where} is {getattr(options, conflict.option)!r}{why}"
    return None


class Conflict(NamedTuple):
    """An option that does not work with others, or with the settings.

    Attributes:
        option: its name in `Options`.
        values: its values for which something else can be wrong.
        is_wrong: whether that is so.
        why: the end of the error.
    """

    option: str
    values: Sequence[Any]
    is_wrong: Callable[[Options, Any, Settings], bool]
    why: str

    def is_met(self, its: Options, task: Any, settings: Settings) -> bool:
        value = getattr(its, self.option)
        if value == JOIN and task.app.conf.task_always_eager:
            return False  # Nothing is joined there.
        return value in self.values and self.is_wrong(its, task, settings)


def _is_on_a_redlock(_its: Options, _task: Any, settings: Settings) -> bool:
    return settings.backend.kind is Kind.REDLOCK


#: The end of an error about options for which the nodes of a Redlock would have to agree on more than a holder.
_NOT_ON_A_REDLOCK = (
    ", which does not work on a Redlock ({{settings.backend.masked}}); allowed there: {}; or set "
    "singleton_lock_backend to one server, Sentinels or a cluster"
)

#: All of them; the first one that is met is reported.
CONFLICTS = (
    Conflict(
        "scope",
        (UNTIL_EXPIRED,),
        lambda its, *_: its.queue_ttl is None,
        ", which needs lock_queue_ttl: the seconds for which no other call is sent",
    ),
    Conflict(
        "on_conflict",
        (JOIN,),
        lambda its, task, _: bool(raw_attribute(task, "ignore_result")),
        ", which needs its results: set ignore_result=False, or another on_conflict",
    ),
    Conflict(
        "on_conflict",
        (JOIN,),
        lambda its, task, _: not may_be_asked(task.backend),
        ", which needs a result backend that workers can read (not rpc://): set result_backend",
    ),
    Conflict(
        "on_conflict",
        (JOIN,),
        lambda its, task, settings: settings.done_ttl <= 0,
        ", which needs singleton_lock_done_ttl above 0: for that long, the end of a task is known",
    ),
    Conflict(
        "on_conflict",
        (JOIN,),
        lambda its, *_: its.limit > 1,
        ", which needs lock_limit=1, found {its.limit}: one task holds the lock, and is joined",
    ),
    Conflict(
        "on_duplicate",
        ("replace",),
        lambda its, *_: its.scope in (UNTIL_EXECUTED, UNTIL_EXPIRED),
        " with lock_scope {its.scope!r}, under which the message that has the lock may be running already; allowed: "
        f"{UNTIL_EXECUTING!r} and {UNTIL_AND_WHILE_EXECUTING!r}, under which it waits",
    ),
    Conflict(
        "on_duplicate",
        ("replace",),
        lambda its, *_: its.limit > 1,
        " with lock_limit {its.limit}; allowed: lock_limit 1, since with several waiting messages it is not clear "
        "which one to replace",
    ),
    Conflict(
        "on_conflict",
        NEWEST_POLICIES,
        lambda its, *_: its.limit > 1,
        " with lock_limit {its.limit}; allowed: lock_limit 1, since with several running tasks it is not clear which "
        "one the newest follows; with a limit, use on_conflict='retry'",
    ),
    Conflict(
        "on_conflict",
        NEWEST_POLICIES,
        lambda its, *_: its.scope in (UNTIL_EXECUTING, UNTIL_EXPIRED),
        " with lock_scope {its.scope!r}, under which runs do not exclude each other, so that none ever waits; use "
        "lock_scope='while_executing'",
    ),
    Conflict(
        "on_conflict",
        NEWEST_POLICIES,
        lambda its, *_: its.conflict_retries is not None,
        " with lock_conflict_retries {its.conflict_retries}; the newest waits until the lock is free: remove "
        "lock_conflict_retries, or use on_conflict='retry'",
    ),
    Conflict(
        "on_conflict",
        (REPLACE,),
        lambda its, *_: its.on_lock_lost != "abort",
        " with on_lock_lost {its.on_lock_lost!r}, so that a run that should stop goes on; allowed: "
        "on_lock_lost='abort'; or use on_conflict='rerun', which waits for the run to end",
    ),
    Conflict("limit", range(2, MAX_LIMIT + 1), _is_on_a_redlock, _NOT_ON_A_REDLOCK.format("lock_limit 1")),
    Conflict("on_duplicate", ("replace",), _is_on_a_redlock, _NOT_ON_A_REDLOCK.format("'existing', 'raise' or 'skip'")),
    Conflict(
        "on_conflict", NEWEST_POLICIES, _is_on_a_redlock, _NOT_ON_A_REDLOCK.format("another policy, such as 'retry'")
    ),
)


def chosen_policy(option: str, policy: object, task: Any, met: Exception, allowed: Sequence[str]) -> Any:
    """The policy that an option names, or that its callable returns for the conflict or duplicate `met`.

    Raises:
        InvalidOption: the user's callable did not return a policy.
    """
    if not callable(policy):
        return policy
    answer = policy(task, met)
    if answer not in allowed:
        raise InvalidOption(
            f"the callable {option} of task {task.name} returned {cleaned.value_shown(answer)}; allowed: "
            f"{', '.join(allowed)}"
        )
    return answer


#: The options that may be callables, and with how many arguments they are called.
_CALLED_WITH = {"lock_key": 1, "on_conflict": 2, "on_duplicate": 2}


def check_task(task: Any, base: type) -> None:
    """Refuse wrong options of a task class derived from `base`, when it is bound to its app, before anything is sent.

    A function that is given to `@app.task(...)` as an option becomes a static method; otherwise it would be a method of
    the task's class. One that takes `self` as well is one.

    Raises:
        InvalidOption: an option is unknown or its value is not allowed.
    """
    for attribute, count in _CALLED_WITH.items():
        if takes(function := raw_attribute(task, attribute), count):
            setattr(task, attribute, staticmethod(function))
    rules = {option.attribute: option.rule for option in OPTIONS.values()} | {"lock_name": TEXT}
    for attribute, rule in rules.items():
        value = raw_attribute(task, attribute)
        if value is not None:
            rule.require(value, f"option {attribute} of task {task.name}")
    check_attributes(task, base)


def check_call(value: object, task_name: str) -> Mapping[str, Any] | Literal[False] | None:
    """The value of `apply_async(singleton_lock=...)`: a dictionary, False (no lock), or None (the task's options).

    True means the same as None.

    Raises:
        InvalidOption: anything else; in the producer before sending, and in the worker for messages of other senders.
    """
    where = f"singleton_lock in a call of {task_name}"
    if value is None or isinstance(value, bool):
        return False if value is False else None
    if not isinstance(value, Mapping):
        raise InvalidOption(
            f"{where} is {cleaned.value_shown(value)}, but must be a dictionary, or False to run without a lock"
        )
    for name in value:
        if name not in CALL_KEYS:
            raise InvalidOption(f"{where} has the key {cleaned.value_shown(name)}{did_you_mean(name, CALL_KEYS)}")
        rule = TEXT if name == "key" else OPTIONS[name].rule
        rule.require(value[name], f"{where}, key {name!r},")
        if callable(value[name]):
            raise InvalidOption(f"{where}: {name!r} is a callable, which no message can carry; set it on the task")
    return dict(value)


def check_accepted(call: Mapping[str, Any] | Literal[False] | None, accept: frozenset[str], task: Any) -> None:
    """Refuse options of a call, as `check_call` returned them, that a worker does not take from a message.

    Raises:
        InvalidOption: one of them is not accepted; in the producer before sending, and in the worker.
    """
    where = f"singleton_lock in a call of {task.name}"
    for name in (DISABLE,) if call is False else call or ():
        if name not in accept:
            asked = "False" if call is False else f"given with {name!r}"
            raise InvalidOption(
                f"{where} is {asked}, which workers do not accept from a message; setting "
                "singleton_lock_accept allows "
                f"{', '.join(it for it in ACCEPTABLE if it in accept) or 'nothing'}: add {name!r} to it, or "
                "set the option on the task"
            )
    for name in _BOUNDED if call else ():
        asked_for, most = (call or {}).get(name, 0.0), max(MAX_ASKED, _own_seconds(task, OPTIONS[name]))
        if asked_for > most:
            raise InvalidOption(
                f"{where} has the key {name!r} with {cleaned.value_shown(asked_for)}; allowed in a message: "
                f"at most {most:g} seconds; for more, set {OPTIONS[name].attribute} on the task"
            )


def _own_seconds(task: Any, option: Option) -> float:
    own = raw_attribute(task, option.attribute)
    value = task.app.conf.get(option.setting) if own is None else own
    return float(value) if is_seconds(value) else 0.0


def raw_attribute(task: Any, name: str) -> Any:
    """An option as set on a task, or on its class; None if only the task can say it, by a property."""
    value = getattr(task, name, None)
    return None if type(value) is property else value
