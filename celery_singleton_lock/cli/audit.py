"""Whether the exclusive tasks are set up as somebody meant it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_singleton_lock.cli import command, findings
from celery_singleton_lock.diagnosis.audit import audit_app, audit_tasks, pool_name
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import Settings


@click.command(cls=CeleryCommand)
@command.as_json
@findings.strict
@click.pass_context
@handle_preload_options
def audit(ctx: click.Context, as_json: bool = False, strict: bool = False, **_: Any) -> None:
    """Check the settings of each exclusive task; connects to nothing.

    The exit status is 1 if a problem was found (with --strict: or a warning), else 0.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    try:
        settings = Settings.from_app(app)
    except InvalidOption as error:
        raise click.ClickException(str(error)) from error
    tasks = audit_tasks(app, settings, pool=pool_name(app.conf.worker_pool))
    wide = audit_app(app, settings)
    for task in tasks:
        if as_json:
            click.echo(json.dumps({"verdict": task.verdict, **asdict(task)}))
        else:
            command.say(f"{task.verdict:<8} {task.task}  ({task.lock})")
            findings.show(task.findings, subject=task.task)
    if as_json:
        findings.dump(wide)
    else:
        findings.show(wide)
    findings.conclude(ctx, [*wide, *(finding for task in tasks for finding in task.findings)], as_json, strict)
