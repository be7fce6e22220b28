"""Checks whether the exclusive tasks are set up as intended."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from celery_singleton_lock.cli import command, findings
from celery_singleton_lock.diagnosis.audit import audit_app, audit_tasks
from celery_singleton_lock.diagnosis.finding import merged, notes, serious
from celery_singleton_lock.options.app import problems


@command.locks_command(short_help="Check the settings of each exclusive task.")
@command.as_json
@findings.strict
def audit(ctx: click.Context, as_json: bool, strict: bool, **_: Any) -> None:
    """Check the settings of each exclusive task; connects to nothing.

    The exit status is 1 if there is a problem (with --strict: or a warning) or no exclusive task, otherwise 0.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    with command.runtime_of(ctx, memory=True) as runtime:
        for error in problems(app):
            raise error  # Including beat's settings, with which a worker would start all the same.
        tasks = audit_tasks(app, runtime.settings)
        wide = audit_app(app, runtime.settings)
    if not tasks:
        hint = command.without_app(ctx) or f"does app {app.main!r} import the modules of its tasks?"
        raise click.ClickException(f"no task is exclusive: none has SingletonTask as its base; {hint}")
    found = [finding for task in tasks for finding in task.findings]
    if as_json:
        for task in tasks:
            command.say_json({"verdict": task.verdict, **asdict(task)})
        findings.dump(wide)
    else:
        for task in tasks:
            command.say(f"{task.verdict:<8} {task.task}  ({task.lock})")
            findings.show(serious(task.findings), subject=task.task)
        findings.show(wide)
        # Most notes apply to many tasks.
        findings.show(merged(notes(found)))
    findings.conclude(ctx, [*wide, *serious(found), *merged(notes(found))], as_json, strict)
