"""Settings of an app and of beat, options of a task and of a call, and the URL of the lock server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask, cleaned
from celery_singleton_lock.diagnosis.audit import of_app
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import BeatSettings, Settings, problems
from celery_singleton_lock.options.rules import BEAT_SETTINGS, CALL_KEYS, LOCK_SETTINGS, OPTIONS
from celery_singleton_lock.options.task import check_accepted, check_call, check_task, options_for
from celery_singleton_lock.stores import open_store
from tests.fuzz.choices import NASTY, Case, Choices

#: Must never be shown.
PASSWORD = "s3cr3tpw"

URLS = (
    f"redis://user:{PASSWORD}@localhost:6379/0",
    f"redis://:{PASSWORD}@a:1/0;redis://:{PASSWORD}@b:2/0;redis://:{PASSWORD}@c:3/0",
    f"sentinel://:{PASSWORD}@a:26379;sentinel://:{PASSWORD}@b:26379",
    f"redis+cluster://:{PASSWORD}@a:6379;redis+cluster://:{PASSWORD}@b:6379",
    f"rediss://:{PASSWORD}@localhost:6379/0?ssl_cert_reqs=CERT_NONE",
    f"unix://:{PASSWORD}@/run/redis.sock?virtual_host=1",
    "memory://",
)
TRANSPORT: Mapping[str, Any] = {
    "master_name": "mymaster",
    "min_other_sentinels": 0,
    "sentinel_kwargs": {"password": PASSWORD},
    "password": PASSWORD,
    "db": 1,
    "socket_timeout": 1.0,
    "socket_connect_timeout": 1.0,
    "restart_delay": True,
    "health_check_interval": 5,
    "ssl": True,
    "client_name": "x",
}
VALID: Mapping[str, Any] = {
    "singleton_lock_backend": URLS[0],
    "singleton_lock_transport_options": TRANSPORT,
    "singleton_lock_prefix": "p",
    "singleton_lock_enabled": True,
    "singleton_lock_done_ttl": 60.0,
    "singleton_lock_journal": 100,
    "singleton_lock_blocked_after": 2,
    "singleton_lock_accept": ["ttl"],
    "singleton_lock_beat_scheduler": "celery.beat:PersistentScheduler",
    "singleton_lock_beat_ttl": 10.0,
    "singleton_lock_beat_catch_up": 60.0,
    "singleton_lock_beat_name": "x",
}
NAMES = (*LOCK_SETTINGS, *BEAT_SETTINGS, *(option.setting for option in OPTIONS.values()))
ATTRIBUTES = (*(option.attribute for option in OPTIONS.values()), "lock_name")
CALL = {"key": "x", "ttl": 30.0, "wait": 1.0, "on_conflict": "retry", "conflict_retries": 3, "at_least_for": 1.0}

#: One of these is in each error.
WHAT_TO_DO = ("allowed", "set it to", "but must be", "do not accept", "did you mean")


class Strange:
    """A value that a setting in a Python module can have, and a message cannot."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __hash__ = object.__hash__


def explains(error: InvalidOption, *names: str) -> None:
    """Check that the error names what is wrong and what is allowed, and shows no password."""
    text = str(error)
    assert any(cleaned.text(name).lower() in text.lower() for name in names), text
    assert any(words in text for words in WHAT_TO_DO), text
    assert PASSWORD not in text
    assert len(text) < 6000
    text.encode()


def value_for(choices: Choices, name: str) -> Any:
    if choices.one_in(20):
        return Strange()
    if name == "singleton_lock_backend":
        text = choices.pick(URLS)
        return (
            choices.mutated(choices.spoiled(text.encode()).decode(errors="replace"), 1) if choices.one_in(2) else text
        )
    if name == "singleton_lock_transport_options":
        return {it: choices.mutated(TRANSPORT[it], 1) for it in choices.some(sorted(TRANSPORT))}
    valid = VALID.get(name)
    return choices.mutated(valid if valid is not None else choices.pick(("skip", "retry", 5, 30.0, True)), 1)


class App(SimpleNamespace):
    """An app as far as it is needed here: a thousand real ones take a second to make."""

    main = "app"

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(conf=Conf(given))


class Conf(dict[str, Any]):
    broker_url = "redis://localhost/0"
    result_backend = None
    prefix = None

    @property
    def maps(self) -> list[Mapping[str, Any]]:
        return [self, {}]


def _settings(choices: Choices) -> None:
    given = {name: value_for(choices, name) for name in choices.some(NAMES, most=5)}
    if choices.one_in(5):
        given["singleton_lock_" + choices.text()] = choices.value()
    app = App(given)
    for error in problems(app):
        explains(error, *given)
    try:
        settings = Settings.from_app(app)
    except InvalidOption as error:
        explains(error, *given)
        return
    finally:
        _beat(app, given)
    assert PASSWORD not in repr(settings)
    try:
        store = open_store(settings)
    except InvalidOption as error:
        explains(error, "singleton_lock_backend", "singleton_lock_transport_options")
        return
    assert PASSWORD not in getattr(store, "server", "")
    if store.__class__.__name__ != "MemoryStore":
        store.close()


def _beat(app: Any, given: Mapping[str, Any]) -> None:
    try:
        BeatSettings.from_app(app)
    except InvalidOption as error:
        explains(error, *given)


def _task(choices: Choices, settings: Settings) -> None:
    given = {name: choices.mutated(choices.pick(NASTY), 1) for name in choices.some(ATTRIBUTES)}
    if choices.one_in(8):
        given["lock_" + choices.text()] = 1
    task = type("Task", (SingletonTask,), {"name": "t", **given})
    try:
        check_task(task, SingletonTask)
        options_for(task(), settings)
    except InvalidOption as error:
        explains(error, *(f"'{name}'" for name in given), *given, "task t")


def _call(choices: Choices, settings: Settings) -> None:
    given = choices.mutated({name: CALL[name] for name in choices.some(sorted(CALL))})
    accept = frozenset(choices.some(CALL_KEYS))
    task = type("Task", (SingletonTask,), {"name": "t"})()
    try:
        call = check_call(given, "t")
        check_accepted(call, accept, task)
        if call:
            options = options_for(task, settings, call)
            assert 1 <= options.ttl <= 86_400
            assert 0 <= options.wait <= 3600
            assert 0 <= options.at_least_for <= 3600
    except InvalidOption as error:
        explains(error, "singleton_lock in a call of t")


@contextmanager
def cases() -> Iterator[Case]:
    app = Celery("fuzz", broker="memory://", set_as_current=False)
    settings = Settings.from_app(app)

    def case(choices: Choices) -> None:
        kind = choices.below(3)
        if kind == 0:
            _settings(choices)
        elif kind == 1:
            _task(choices, settings)
        else:
            _call(choices, settings)

    of_app(app, settings)
    yield case
