"""Checks the lock servers, their keys, the settings and the workers."""

from __future__ import annotations

from typing import Any

import click

from celery_singleton_lock.cli import command, findings


@command.locks_command(short_help="Check servers, keys, settings and workers.")
@command.as_json
@findings.strict
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
    if as_json:
        findings.dump(diagnosis.findings)
    else:
        for line in diagnosis.seen:
            command.say(line)
        findings.show(diagnosis.findings)
    findings.conclude(ctx, diagnosis.findings, as_json, strict)
