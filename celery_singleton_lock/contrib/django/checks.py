"""What `manage.py check` says about the locks. No server is asked.

A worker refuses to start for what is an error here. `check --deploy` looks at the tasks as well, and at what is right
on a desk and wrong in production. Settings are called here as in a project with `namespace="CELERY"`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from celery import _state
from celery.beat import PersistentScheduler
from celery.utils.imports import load_extension_class_names, qualname, symbol_by_name
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning
from django.utils.module_loading import autodiscover_modules

from celery_singleton_lock.beat import ExclusiveScheduler
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import Settings, problems
from celery_singleton_lock.options.delivery import visibility_timeout
from celery_singleton_lock.options.rules import SETTINGS
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.task.singleton_task import SingletonTask, is_builtin

#: How alike a name and one of ours are that was probably meant: `get_close_matches` counts from 0 to 1.
ALIKE = 0.85


def check_settings(*_: Any, **__: Any) -> list[CheckMessage]:
    """The settings of each Celery app of the project."""
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
    """The tasks of each Celery app of the project, and what is wrong for production."""
    return [message for app in _apps() for message in of_production(app)]


def of_settings(app: Any, names: Iterable[str] = ()) -> Iterator[CheckMessage]:
    """What is wrong with an app's settings; `names` are those of Django's, to look for what nobody reads."""
    for problem in [*problems(app)] or [*_only_seen_in_use(app)]:
        yield Error(_as_in_django(app, problem), obj=_shown(app), id="celery_singleton_lock.E001")
    yield from _unread(app, names)


def of_production(app: Any) -> Iterator[CheckMessage]:
    """What is wrong with an app's tasks, and with its settings in production."""
    try:
        exclusive = _exclusive_tasks(app)
    except InvalidOption as error:
        yield Error(str(error), obj=_shown(app), id="celery_singleton_lock.E002")
        return
    try:
        of_app = Settings.from_app(app)
    except InvalidOption:
        return  # `of_settings` says so.
    if not of_app.enabled:
        yield _warning(
            *(app, "W006", "CELERY_SINGLETON_LOCK_ENABLED is False: exclusive tasks run without a lock"),
            "Leave it out.",
        )
    elif of_app.backend.in_memory:
        yield _warning(
            *(app, "W003", "the locks are in memory, which processes do not share: each has its own"),
            "Set CELERY_SINGLETON_LOCK_BACKEND to the URL of a Redis.",
        )
    yield from _beat_that_sends_twice(app, exclusive)
    yield from _forgetful(app, of_app)


def _only_seen_in_use(app: Any) -> Iterator[InvalidOption]:
    try:
        open_store(Settings.from_app(app)).close()
        ExclusiveScheduler(app, lazy=True)
    except InvalidOption as error:
        yield error
    except RuntimeError as error:  # Django's, for models of an app that is not installed.
        scheduler = app.conf.get("singleton_lock_beat_scheduler")
        yield InvalidOption(f"setting singleton_lock_beat_scheduler is {scheduler!r}: {error}")


def _unread(app: Any, names: Iterable[str]) -> Iterator[CheckMessage]:
    """Settings in Django's that were meant for us, and that no name of ours matches."""
    namespace = _namespace(app)
    for name in names if namespace else ():
        bare = name.removeprefix(namespace).lower()
        meant: str | None = None
        if not name.startswith(namespace) and bare in SETTINGS:
            meant = bare
        elif name.startswith(namespace) and not bare.startswith("singleton_lock_"):
            meant = next(iter(difflib.get_close_matches(bare, SETTINGS, n=1, cutoff=ALIKE)), None)
        if meant is not None:
            yield _warning(app, "W002", f"nobody reads the setting {name}", f"Call it CELERY_{meant.upper()}.")


def _beat_that_sends_twice(app: Any, exclusive: Mapping[str, Any]) -> Iterator[CheckMessage]:
    aliases: dict[str, str] = dict(load_extension_class_names("celery.beat_schedulers"))  # type: ignore[arg-type]
    scheduler = symbol_by_name(app.conf.beat_scheduler, aliases=aliases)
    scheduled = {name for name in map(_task_of, app.conf.beat_schedule.values()) if name in exclusive}
    # Another scheduler than Celery's has its schedule elsewhere, in a database for one.
    may_send = scheduled or (exclusive and not issubclass(scheduler, PersistentScheduler))
    if not may_send or issubclass(scheduler, ExclusiveScheduler):
        return
    sent = ", ".join(sorted(scheduled)) or "all that its schedule says"
    yield _warning(
        *(app, "W004", f"beat is not exclusive: started on two hosts it sends {sent} twice"),
        "Set CELERY_BEAT_SCHEDULER = 'exclusive' and "
        f"CELERY_SINGLETON_LOCK_BEAT_SCHEDULER = {qualname(scheduler)!r}. If there is one beat only, or it is started "
        "with -S exclusive, silence this.",
    )


def _forgetful(app: Any, of_app: Settings) -> Iterator[CheckMessage]:
    """Records of finished messages that end before the broker may deliver a copy."""
    timeout = visibility_timeout(app.conf)
    if timeout is not None and 0 < of_app.done_ttl < timeout:
        yield _warning(
            *(app, "W005", f"CELERY_SINGLETON_LOCK_DONE_TTL is {of_app.done_ttl:g}"),
            f"The broker delivers a message again after its visibility_timeout of {timeout:g} seconds, and that it was "
            "carried out is forgotten by then: leave CELERY_SINGLETON_LOCK_DONE_TTL out, or make it longer than that.",
        )


def _apps() -> list[Any]:
    """The Celery apps that were made here; the one that stands in where there is none has no fix-ups."""
    active: Iterable[Any] = _state._get_active_apps()  # type: ignore[attr-defined]
    return sorted((app for app in active if app.fixups), key=_shown)


def _exclusive_tasks(app: Any) -> Mapping[str, Any]:
    """By name; a worker has imported them where this is asked for, `manage.py` has not."""
    autodiscover_modules("tasks")
    return {name: it for name, it in app.tasks.items() if isinstance(it, SingletonTask) and not is_builtin(name)}


def _task_of(entry: Any) -> Any:
    return entry.get("task") if isinstance(entry, Mapping) else getattr(entry, "task", None)


def _warning(app: Any, number: str, message: str, hint: str) -> CheckMessage:
    message, hint = (text.replace("CELERY_", _namespace(app)) for text in (message, hint))
    return Warning(message, hint=hint, obj=_shown(app), id=f"celery_singleton_lock.{number}")


def _as_in_django(app: Any, error: Exception) -> str:
    """The message, with the names that the settings have in Django's."""
    return re.sub(r"\bsingleton_lock_\w+", lambda name: f"{_namespace(app)}{name[0].upper()}", str(error))


def _namespace(app: Any) -> str:
    """What the names of Celery's settings begin with in Django's: `CELERY_`, or nothing."""
    return (getattr(app.conf, "prefix", None) or "").upper()


def _shown(app: Any) -> str:
    return f"Celery app {app.main or 'without a name'}"
