"""Applies the rules for settings and tasks to an app: for `celery locks audit`, and for a worker that starts.

This connects to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.diagnosis import beat, settings, tasks
from celery_singleton_lock.diagnosis.finding import Finding, judged, merged, worst_first
from celery_singleton_lock.diagnosis.settings import AppContext
from celery_singleton_lock.diagnosis.tasks import TaskContext, exclusive_tasks, lock_key_in_words
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import WHILE_EXECUTING
from celery_singleton_lock.options.task import options_for


@dataclass(frozen=True, slots=True)
class Audited:
    """An exclusive task, what it locks and how in words, and the findings, worst first."""

    task: str
    lock: str
    findings: Sequence[Finding]

    @property
    def verdict(self) -> str:
        """The severity of the worst finding; "ok" if there is none."""
        return self.findings[0].severity if self.findings else "ok"


def audit_tasks(app: Any, of_app: Settings) -> list[Audited]:
    """Each exclusive task of an app whose task modules have been imported, with the findings about it."""
    return [
        Audited(context.subject, _lock(context), worst_first(judged(tasks.RULES, context)))
        for context in _contexts(app, of_app, None)
    ]


def audit_app(
    app: Any, of_app: Settings, *, leaders: int | None = None, recorded: Collection[str] = ()
) -> list[Finding]:
    """Findings about the app as a whole, worst first; `leaders` and `recorded` as for `AppContext`."""
    return worst_first(judged((*settings.RULES, *beat.RULES), AppContext(app, of_app, leaders, recorded)))


def task_warnings(app: Any, of_app: Settings, *, pool: str | None = None) -> list[Finding]:
    """The findings about the tasks; one that applies to several tasks comes once.

    `pool` is the workers' pool, by its name for `celery worker -P`; None: the pool in the app's settings.
    """
    return merged(judged(tasks.RULES, *_contexts(app, of_app, pool)))


def warnings_at_start(app: Any, of_app: Settings, *, pool: str) -> list[Finding]:
    """The findings that a worker logs when it starts."""
    wide = [it for it in judged(settings.AT_START, AppContext(app, of_app)) if it.severity != "note"]
    return [*worst_first(wide), *task_warnings(app, of_app, pool=pool)]


def pool_name(pool: Any) -> str:
    """The name of a pool for `celery worker -P`, from its class or from the value of the setting `worker_pool`."""
    text = pool if isinstance(pool, str) else str(pool.__module__)
    name = text.partition(":")[0].rpartition(".")[2]
    return {"thread": "threads", "processes": "prefork"}.get(name, name)


def _contexts(app: Any, of_app: Settings, pool: str | None) -> Iterator[TaskContext]:
    pool = pool or pool_name(app.conf.worker_pool)
    for task in exclusive_tasks(app):
        yield TaskContext(task.name, task, options_for(task, of_app), pool)


def _lock(context: TaskContext) -> str:
    task, options = context.task, context.options
    parts = [
        f"lock_name {task.lock_name}" if task.lock_name else "",
        f"key: {lock_key_in_words(task)}",
        f"lock_scope {options.scope}" if options.scope != WHILE_EXECUTING else "",
        f"ttl {options.ttl:g} s",
        f"waits {options.wait:g} s" if options.wait else "",
        f"on_conflict {getattr(options.on_conflict, '__qualname__', options.on_conflict)}",
        f"limit {options.limit}" if options.limit > 1 else "",
    ]
    return ", ".join(filter(None, parts))
