"""Task options and app settings: what they are called, what they may be, and where each value comes from.

A value is looked up for the call (`singleton_lock={...}`), on the task (`lock_ttl = 60`), in the app's settings
(`singleton_lock_ttl = 60`), and last here. Whatever is found is checked before anything is sent or locked.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MethodType
from typing import Any, Literal, NamedTuple, get_args
from weakref import WeakKeyDictionary

from celery_singleton_lock import backend as backend_url
from celery_singleton_lock import cleaned
from celery_singleton_lock.backend import SCHEMES, shown
from celery_singleton_lock.backend import scheme as _scheme
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.visibility import visibility_timeout

#: What an execution does that meets a held lock.
ConflictPolicy = Literal["skip", "raise", "retry", "reject"]

#: A lease shorter than this cannot be renewed three times over a network.
MIN_TTL = 1.0

#: A longer one would keep a dead worker's lock for more than a day.
MAX_TTL = 86_400.0

#: Seconds after which another beat takes over from one that died, unless the setting says otherwise.
DEFAULT_BEAT_TTL = 10.0

#: Seconds for which it is remembered at least that a message was carried out, unless the setting says otherwise.
MIN_DONE_TTL = 3600.0

#: And at most: 30 days.
MAX_DONE_TTL = 2_592_000.0

#: Entries that the journal keeps unless the setting says otherwise, and at most: some hundred bytes each.
DEFAULT_JOURNAL, MAX_JOURNAL = 10_000, 1_000_000

#: Refusals in a row after which there is a warning, unless the setting says otherwise.
DEFAULT_BLOCKED_AFTER = 12

#: Schemes of which several URLs joined by `;` are the nodes of a Redlock.
_NODES = ("redis", "rediss", "redis+socket", "unix")

#: More holders of one key than this are no lock: each look at it passes over all of them.
MAX_LIMIT = 1000

#: Nodes of a Redlock: fewer have no majority that survives one, more cost much and add little.
MIN_NODES, MAX_NODES = 3, 9


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a value may be, as a test and in words."""

    allows: Callable[[Any], bool]
    words: str


def _is_seconds(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # A whole number beyond what a float holds.
        return False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= cleaned.MAX_COUNT


def _one_of(*names: str) -> _Rule:
    return _Rule(lambda value: value in names, " or ".join(repr(name) for name in names))


_TTL = _Rule(
    lambda value: _is_seconds(value) and MIN_TTL <= value <= MAX_TTL,
    f"a number of seconds from {MIN_TTL:g} to {MAX_TTL:g}",
)
_WAIT = _Rule(lambda value: _is_seconds(value) and value >= 0, "a number of seconds, 0 or more")
_AT_LEAST = _Rule(
    lambda value: _is_seconds(value) and 0 <= value <= MAX_TTL, f"a number of seconds from 0 to {MAX_TTL:g}"
)
_DONE_TTL = _Rule(
    lambda value: _is_seconds(value) and 0 <= value <= MAX_DONE_TTL, f"a number of seconds from 0 to {MAX_DONE_TTL:g}"
)
_COUNT = _Rule(
    lambda value: value is None or _is_count(value),
    "a whole number, 0 or more, or None for no bound",
)
_LIMIT = _Rule(
    lambda value: isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_LIMIT,
    f"a whole number from 1 to {MAX_LIMIT}",
)
_REPLICAS = _Rule(
    lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100,
    "a whole number from 0 to 100",
)
_JOURNAL = _Rule(
    lambda value: _is_count(value) and value <= MAX_JOURNAL, f"a whole number from 0 (no journal) to {MAX_JOURNAL}"
)
_BLOCKED_AFTER = _Rule(_is_count, "a whole number, 0 (never) or more")
POLICIES: tuple[ConflictPolicy, ...] = get_args(ConflictPolicy)
_POLICY = _Rule(
    lambda value: callable(value) or (isinstance(value, str) and value in POLICIES),
    f"{_one_of(*POLICIES).words}, or a callable of (task, conflict) that returns one of them",
)
_BOOLEAN = _Rule(lambda value: isinstance(value, bool), "True or False")
_PREFIX = _Rule(
    lambda value: isinstance(value, str) and re.fullmatch(r"[\w.:/-]{1,100}", value, re.ASCII) is not None,
    "1 to 100 letters, digits, or any of _ . : / -",
)
_SCHEDULER = _Rule(
    lambda value: (isinstance(value, str) and value != "") or isinstance(value, type),
    "a scheduler class, or its name such as 'celery.beat:PersistentScheduler'",
)
_CATCH_UP = _Rule(
    lambda value: _is_seconds(value) and value >= 0, "a number of seconds, 0 or more, or None for no bound"
)
_MAPPING = _Rule(lambda value: isinstance(value, Mapping), "a dictionary, as for broker_transport_options")
_TEXT = _Rule(lambda value: isinstance(value, str) and value != "", "a text that is not empty")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name on a task and in the settings, its default, and its rule."""

    attribute: str
    setting: str
    default: Any
    rule: _Rule


#: Those of a task, by their names in `Options`.
OPTIONS: Mapping[str, Option] = {
    "scope": Option("lock_scope", "singleton_lock_scope", "while_executing", _one_of("while_executing")),
    "ttl": Option("lock_ttl", "singleton_lock_ttl", 30.0, _TTL),
    "wait": Option("lock_wait", "singleton_lock_wait", 0.0, _WAIT),
    "on_conflict": Option("on_conflict", "singleton_lock_on_conflict", "skip", _POLICY),
    "conflict_retries": Option("lock_conflict_retries", "singleton_lock_conflict_retries", None, _COUNT),
    "on_lock_lost": Option("on_lock_lost", "singleton_lock_on_lock_lost", "abort", _one_of("abort", "warn")),
    "on_unavailable": Option(
        "on_unavailable", "singleton_lock_on_unavailable", "retry", _one_of("retry", "raise", "run")
    ),
    "retain_on_retry": Option("lock_retain_on_retry", "singleton_lock_retain_on_retry", False, _BOOLEAN),
    "limit": Option("lock_limit", "singleton_lock_limit", 1, _LIMIT),
    "at_least_for": Option("lock_at_least_for", "singleton_lock_at_least_for", 0.0, _AT_LEAST),
}

#: What may stand in the `singleton_lock={...}` of a call.
CALL_KEYS = ("key", *(name for name in OPTIONS if name not in ("scope", "limit")))

#: What `singleton_lock_accept` calls `singleton_lock=False`, and all that it may name.
DISABLE = "disable"
ACCEPTABLE = (DISABLE, *CALL_KEYS)

#: Seconds that a message may ask for at most, where the task and the settings do not say more themselves.
MAX_ASKED = 3600.0

#: Options of a call that are bounded by that: for so long a message may keep others out, or a worker's slot.
_BOUNDED = ("ttl", "wait", "at_least_for")


def _is_acceptable(value: object) -> bool:
    if isinstance(value, str):
        return value in ("all", "none")
    return isinstance(value, (list, tuple, set, frozenset)) and all(name in ACCEPTABLE for name in value)


_ACCEPT = _Rule(_is_acceptable, f"'all', 'none', or a list of any of {', '.join(map(repr, ACCEPTABLE))}")

#: App settings that are not a default of a task option.
LOCK_SETTINGS: Mapping[str, _Rule] = {
    "singleton_lock_backend": _Rule(lambda value: isinstance(value, str), "a URL"),
    "singleton_lock_transport_options": _MAPPING,
    "singleton_lock_prefix": _PREFIX,
    "singleton_lock_enabled": _BOOLEAN,
    "singleton_lock_done_ttl": _DONE_TTL,
    "singleton_lock_replicas": _REPLICAS,
    "singleton_lock_journal": _JOURNAL,
    "singleton_lock_blocked_after": _BLOCKED_AFTER,
    "singleton_lock_accept": _ACCEPT,
}

#: Settings whose values hold a password, and are not shown.
_SECRET = ("singleton_lock_backend", "singleton_lock_transport_options")

#: Settings of beat's exclusive scheduler.
BEAT_SETTINGS: Mapping[str, _Rule] = {
    "singleton_lock_beat_scheduler": _SCHEDULER,
    "singleton_lock_beat_mode": _one_of("leader", "shared"),
    "singleton_lock_beat_ttl": _TTL,
    "singleton_lock_beat_catch_up": _CATCH_UP,
    "singleton_lock_beat_name": _TEXT,
}

#: Every setting of ours.
SETTINGS: Mapping[str, _Rule] = {
    **LOCK_SETTINGS,
    **{option.setting: option.rule for option in OPTIONS.values()},
    **BEAT_SETTINGS,
}

#: What `broker_transport_options` says about Sentinel.
_SENTINEL_OPTIONS = ("master_name", "min_other_sentinels", "sentinel_kwargs")

#: Task attributes of ours without an app-wide default.
KEY_ATTRIBUTES = ("lock_key", "lock_name")

#: Options of the design that are not built yet, so that nobody relies on them.
_LATER_ATTRIBUTES = ("on_duplicate",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one execution locks: the task options of these names, and `key`, a text that the caller gave instead of one
    made from the arguments. Seconds everywhere.
    """

    scope: str
    ttl: float
    wait: float
    on_conflict: ConflictPolicy | Callable[..., Any]
    conflict_retries: int | None
    on_lock_lost: Literal["abort", "warn"]
    on_unavailable: Literal["retry", "raise", "run"]
    retain_on_retry: bool
    limit: int
    at_least_for: float
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The app's settings, checked.

    Attributes:
        backend: URL of the lock server; holds the password, so never show it: `shown_backend` is for that.
        transport_options: connection options for it.
        prefix: what every key begins with.
        enabled: False runs every task without a lock.
        done_ttl: seconds for which it is remembered that a message was carried out; 0: not at all.
        replicas: how many replicas of the lock server must have a lock before it counts as taken.
        journal: entries that the journal keeps; 0: there is none.
        blocked_after: refusals in a row after which there is a warning; 0: never.
        accept: options of a call (`singleton_lock={...}`) that a worker takes from a message; "disable" is
            `singleton_lock=False`.
        defaults: of the task options.
    """

    backend: str = field(repr=False)
    transport_options: Mapping[str, Any] = field(repr=False)
    prefix: str
    enabled: bool
    done_ttl: float
    replicas: int
    journal: int
    blocked_after: int
    accept: frozenset[str]
    defaults: Mapping[str, Any]

    @property
    def shown_backend(self) -> str:
        """The backend's URL without its password."""
        return shown(self.backend)

    @classmethod
    def from_app(cls, app: Any, *, backend: str | None = None) -> Settings:
        """The settings in an app's configuration.

        Args:
            app: whose configuration it is.
            backend: URL to use whatever that says.

        Raises:
            InvalidOption: a setting is unknown or not allowed, or no backend can be found.
        """
        app.conf.get("singleton_lock_backend")  # Loads the configuration: until then `conf` is a stand-in.
        conf = app.conf
        for error in _unknown_settings(conf):
            raise error
        own = {name: conf.get(name) for name in LOCK_SETTINGS}
        for name, rule in LOCK_SETTINGS.items():
            if own[name] is not None:
                _require(rule, own[name], f"setting {name}", secret=name in _SECRET)
        enabled = own["singleton_lock_enabled"]
        explicit = backend or own["singleton_lock_backend"]
        backend, transport_options = _backend(conf, explicit, enabled is False)
        return cls(
            backend=backend,
            transport_options={**transport_options, **(own["singleton_lock_transport_options"] or {})},
            prefix=own["singleton_lock_prefix"] or "singleton_lock",
            enabled=enabled is not False,
            done_ttl=_done_ttl(conf, own["singleton_lock_done_ttl"]),
            replicas=own["singleton_lock_replicas"] or 0,
            journal=_or(own["singleton_lock_journal"], DEFAULT_JOURNAL),
            blocked_after=_or(own["singleton_lock_blocked_after"], DEFAULT_BLOCKED_AFTER),
            accept=accepted(conf),
            defaults={name: _default(conf, option) for name, option in OPTIONS.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatSettings:
    """The app's settings for beat's exclusive scheduler, checked.

    Attributes:
        scheduler: the scheduler that is made exclusive, or its name.
        mode: "leader": one beat sends, the others stand by; "shared": each sends what no other has claimed.
        ttl: seconds after which another beat takes over from one that died.
        catch_up: seconds after which a tick that was missed is not made up for any more; None: it always is.
        name: of the schedule; beats with the same name and lock server are one.
    """

    scheduler: str | type
    mode: Literal["leader", "shared"]
    ttl: float
    catch_up: float | None
    name: str

    @classmethod
    def from_app(cls, app: Any) -> BeatSettings:
        """The settings in an app's configuration.

        Raises:
            InvalidOption: a setting is not allowed.
        """
        found = {name: app.conf.get(name) for name in BEAT_SETTINGS}
        for name, rule in BEAT_SETTINGS.items():
            if found[name] is not None:
                _require(rule, found[name], f"setting {name}")
        return cls(
            scheduler=found["singleton_lock_beat_scheduler"] or "celery.beat:PersistentScheduler",
            mode=found["singleton_lock_beat_mode"] or "leader",
            ttl=float(found["singleton_lock_beat_ttl"] or DEFAULT_BEAT_TTL),
            catch_up=found["singleton_lock_beat_catch_up"],
            name=found["singleton_lock_beat_name"] or app.main or "default",
        )


def problems(app: Any) -> Iterator[InvalidOption]:
    """What is wrong with an app's settings of ours, one by one; who starts is told the first of them only."""
    app.conf.get("singleton_lock_backend")  # As in `Settings.from_app`.
    conf = app.conf
    yield from _unknown_settings(conf)
    for name, rule in SETTINGS.items():
        if (value := conf.get(name)) is not None:
            try:
                _require(rule, value, f"setting {name}", secret=name in _SECRET)
            except InvalidOption as error:
                yield error


def options_for(task: Any, settings: Settings, call: Mapping[str, Any] | None = None) -> Options:
    """The options of one execution of `task`; `call` is what the caller gave as `singleton_lock={...}`.

    Raises:
        InvalidOption: a value is not allowed.
    """
    # Not type(task): it may be Celery's proxy of a task.
    given, own = _attributes(task), task.__class__
    known = _known.get(own)
    if known is None or known.given != given or known.settings is not settings:
        known = _known[own] = _Known(given, settings, _options_of(task, settings))
    return replace(known.options, **call) if call else known.options


class _Known(NamedTuple):
    """The options of a task, and what they are made of."""

    given: tuple[Any, ...]
    settings: Settings
    options: Options


#: What was found out for the last execution of each task, by its class; somebody may set an attribute at any time.
_known: WeakKeyDictionary[type, _Known] = WeakKeyDictionary()

_attributes = attrgetter(*(option.attribute for option in OPTIONS.values()))


def _options_of(task: Any, settings: Settings) -> Options:
    values = dict(settings.defaults)
    for name, option in OPTIONS.items():
        value = raw_attribute(task, option.attribute)
        if value is not None:
            values[name] = _require(option.rule, value, f"option {option.attribute} of task {task.name}")
    return Options(**values)


def check_task(task: Any) -> None:
    """Refuse wrong options of a task class when it is bound to its app, before anything is sent.

    Raises:
        InvalidOption: an option is unknown or its value is not allowed.
    """
    rules = {option.attribute: option.rule for option in OPTIONS.values()} | {"lock_name": _TEXT}
    for attribute, rule in rules.items():
        value = raw_attribute(task, attribute)
        if value is not None:
            _require(rule, value, f"option {attribute} of task {task.name}")
    _refuse_unknown_attributes(task)


def check_call(value: object, task_name: str) -> Mapping[str, Any] | Literal[False] | None:
    """What `apply_async(singleton_lock=...)` may be: a dictionary, False (no lock), True or None (as the task says).

    Raises:
        InvalidOption: anything else, in the producer before sending, and in the worker for messages of others.
    """
    where = f"singleton_lock of a call of {task_name}"
    if value is None or value is True:
        return None
    if value is False:
        return False
    if not isinstance(value, Mapping):
        told = cleaned.value_shown(value)
        raise InvalidOption(f"{where} is {told}, but must be a dictionary, or False to run without a lock")
    for name in value:
        if name not in CALL_KEYS:
            raise InvalidOption(f"{where} has the key {cleaned.value_shown(name)}{_instead(name, CALL_KEYS)}")
        rule = _TEXT if name == "key" else OPTIONS[name].rule
        _require(rule, value[name], f"{where}, key {name!r},")
        if callable(value[name]):
            raise InvalidOption(f"{where}: {name!r} is a callable, which no message can carry; set it on the task")
    return dict(value)


def accepted(conf: Any) -> frozenset[str]:
    """The options of a call that a worker takes from a message.

    Raises:
        InvalidOption: the setting is not allowed.
    """
    given = conf.get("singleton_lock_accept")
    if given is None:
        # Whoever sends may say how an execution locks; not that it does not.
        return frozenset(CALL_KEYS)
    _require(_ACCEPT, given, "setting singleton_lock_accept")
    return frozenset({"all": ACCEPTABLE, "none": ()}.get(given, ()) if isinstance(given, str) else given)


def check_accepted(call: Mapping[str, Any] | Literal[False] | None, accept: frozenset[str], task: Any) -> None:
    """Whether a worker takes these options of a call, as `check_call` gave them, from a message.

    Raises:
        InvalidOption: one of them is not accepted; in the producer before sending, and in the worker.
    """
    where = f"singleton_lock of a call of {task.name}"
    for name in (DISABLE,) if call is False else call or ():
        if name not in accept:
            asked = "False" if call is False else f"given with {name!r}"
            raise InvalidOption(
                f"{where} is {asked}, which workers do not take from a message; setting singleton_lock_accept lets "
                f"them take {', '.join(it for it in ACCEPTABLE if it in accept) or 'nothing'}: add {name!r} to it, or "
                "set the option on the task"
            )
    for name in _BOUNDED:
        asked_for, most = (call or {}).get(name, 0.0), max(MAX_ASKED, _own_seconds(task, OPTIONS[name]))
        if asked_for > most:
            raise InvalidOption(
                f"{where} has the key {name!r} with {cleaned.value_shown(asked_for)}; allowed in a message: "
                f"{most:g} seconds at most; set {OPTIONS[name].attribute} on the task for more"
            )


def _own_seconds(task: Any, option: Option) -> float:
    own = raw_attribute(task, option.attribute)
    value = task.app.conf.get(option.setting) if own is None else own
    return float(value) if _is_seconds(value) else 0.0


def raw_attribute(task: Any, name: str) -> Any:
    """An option as it stands on the task's class: a function given to `@app.task(...)` is not made a method."""
    value = getattr(task, name, None)
    if isinstance(value, property):
        return None
    return value.__func__ if isinstance(value, MethodType) else value


def _require(rule: _Rule, value: Any, where: str, *, secret: bool = False) -> Any:
    if not _allows(rule, value):
        shown_value = "of the wrong type" if secret else cleaned.value_shown(value)
        raise InvalidOption(f"{where} is {shown_value}; allowed: {rule.words}")
    return value


def _allows(rule: _Rule, value: object) -> bool:
    try:
        return bool(rule.allows(value))
    except Exception:  # noqa: BLE001 - comparing a value of any type may raise anything: an array of numpy's does
        return False


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _default(conf: Any, option: Option) -> Any:
    value = conf.get(option.setting)
    return option.default if value is None else _require(option.rule, value, f"setting {option.setting}")


def _done_ttl(conf: Any, explicit: float | None) -> float:
    """As set, else as long as the broker may redeliver a message, and never less than an hour."""
    if explicit is not None:
        return float(explicit)
    return min(max(visibility_timeout(conf) or 0.0, MIN_DONE_TTL), MAX_DONE_TTL)


def _backend(conf: Any, explicit: str | None, disabled: bool) -> tuple[str, Mapping[str, Any]]:
    """The lock server's URL and its options: as set, else the broker if it is Redis, else the result backend."""
    if explicit is not None:
        _require_backend(explicit)
        return explicit, {}
    for url, ssl, options in (
        (conf.broker_url, conf.get("broker_use_ssl"), conf.get("broker_transport_options")),
        (conf.result_backend, conf.get("redis_backend_use_ssl"), conf.get("result_backend_transport_options")),
    ):
        if isinstance(url, str) and _can_lock(url):
            _require_backend(url)
            of_sentinels = {name: (options or {})[name] for name in _SENTINEL_OPTIONS if name in (options or {})}
            return ("memory://" if _scheme(url) == "memory" else url), {
                **(ssl if isinstance(ssl, Mapping) else {}),
                **(of_sentinels if _scheme(url) == "sentinel" else {}),
            }
    if disabled:
        return "memory://", {}
    raise InvalidOption(
        "setting singleton_lock_backend is not set, and neither broker_url nor result_backend is one Redis server: "
        "set it to a URL such as 'redis://localhost:6379/0'"
    )


def _can_lock(url: str) -> bool:
    """Whether a broker or result backend can keep the locks as well: several of them are no Redlock."""
    return _scheme(url) in SCHEMES and (";" not in url or _scheme(url) == "sentinel")


def _require_backend(backend: str) -> None:
    urls = backend.split(";")
    for url in urls:
        if _scheme(url) not in SCHEMES or "://" not in url:
            allowed = ", ".join(f"{name}://" for name in SCHEMES)
            raise InvalidOption(
                f"setting singleton_lock_backend is {shown(backend)!r}; "
                f"allowed: a URL that begins with one of {allowed}"
            )
        if not backend_url.is_readable(url):
            raise InvalidOption(
                f"setting singleton_lock_backend is {shown(backend)!r}, and cannot be read: allowed: a URL such as "
                "'redis://user:password@localhost:6379/0', in which the characters / ? # @ : ; % of user and password "
                "are written as %2F %3F %23 %40 %3A %3B %25"
            )
    schemes = {_scheme(url) for url in urls}
    if len(urls) == 1 or (len(schemes) == 1 and not schemes & {*_NODES, "memory"}):
        return
    if not schemes <= {*_NODES}:
        raise InvalidOption(
            f"setting singleton_lock_backend is {shown(backend)!r}; several URLs joined by ';' must all be servers "
            f"of their own (Redlock: {', '.join(f'{name}://' for name in _NODES)}), or all sentinel://, or all of one "
            "cluster"
        )
    if len(set(urls)) != len(urls) or len(urls) % 2 == 0 or not MIN_NODES <= len(urls) <= MAX_NODES:
        raise InvalidOption(
            f"setting singleton_lock_backend is {shown(backend)!r}: {len(urls)} nodes for Redlock; allowed: "
            f"{MIN_NODES}, 5, 7 or {MAX_NODES} servers that do not know each other, each named once (an even number "
            "survives no more failures than one fewer)"
        )


def _unknown_settings(conf: Any) -> Iterator[InvalidOption]:
    for name in _setting_names(conf):
        if name not in SETTINGS:
            yield InvalidOption(f"there is no setting {cleaned.text(name)}{_instead(name, sorted(SETTINGS))}")


def _setting_names(conf: Any) -> Iterable[str]:
    """Names of the settings that look like ours, whatever the namespace they were written in."""
    namespace = (getattr(conf, "prefix", None) or "").lower()
    for mapping in getattr(conf, "maps", ()):
        for key in list(mapping.keys()):
            name = str(key).lower().removeprefix(namespace)
            if name.startswith("singleton_lock_"):
                yield name


def _refuse_unknown_attributes(task: Any) -> None:
    known = (*KEY_ATTRIBUTES, *(option.attribute for option in OPTIONS.values()))
    for name, value in ((name, value) for cls in task.__mro__ for name, value in vars(cls).items()):
        reserved = name.startswith("lock_") or name in _LATER_ATTRIBUTES
        if reserved and name not in known and not callable(value) and not isinstance(value, property):
            raise InvalidOption(
                f"task {task.name} has the attribute {name!r}{_instead(name, known)} "
                "(names that begin with lock_ are kept for options of this package)"
            )


def _instead(name: object, allowed: Iterable[str]) -> str:
    allowed = tuple(allowed)
    close = difflib.get_close_matches(cleaned.text(name), allowed, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint}; allowed: {', '.join(allowed)}"
