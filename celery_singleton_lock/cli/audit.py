"""Whether the exclusive tasks are set up as somebody meant it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from celery_singleton_lock.cli import command, findings
from celery_singleton_lock.diagnosis.audit import audit_app, audit_tasks
from celery_singleton_lock.options.app import problems


@command.locks_command()
@command.as_json
@findings.strict
def audit(ctx: click.Context, as_json: bool, strict: bool, **_: Any) -> None:
    """Check the settings of each exclusive task; connects to nothing.

    The exit status is 1 if there is a problem (with --strict: or a warning), otherwise 0.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    with command.runtime_of(ctx, memory=True) as runtime:
        for error in problems(app):
            raise error  # Of beat: a worker starts all the same.
        tasks = audit_tasks(app, runtime.settings)
        wide = audit_app(app, runtime.settings)
    for task in tasks:
        if as_json:
            command.say_json({"verdict": task.verdict, **asdict(task)})
        else:
            command.say(f"{task.verdict:<8} {task.task}  ({task.lock})")
            findings.show(task.findings, subject=task.task)
    findings.dump(wide) if as_json else findings.show(wide)
    findings.conclude(ctx, [*wide, *(finding for task in tasks for finding in task.findings)], as_json, strict)
