"""Checks the settings of the exclusive tasks, and all that their locks depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from celery_singleton_lock import cleaned
from celery_singleton_lock.cli import command
from celery_singleton_lock.diagnosis.audit import audit_tasks, of_app
from celery_singleton_lock.diagnosis.finding import Finding, Severity, worst_first
from celery_singleton_lock.options.app import problems

_COLOURS: Mapping[Severity, str] = {"problem": "red", "warning": "yellow", "note": "cyan"}


def _how(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that both commands have."""
    strict = command.option("--strict", is_flag=True, help="Exit with status 1 for a warning, too.")
    return command.as_json(strict(function))


@command.locks_command(short_help="Check the settings of each exclusive task.")
@_how
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
        wide = worst_first(of_app(app, runtime.settings))
    if not tasks:
        if not as_json:
            _show(wide)  # Plain tasks with options of exclusive ones, say.
        hint = command.without_app(ctx) or f"does app {app.main!r} import the modules of its tasks?"
        raise click.ClickException(f"no task is exclusive: none has SingletonTask as its base; {hint}")
    for task in tasks:
        if as_json:
            command.say_json({"verdict": task.verdict, **asdict(task)})
        else:
            command.say(f"{task.verdict:<8} {task.task}  ({task.lock})")
            _show(task.findings, subject=task.task)
    _conclude(ctx, wide, as_json, strict, told=[finding for task in tasks for finding in task.findings])


@command.locks_command(short_help="Check servers, keys, settings and workers.")
@_how
@command.option(
    "--timeout",
    type=command.Number(0.1, 60),
    default=1.0,
    show_default=True,
    help="Seconds that workers have to answer.",
)
def doctor(ctx: click.Context, as_json: bool, strict: bool, timeout: float, **_: Any) -> None:
    """Check the lock servers, their keys, the settings and the workers; print what is wrong and what to do.

    The exit status is 1 if there is a problem (with --strict: or a warning), otherwise 0.
    """
    # Imported here because it loads the Redis client, which other commands may not need.
    from celery_singleton_lock.diagnosis.doctor import diagnose

    app = ctx.obj.app
    app.loader.import_default_modules()
    with command.runtime_of(ctx):
        diagnosis = diagnose(app, timeout=timeout)
    if not as_json:
        for line in diagnosis.seen:
            command.say(line)
    _conclude(ctx, diagnosis.findings, as_json, strict)


def _show(found: Sequence[Finding], *, subject: str | None = None) -> None:
    """Print findings for people; `subject` is already named in a headline, and is left out."""
    indent = "  " if subject else ""
    for finding in found:
        about = "" if finding.subject == subject else f"{finding.subject}: "
        severity = click.style(f"{finding.severity:<8}", fg=_COLOURS[finding.severity])
        click.echo(f"{indent}{severity} {cleaned.line(about + finding.text)}")
        click.echo(f"{indent}{'':<8} -> {cleaned.line(finding.remedy)}")


def _conclude(
    ctx: click.Context, found: Sequence[Finding], as_json: bool, strict: bool, *, told: Sequence[Finding] = ()
) -> None:
    """Print findings, count them and those that were `told`, and end: with status 1 for a problem; if `strict`, for a
    warning.
    """
    counts = Counter(finding.severity for finding in (*told, *found))
    if as_json:
        for finding in found:
            command.say_json(asdict(finding))
    else:
        _show(found)
        click.echo(", ".join(f"{severity}s: {counts[severity]}" for severity in _COLOURS))
    if counts["problem"] or (strict and counts["warning"]):
        ctx.exit(1)
