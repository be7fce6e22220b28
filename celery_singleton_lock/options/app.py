"""The settings of an app and of its beat: the values of `singleton_lock_…`, defaults that depend on other ones, and
when the broker delivers a message again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock import cleaned
from celery_singleton_lock.backend import Backend, can_keep_locks, scheme
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.rules import (
    ACCEPTABLE,
    CALL_KEYS,
    KEY_ATTRIBUTES,
    MAX_DONE_TTL,
    OPTIONS,
    SETTINGS,
    setting,
)
from celery_singleton_lock.options.words import did_you_mean

#: The shortest time in seconds for which a finished message is remembered, unless the setting says otherwise.
MIN_DONE_TTL = 3600.0

#: Brokers that redeliver after a timeout, and their default timeout in seconds.
_VISIBILITY: Mapping[str, float] = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), 3600.0),
    **dict.fromkeys(("sqs", "pgmq", "slmq"), 1800.0),
}

#: Seconds after which RabbitMQ by default closes the connection of a worker that has not acknowledged a message.
CONSUMER_TIMEOUT = 1800.0

#: The longest wait in seconds of a requeued message on RabbitMQ: far below any `consumer_timeout`.
MAX_DELAY_AMQP = 256.0

#: The keys of `broker_transport_options` that are for Sentinel.
_SENTINEL_OPTIONS = ("master_name", "min_other_sentinels", "sentinel_kwargs")

#: The key of `broker_transport_options` and `result_backend_transport_options` that all keys of Celery's begin with.
_KEY_PREFIX = "global_keyprefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The app's settings, checked.

    Attributes:
        backend: where the locks are.
        transport_options: connection options for the backend.
        prefix: the beginning of every key.
        enabled: False runs every task without a lock.
        labels: False keeps arguments out of what is stored and logged about a lock.
        done_ttl: seconds for which a finished message is remembered; 0: not at all.
        journal: how many entries the journal keeps; 0: there is no journal.
        blocked_after: refusals in a row after which there is a warning; 0: never.
        accept: options of a call (`singleton_lock={...}`) that a worker takes from a message; "disable" is
            `singleton_lock=False`.
        defaults: the defaults of the task options.
        given: the names of the task options that the app's configuration sets.
    """

    backend: Backend
    transport_options: Mapping[str, Any] = field(repr=False)
    prefix: str
    enabled: bool
    labels: bool
    done_ttl: float
    journal: int
    blocked_after: int
    accept: frozenset[str]
    defaults: Mapping[str, Any]
    given: frozenset[str]

    @classmethod
    def from_app(cls, app: Any, *, backend: str | None = None) -> Settings:
        """The settings in an app's configuration.

        Args:
            app: the app.
            backend: the URL to use instead of the configured one.

        Raises:
            InvalidOption: a setting is unknown or not allowed, or no backend can be found.
        """
        app.conf.get("singleton_lock_backend")  # Loads the configuration; before that, `conf` is a placeholder.
        conf = app.conf
        for error in _as_a_whole(conf):
            raise error
        enabled = setting(conf, "singleton_lock_enabled", True)
        explicit, visibility = setting(conf, "singleton_lock_backend"), visibility_timeout(conf) or 0.0
        found, transport_options, key_prefix = _backend(conf, backend or explicit, enabled=enabled)
        return cls(
            backend=found,
            transport_options={**transport_options, **setting(conf, "singleton_lock_transport_options", {})},
            prefix=setting(conf, "singleton_lock_prefix") or _default_prefix(key_prefix),
            enabled=enabled,
            labels=setting(conf, "singleton_lock_labels", True),
            # By default, as long as the broker may redeliver a message.
            done_ttl=float(setting(conf, "singleton_lock_done_ttl", min(max(visibility, MIN_DONE_TTL), MAX_DONE_TTL))),
            journal=setting(conf, "singleton_lock_journal", 10_000),
            blocked_after=setting(conf, "singleton_lock_blocked_after", 12),
            accept=accepted(conf),
            defaults={name: setting(conf, option.setting, option.default) for name, option in OPTIONS.items()},
            given=frozenset(name for name, option in OPTIONS.items() if conf.get(option.setting) is not None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatSettings:
    """The app's settings for beat's exclusive scheduler, checked.

    Attributes:
        scheduler: the scheduler that is made exclusive, or its name.
        ttl: seconds after which other beats send what a beat had claimed that died, and after which it is not shown.
        catch_up: seconds after which a missed tick is no longer made up for; None: it always is.
        name: the name of the schedule; beats with the same name and lock server share it.
    """

    scheduler: str | type
    ttl: float
    catch_up: float | None
    name: str

    @classmethod
    def from_app(cls, app: Any) -> BeatSettings:
        """The settings in an app's configuration.

        Raises:
            InvalidOption: a setting is not allowed.
        """
        conf = app.conf
        return cls(
            scheduler=setting(conf, "singleton_lock_beat_scheduler", "celery.beat:PersistentScheduler"),
            ttl=float(setting(conf, "singleton_lock_beat_ttl", 5.0)),
            catch_up=setting(conf, "singleton_lock_beat_catch_up"),
            name=setting(conf, "singleton_lock_beat_name", app.main or "default"),
        )


def problems(app: Any) -> Iterator[InvalidOption]:
    """The errors in an app's settings for this package, one by one; a worker that starts raises the first of them."""
    app.conf.get("singleton_lock_backend")  # As in `Settings.from_app`.
    yield from _as_a_whole(app.conf)
    for name in SETTINGS:
        try:
            setting(app.conf, name)
        except InvalidOption as error:
            yield error


def accepted(conf: Any) -> frozenset[str]:
    """The options of a call that a worker takes from a message.

    Raises:
        InvalidOption: the setting is not allowed.
    """
    # By default a sender may choose how an execution locks, but cannot turn the lock off.
    given = setting(conf, "singleton_lock_accept", CALL_KEYS)
    return frozenset({"all": ACCEPTABLE, "none": ()}[given] if isinstance(given, str) else given)


def parse_backend(urls: str) -> Backend:
    """The backend of a URL, or of several.

    Raises:
        InvalidOption: the text is not a valid URL of a backend.
    """
    try:
        return Backend.parse(urls)
    except ValueError as error:
        raise InvalidOption(f"setting singleton_lock_backend is {error}") from None


def _backend(conf: Any, explicit: str | None, *, enabled: bool) -> tuple[Backend, Mapping[str, Any], object]:
    """The lock server, its options, and what Celery's keys begin with: as set, else the broker if it is Redis, else
    the result backend.
    """
    of_broker = conf.get("broker_transport_options") or {}
    if explicit is not None:
        return parse_backend(explicit), {}, of_broker.get(_KEY_PREFIX) if is_redis(conf) else None
    for url, ssl, options in (
        (conf.broker_url, conf.get("broker_use_ssl"), of_broker),
        (conf.result_backend, conf.get("redis_backend_use_ssl"), conf.get("result_backend_transport_options") or {}),
    ):
        if isinstance(url, str) and can_keep_locks(url):
            of_sentinels = {name: options[name] for name in _SENTINEL_OPTIONS if name in options}
            own = {
                **(ssl if isinstance(ssl, Mapping) else {}),
                **(of_sentinels if scheme(url) == "sentinel" else {}),
            }
            return parse_backend("memory://" if scheme(url) == "memory" else url), own, options.get(_KEY_PREFIX)
    if not enabled:
        return parse_backend("memory://"), {}, None
    raise InvalidOption(
        "setting singleton_lock_backend is not set, and neither broker_url nor result_backend is one Redis server: "
        "set it to a URL such as 'redis://localhost:6379/0'"
    )


def _default_prefix(key_prefix: object) -> str:
    """The prefix if none is set: what sets this project's keys apart on its Redis, and then our name.

    Only what sender and worker must have in common anyway may be part of it; else they would take two locks. Messages
    reach no worker with another `global_keyprefix`, but one with another app name.
    """
    if not key_prefix:
        return "singleton_lock"
    # Without what no prefix may have: braces, say, would be the hash tag of all our keys.
    prefix = re.sub(r"[^\w.:/-]", "", str(key_prefix), flags=re.ASCII) + "singleton_lock"
    where = f"setting singleton_lock_prefix, which begins with {_KEY_PREFIX} unless you set it,"
    return str(SETTINGS["singleton_lock_prefix"].require(prefix, where))


def _as_a_whole(conf: Any) -> Iterator[InvalidOption]:
    """Errors in the names of our settings, and in Celery's own settings: with these, exclusive tasks cannot work."""
    for name in set_names(conf):
        if name.startswith("singleton_lock_") and name not in SETTINGS:
            option = name.removeprefix("singleton_")
            hint = f"; set {option} on the task" if option in KEY_ATTRIBUTES else did_you_mean(name, sorted(SETTINGS))
            yield InvalidOption(f"there is no setting {cleaned.text(name)}{hint}")
    if conf.get("task_protocol") == 1 and conf.get("singleton_lock_enabled") is not False:
        yield InvalidOption(
            "setting task_protocol is 1, but exclusive tasks need message protocol 2, Celery's default since 4.0: "
            "remove the setting, or set it to 2"
        )


def set_names(conf: Any) -> Iterator[str]:
    """Names of the settings that an app has set, in lower case and without its namespace."""
    namespace = (getattr(conf, "prefix", None) or "").lower()
    for mapping in getattr(conf, "maps", ())[:-1]:  # The last one has Celery's defaults.
        for key in list(mapping.keys()):
            yield str(key).lower().removeprefix(namespace)


def visibility_timeout(conf: Any) -> float | None:
    """Seconds after which the broker redelivers; None if it waits until the connection ends."""
    explicit: Any = (conf.get("broker_transport_options") or {}).get("visibility_timeout")
    if isinstance(explicit, (int, float)) and not isinstance(explicit, bool) and 0 < explicit < math.inf:
        return float(explicit)
    return _VISIBILITY.get(_transport(conf))


def longest_delay(conf: Any) -> float:
    """The longest time in seconds that a requeued message may wait.

    A message that a worker holds for longer than the visibility timeout is delivered again, and multiplies. After
    RabbitMQ's `consumer_timeout`, half an hour by default, the broker closes the worker's connection.
    """
    timeout = visibility_timeout(conf)
    if timeout is not None:
        return timeout / 2
    return MAX_DELAY_AMQP if is_rabbitmq(conf) else math.inf


def is_rabbitmq(conf: Any) -> bool:
    """Whether the broker speaks AMQP 0.9.1, as RabbitMQ does."""
    return _transport(conf) in ("amqp", "amqps", "pyamqp")


def is_redis(conf: Any) -> bool:
    """Whether the broker is Redis."""
    return _transport(conf) in ("redis", "rediss", "sentinel")


def _transport(conf: Any) -> str:
    """The broker's transport, by kombu's name."""
    url = conf.broker_url  # As Celery reads it: an environment variable comes first.
    first = str(url if isinstance(url, str) else next(iter(url or ()), "")).lower()
    scheme, found, _ = first.partition("://")
    return scheme.partition("+")[0] if found else "amqp"
