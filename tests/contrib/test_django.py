"""Settings in Django's namespace, and what `manage.py check` says about them."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.conf import LazySettings

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.contrib.django import DjangoSingletonTask, checks
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import BeatSettings, Settings
from celery_singleton_lock.options.rules import SETTINGS
from celery_singleton_lock.options.task import options_for
from celery_singleton_lock.testing import hold_lock, memory_locks

REDIS = {"CELERY_BROKER_URL": "redis://localhost/0"}


def app_of(**values: Any) -> Celery:
    """An app of a Django project with these settings."""
    settings = LazySettings()
    settings.configure(**values)
    made = Celery("shop", set_as_current=False)
    made.config_from_object(settings, namespace="CELERY")
    return made


def body() -> None: ...


def told(app: Celery, *names: str) -> list[tuple[str, str]]:
    """What the check says: the last part of each id, and the message."""
    return [(str(it.id).rpartition(".")[2], it.msg) for it in checks.of_settings(app, names)]


@pytest.fixture
def told_in_production(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `check --deploy` says: ids and hints."""
    # There is no project here with modules to import.
    monkeypatch.setattr(checks, "autodiscover_modules", lambda name: None)
    return lambda app: {str(it.id).rpartition(".")[2]: it.hint for it in checks.of_production(app)}


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_is_read_under_the_namespace(setting: str) -> None:
    wrong = object()
    ((number, message),) = told(app_of(**REDIS, **{f"CELERY_{setting.upper()}": wrong}))
    assert number == "E001"
    assert message.startswith(f"setting {setting} is ")
    assert "; allowed: " in message


def test_values_reach_the_settings_and_the_tasks() -> None:
    app = app_of(
        CELERY_BROKER_URL="amqp://localhost",
        CELERY_SINGLETON_LOCK_BACKEND="rediss://locks:6379/3",
        CELERY_SINGLETON_LOCK_TRANSPORT_OPTIONS={"ssl_ca_certs": "/etc/ca.pem", "socket_timeout": 0.5},
        CELERY_SINGLETON_LOCK_PREFIX="shop",
        CELERY_SINGLETON_LOCK_TTL=60,
        CELERY_SINGLETON_LOCK_WAIT=5,
        CELERY_SINGLETON_LOCK_ON_CONFLICT="raise",
        CELERY_SINGLETON_LOCK_ON_UNAVAILABLE="run",
        CELERY_SINGLETON_LOCK_DONE_TTL=7200,
        CELERY_SINGLETON_LOCK_BEAT_TTL=7,
        CELERY_SINGLETON_LOCK_BEAT_NAME="main",
    )
    settings, beat = Settings.from_app(app), BeatSettings.from_app(app)
    assert settings.backend.urls == ("rediss://locks:6379/3",)
    assert settings.transport_options == {"ssl_ca_certs": "/etc/ca.pem", "socket_timeout": 0.5}
    assert (settings.prefix, settings.done_ttl, beat.ttl, beat.name) == ("shop", 7200, 7.0, "main")
    task = app.task(base=SingletonTask, name="shop.task", shared=False, lock_wait=7)(body)
    options = options_for(task, settings)
    assert (options.ttl, options.wait, options.on_conflict, options.on_unavailable) == (60, 7, "raise", "run")
    assert told(app) == []


def test_misspelt_setting_comes_with_the_right_name() -> None:
    ((number, message),) = told(app_of(**REDIS, CELERY_SINGLETON_LOCK_TTTL=30))
    assert number == "E001"
    assert message.startswith("there is no setting singleton_lock_tttl; did you mean 'singleton_lock_ttl'?")


def test_all_errors_are_reported_at_once() -> None:
    app = app_of(**REDIS, CELERY_SINGLETON_LOCK_TTL=0, CELERY_SINGLETON_LOCK_WAIT=-1, CELERY_SINGLETON_LOCK_TLL=1)
    assert [number for number, _ in told(app)] == ["E001"] * 3


def test_message_is_the_same_as_the_workers() -> None:
    app = app_of(**REDIS, CELERY_SINGLETON_LOCK_TTL=0)
    with pytest.raises(InvalidOption) as raised:
        Settings.from_app(app)
    assert told(app) == [("E001", str(raised.value))]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"CELERY_BROKER_URL": "amqp://localhost"}, "singleton_lock_backend is not set"),
        ({"CELERY_SINGLETON_LOCK_BACKEND": "http://localhost"}, "allowed: a URL that begins with"),
        ({**REDIS, "CELERY_SINGLETON_LOCK_TRANSPORT_OPTIONS": {"sokket_timeout": 1}}, "sokket_timeout"),
        ({**REDIS, "CELERY_SINGLETON_LOCK_BEAT_SCHEDULER": "shop.nowhere:Scheduler"}, "beat_scheduler is 'shop.nowh"),
    ],
)
def test_errors_that_only_show_in_use_are_reported(settings: dict[str, Any], words: str) -> None:
    ((number, message),) = told(app_of(**settings))
    assert number == "E001"
    assert words in message


def test_setting_without_the_namespace_is_pointed_out() -> None:
    name = "SINGLETON_LOCK_TTL"
    app = app_of(**REDIS, **{name: "x"})
    (found,) = checks.of_settings(app, [name, "CELERY_BROKER_URL", "CELERY_SINGLETON_LOCK_TTL", "DEBUG"])
    assert (found.id, found.msg) == ("celery_singleton_lock.W002", f"nothing reads the setting {name}")
    assert found.hint == "Rename it to CELERY_SINGLETON_LOCK_TTL."


def test_project_whose_app_is_not_imported_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_apps", list)
    (found,) = checks.check_settings()
    assert found.id == "celery_singleton_lock.W001"
    assert "from .celery import app" in found.hint


class TestProduction:
    def test_correct_project_gets_no_message(self, told_in_production: Any) -> None:
        app = app_of(
            **REDIS, CELERY_BEAT_SCHEDULER="exclusive", CELERY_BEAT_SCHEDULE={"x": {"task": "shop.x", "schedule": 1}}
        )
        app.task(base=SingletonTask, name="shop.x", shared=False)(body)
        assert told_in_production(app) == {}

    @pytest.mark.parametrize(
        ("number", "conf"),
        [
            ("W003", {"CELERY_SINGLETON_LOCK_BACKEND": "memory://"}),
            ("W005", {"CELERY_SINGLETON_LOCK_DONE_TTL": 60}),
            ("W006", {"CELERY_SINGLETON_LOCK_ENABLED": False}),
        ],
    )
    def test_findings_that_may_be_silenced_have_numbers_of_their_own(
        self, told_in_production: Any, number: str, conf: dict[str, Any]
    ) -> None:
        assert list(told_in_production(app_of(**REDIS, **conf))) == [number]

    def test_wrong_settings_of_beat_are_left_to_the_other_check(self, told_in_production: Any) -> None:
        app = app_of(**REDIS, CELERY_BEAT_SCHEDULER="exclusive", CELERY_SINGLETON_LOCK_BEAT_TTL=0)
        assert told_in_production(app) == {}
        assert [number for number, _ in told(app)] == ["E001"]

    def test_other_findings_are_warnings(self, told_in_production: Any) -> None:
        app = app_of(**REDIS, CELERY_SINGELTON_LOCK_TTL=5)
        assert told_in_production(app) == {"W007": "Write singleton_lock_ttl, if that is what you mean."}

    def test_wrong_option_of_a_task_is_reported(self, told_in_production: Any) -> None:
        app = app_of(**REDIS)
        app.task(base=SingletonTask, name="shop.x", shared=False, lock_ttl=-1)(body)
        (found,) = checks.of_production(app)
        assert found.id == "celery_singleton_lock.E002"
        assert "option lock_ttl of task shop.x is -1" in found.msg


def test_exclusive_task_can_be_sent_on_commit() -> None:
    assert not hasattr(SingletonTask, "delay_on_commit")
    assert issubclass(DjangoSingletonTask, SingletonTask)
    assert DjangoSingletonTask.delay_on_commit is DjangoTask.delay_on_commit


@pytest.mark.parametrize("task_cls", [DjangoSingletonTask, "celery_singleton_lock.contrib.django:DjangoSingletonTask"])
def test_every_task_of_an_app_can_be_exclusive_and_a_django_task(task_cls: Any) -> None:
    app = Celery("shop", set_as_current=False, task_cls=task_cls)
    task = app.task(name="shop.x", shared=False)(body)
    assert isinstance(task, DjangoTask)
    with memory_locks() as locks:
        with hold_lock(task):
            task.apply()
        task.apply()
        locks.assert_skipped(task)
        locks.assert_acquired(task)
