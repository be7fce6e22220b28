"""Django's checks: `manage.py check` says what is wrong with the locks. No server is asked.

A worker refuses to start with anything that is an error here. `check --deploy` applies the rules of `diagnosis` to each
app, for settings that are fine in development and wrong in production. Settings have the names here that they have in
Celery; in a project with `namespace="CELERY"`, `CELERY_` stands before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.utils.module_loading import autodiscover_modules

from celery_singleton_lock._celery import active_apps, is_stand_in
from celery_singleton_lock.beat import ExclusiveScheduler
from celery_singleton_lock.diagnosis.audit import IN_MEMORY, of_app
from celery_singleton_lock.diagnosis.tasks import exclusive_tasks
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import Settings, problems
from celery_singleton_lock.options.rules import SETTINGS
from celery_singleton_lock.stores import open_store

#: The numbers of the findings that can be silenced one by one, by their subjects; all others share one.
_NUMBERS = {IN_MEMORY: "W003", "singleton_lock_done_ttl": "W005", "singleton_lock_enabled": "W006"}
_OTHERS = "W007"


def check_settings(*_: Any, **__: Any) -> list[CheckMessage]:
    """Check the settings of each Celery app of the project."""
    found = [message for app in _apps() for message in of_settings(app, dir(settings))]
    if not _apps():
        found.append(
            Warning(
                "no Celery app is known, so the settings of its locks are not checked",
                hint="Import the app in your project's __init__.py: from .celery import app as celery_app",
                id="celery_singleton_lock.W001",
            )
        )
    return found


def check_production(*_: Any, **__: Any) -> list[CheckMessage]:
    """Check the tasks of each Celery app of the project, and its settings for production."""
    return [message for app in _apps() for message in of_production(app)]


def of_settings(app: Any, names: Iterable[str]) -> Iterator[CheckMessage]:
    """Faults of an app's settings; `names` are the names of Django's settings, to find those that nothing reads."""
    for problem in [*problems(app)] or [*_only_seen_in_use(app)]:
        yield _message(Error, app, "E001", str(problem))
    yield from _unread(app, names)


def of_production(app: Any) -> Iterator[CheckMessage]:
    """Faults of an app's tasks, and of its settings in production."""
    autodiscover_modules("tasks")  # A worker would have imported them by now; `manage.py` has not.
    try:
        exclusive_tasks(app)
    except InvalidOption as error:
        yield _message(Error, app, "E002", str(error))
        return
    try:
        locks = Settings.from_app(app)
    except InvalidOption:
        return  # `of_settings` reports it.
    for finding in of_app(app, locks):
        hint = f"{finding.remedy[:1].upper()}{finding.remedy[1:]}."
        number = _NUMBERS.get(finding.subject, _OTHERS)
        yield _message(Warning, app, number, f"{finding.subject}: {finding.text}", hint)


def _only_seen_in_use(app: Any) -> Iterator[InvalidOption]:
    try:
        open_store(Settings.from_app(app)).close()
        ExclusiveScheduler(app, lazy=True)
    except InvalidOption as error:
        yield error
    except RuntimeError as error:  # From Django, for models of an app that is not installed.
        scheduler = app.conf.get("singleton_lock_beat_scheduler")
        yield InvalidOption(f"setting singleton_lock_beat_scheduler is {scheduler!r}: {error}")


def _unread(app: Any, names: Iterable[str]) -> Iterator[CheckMessage]:
    """Settings of this package without the namespace under which Celery reads Django's settings."""
    namespace = (getattr(app.conf, "prefix", None) or "").upper()
    for name in names:
        if namespace and name.lower() in SETTINGS:
            yield _message(
                Warning, app, "W002", f"nothing reads the setting {name}", f"Rename it to {namespace}{name}."
            )


def _apps() -> list[Any]:
    """The Celery apps that exist in this process."""
    return sorted((app for app in active_apps() if not is_stand_in(app)), key=_name)


def _message(level: Any, app: Any, number: str, text: str, hint: str | None = None) -> CheckMessage:
    return level(text, hint=hint, obj=_name(app), id=f"celery_singleton_lock.{number}")


def _name(app: Any) -> str:
    return f"Celery app {app.main or 'without a name'}"
