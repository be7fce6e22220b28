"""Applies the rules for settings and tasks to an app: for `celery locks audit`, and for a worker that starts.

This connects to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.diagnosis.finding import Finding, merged, worst_first
from celery_singleton_lock.diagnosis.settings import IN_MEMORY, of_app
from celery_singleton_lock.diagnosis.tasks import exclusive_tasks, lock_key_in_words, of_task
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.rules import WHILE_EXECUTING
from celery_singleton_lock.options.task import Options, options_for


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


def audit_tasks(app: Any, settings: Settings) -> list[Audited]:
    """Each exclusive task of an app whose task modules have been imported, with the findings about it."""
    return [
        Audited(task.name, _lock(task, options), worst_first(of_task(task, options, pool)))
        for task, options, pool in _exclusive(app, settings, None)
    ]


def audit_app(app: Any, settings: Settings, **of_beat: Any) -> list[Finding]:
    """Findings about the app as a whole, worst first; `of_beat` as for `of_app`."""
    return worst_first(of_app(app, settings, **of_beat))


def task_warnings(app: Any, settings: Settings, *, pool: str | None = None) -> list[Finding]:
    """The findings about the tasks; one that applies to several tasks comes once.

    `pool` is the workers' pool, by its name for `celery worker -P`; None: the pool in the app's settings.
    """
    return merged(finding for each in _exclusive(app, settings, pool) for finding in of_task(*each))


def warnings_at_start(app: Any, settings: Settings, *, pool: str) -> list[Finding]:
    """The findings that a worker logs when it starts."""
    wide = [it for it in audit_app(app, settings) if it.subject != IN_MEMORY]
    return [*wide, *task_warnings(app, settings, pool=pool)]


def pool_name(pool: Any) -> str:
    """The name of a pool for `celery worker -P`, from its class or from the value of the setting `worker_pool`."""
    text = pool if isinstance(pool, str) else str(pool.__module__)
    name = text.partition(":")[0].rpartition(".")[2]
    return {"thread": "threads", "processes": "prefork"}.get(name, name)


def _exclusive(app: Any, settings: Settings, pool: str | None) -> Iterator[tuple[Any, Options, str]]:
    pool = pool or pool_name(app.conf.worker_pool)
    for task in exclusive_tasks(app):
        yield task, options_for(task, settings), pool


def _lock(task: Any, options: Options) -> str:
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
