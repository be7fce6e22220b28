"""Checks the settings of the app and its tasks, and all that their locks depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from celery_singleton_lock import cleaned
from celery_singleton_lock.cli import command
from celery_singleton_lock.diagnosis.audit import of_app
from celery_singleton_lock.diagnosis.finding import Finding, Severity
from celery_singleton_lock.diagnosis.tasks import exclusive_tasks
from celery_singleton_lock.options.app import problems

_COLOURS: Mapping[Severity, str] = {"problem": "red", "warning": "yellow", "note": "cyan"}


@command.locks_command(short_help="Check settings, servers and workers.")
@command.option("--offline", is_flag=True, help="Check only the settings of the app and its tasks; connect to nothing.")
@command.option("--strict", is_flag=True, help="Exit with status 1 for a warning, too.")
@command.option(
    "--timeout",
    type=command.Number(0.1, 60),
    default=1.0,
    show_default=True,
    help="Seconds that workers have to answer.",
)
@command.as_json
def doctor(ctx: click.Context, offline: bool, strict: bool, timeout: float, as_json: bool, **_: Any) -> None:
    """Check the settings, the lock servers, the locks and the workers; print what is wrong and what to do.

    The exit status is 1 if there is a problem (with --strict: or a warning), otherwise 0.
    """
    app = ctx.obj.app
    app.loader.import_default_modules()
    seen: list[str] = []
    with command.runtime_of(ctx, memory=offline) as runtime:
        for error in problems(app):
            raise error  # Including beat's settings, with which a worker would start all the same.
        if offline:
            found = of_app(app, runtime.settings)
            if not exclusive_tasks(app):
                remedy = command.without_app(ctx) or f"have app {app.main!r} import the modules of its tasks"
                found.insert(0, Finding("problem", "tasks", "none has SingletonTask as its base", remedy))
        else:
            # Imported here because it loads the Redis client, which other commands may not need.
            from celery_singleton_lock.diagnosis.doctor import diagnose

            seen, found = diagnose(app, timeout=timeout)
    if as_json:
        for finding in found:
            command.say_json(asdict(finding))
    else:
        for line in seen:
            command.say(line)
        _show(found)
    severities = {finding.severity for finding in found}
    if "problem" in severities or (strict and "warning" in severities):
        ctx.exit(1)


def _show(found: list[Finding]) -> None:
    for finding in found:
        severity = click.style(f"{finding.severity:<8}", fg=_COLOURS[finding.severity])
        click.echo(f"{severity} {cleaned.line(f'{finding.subject}: {finding.text}')}")
        click.echo(f"{'':<8} -> {cleaned.line(finding.remedy)}")
    counts = Counter(finding.severity for finding in found)
    click.echo(", ".join(f"{severity}s: {counts[severity]}" for severity in _COLOURS))
