"""Rules for the settings of an app, for its tasks as a whole, and for its schedule; and what they find in an app, with
the rules for each task: for `celery locks doctor`, for Django's checks, and for a worker that starts. This connects to
nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from celery.utils.imports import symbol_by_name

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import consumed_queues, named_schedulers
from celery_singleton_lock.backend import Kind
from celery_singleton_lock.diagnosis.finding import Finding, judged, merged, some, worst_first
from celery_singleton_lock.diagnosis.tasks import exclusive_tasks, of_task
from celery_singleton_lock.options.app import BeatSettings, Settings, is_rabbitmq, set_names, visibility_timeout
from celery_singleton_lock.options.rules import SETTINGS, TASK_OPTIONS
from celery_singleton_lock.options.task import options_for, raw_attribute
from celery_singleton_lock.options.words import misspelled_setting
from celery_singleton_lock.task.singleton_task import SingletonTask

#: From this version on, a signal handler that raises can strike inside of `with lock:`.
UNSAFE_PYTHON = (3, 14)

#: The subject of the finding that locks are in memory. A starting worker knows its pool, and itself refuses locks in
#: memory that its processes would not share.
IN_MEMORY = "singleton_lock_backend"


def pool_name(pool: Any) -> str:
    """The name of a pool for `celery worker -P`, from its class or from the value of the setting `worker_pool`."""
    text = pool if isinstance(pool, str) else str(pool.__module__)
    name = text.partition(":")[0].rpartition(".")[2]
    return {"thread": "threads", "processes": "prefork"}.get(name, name)


def of_app(app: Any, settings: Settings, *, beats: int | None = None) -> list[Finding]:
    """Findings about an app and its exclusive tasks, worst first; one that applies to several tasks comes once.

    Args:
        app: the app; its task modules have been imported.
        settings: its settings.
        beats: how many send its schedule; None if no server was asked.
    """
    found = chain(
        _of_settings(app, settings),
        _of_queues(app),
        _without_the_base(app),
        _of_shared_names(app, settings),
        _of_beat(app, beats),
        merged(it for task in exclusive_tasks(app) for it in of_task(task, options_for(task, settings))),
    )
    return worst_first(found)


def _of_settings(app: Any, settings: Settings) -> Iterator[Finding]:
    yield from judged(
        "singleton_lock_enabled",
        (
            not settings.enabled,
            "warning",
            "it is False: exclusive tasks run without a lock",
            "remove it, unless this is intended",
        ),
    )
    yield from judged(
        IN_MEMORY,
        (
            settings.enabled and settings.backend.in_memory,
            "warning",
            "the locks are in memory, which processes do not share: each has its own",
            "set singleton_lock_backend to the URL of a Redis",
        ),
    )
    visibility = visibility_timeout(app.conf) or 0.0
    yield from judged(
        "singleton_lock_done_ttl",
        (
            settings.done_ttl < visibility,
            "problem",
            f"finished messages are remembered for {settings.done_ttl:g} s, but the broker redelivers a message "
            f"that was not acknowledged within {visibility:g} s (its visibility timeout): a copy that comes "
            "then runs again",
            f"remove the setting, or set it to {visibility:g} or more",
        ),
    )
    for name in sorted(set_names(app.conf)):
        meant = misspelled_setting(name, SETTINGS)
        text, remedy = "nothing reads this setting", f"write {meant}, if that is what you mean"
        yield from judged(cleaned.text(name), (meant, "warning", text, remedy))
    # There, a signal's handler that raises may leave a mutex locked: see docs/install.md.
    python = (sys.version_info.major, sys.version_info.minor)
    yield from judged(
        "Python {}.{}".format(*python),
        (
            python >= UNSAFE_PYTHON,
            "warning",
            "a time limit or an abort may stop the heartbeat here, and the worker's tasks then lose their locks",
            "use an older one: 3.10 to 3.13",
        ),
    )


def _of_queues(app: Any) -> list[Finding]:
    """Queues whose messages every worker gets, on a broker that does not say which queue a message comes from."""
    queues = consumed_queues(app)
    fanout = [name for name, queue in queues.items() if queue.exchange is not None and queue.exchange.type == "fanout"]
    others = sorted(name for name in queues if name not in fanout) or [str(app.conf.task_default_queue)]
    return judged(
        f"task_queues {some(fanout)}",
        (
            fanout and not is_rabbitmq(app.conf),
            "warning",
            "every worker gets what is sent there; on this broker, a message that has to wait for its lock "
            f"cannot go back to one worker alone, and goes to the queue {others[0]}, where any worker may "
            "take it",
            "send exclusive tasks to other queues, or use RabbitMQ",
        ),
    )


def _without_the_base(app: Any) -> Iterator[Finding]:
    """Plain tasks with options of exclusive ones."""
    for task in app.tasks.values():
        given = [name for name in TASK_OPTIONS if getattr(task, name, None) is not None]
        if given and not isinstance(task, SingletonTask):
            text = f"it has {', '.join(given)}, but it is a plain task, which takes no lock"
            yield Finding("warning", cleaned.text(task.name), text, "set base=SingletonTask")


def _of_shared_names(app: Any, settings: Settings) -> Iterator[Finding]:
    by_name: defaultdict[str, list[Any]] = defaultdict(list)
    for task in exclusive_tasks(app):
        by_name[task.lock_name or task.name].append(task)
    for name, tasks in by_name.items():
        yield from _of_one_name(f"lock_name {name}", tasks, settings)


def _of_one_name(subject: str, tasks: Sequence[Any], settings: Settings) -> list[Finding]:
    forms = _where_they_differ((task.name, form) for task in tasks if (form := _form(task)) is not None)
    options = {task.name: options_for(task, settings) for task in tasks}
    limits = _where_they_differ((name, str(of.limit)) for name, of in options.items())
    ttls = _where_they_differ((name, f"{of.ttl:g} s") for name, of in options.items())
    return judged(
        subject,
        (
            forms,
            "problem",
            f"the tasks that share it make their keys in different ways, and so never exclude each other: {forms}",
            "give them one lock_key with the same argument names, or templates such as 'tenant:{tenant_id}'",
        ),
        (
            limits,
            "warning",
            f"the tasks that share it have different lock_limit, and each goes by its own: {limits}",
            "give them one lock_limit",
        ),
        (
            ttls and settings.backend.kind is Kind.REDLOCK,
            "problem",
            "the tasks that share it have different lock_ttl on a Redlock, where a node that came back empty "
            f"has no vote for the ttl of the requested lock: {ttls}",
            "give them one lock_ttl",
        ),
    )


def _where_they_differ(values: Iterable[tuple[str, str]]) -> str:
    """Each value, with some of the names that have it; empty if all have the same value."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in values:
        names[value].append(name)
    return "; ".join(f"{value} for {some(having)}" for value, having in names.items()) if len(names) > 1 else ""


def _form(task: Any) -> str | None:
    """How a task's key is made, so that two tasks can be compared; None if that is unknown."""
    lock_key = raw_attribute(task, "lock_key")
    if callable(lock_key):
        return None
    if isinstance(lock_key, str):
        return "a template"
    try:
        names = inspect.signature(task.run).parameters if lock_key is None else lock_key
    except (TypeError, ValueError):
        return None  # A function in C.
    return f"({', '.join(sorted(names))})"


def _of_beat(app: Any, beats: int | None) -> Iterator[Finding]:
    """A schedule that no beat sends."""
    if beats == 0 and getattr(_class_of(app.conf.beat_scheduler), "is_exclusive", False):
        name = BeatSettings.from_app(app).name
        text = f"beat_scheduler is exclusive, but no beat runs for the schedule {name}: none of it is sent"
        yield from judged("beat", (True, "warning", text, "start one: celery beat -S exclusive"))


def of_others(name: str, recorded: Collection[str], own: Collection[str]) -> list[Finding]:
    """The entries that are recorded for a schedule of this name, if most of them are not its own."""
    chosen, mine = _chosen(recorded), _chosen(own)
    strangers = sorted(chosen - mine)
    return judged(
        f"schedule {name}",
        (
            mine and len(strangers) > len(chosen & mine),
            "warning",
            f"the lock server records what was sent of {some(strangers)}, which are not in it: another project may "
            "have the same prefix and name, and only the schedule of one of the two is sent",
            "give each project its own singleton_lock_prefix; if these entries were removed or renamed, all is well",
        ),
    )


def _chosen(entries: Collection[str]) -> set[str]:
    """The entries without those that Celery adds to each project's schedule."""
    return {entry for entry in entries if not entry.startswith("celery.")}


def _class_of(scheduler: Any) -> Any:
    """A scheduler's class; its name if there is no such class."""
    try:
        return symbol_by_name(scheduler, aliases=named_schedulers())
    except Exception:  # noqa: BLE001 - the imported module may do anything, such as use a Django model
        return scheduler
