"""Checks whether a task keeps its promises on your set-up, under faults, on separate workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from celery_singleton_lock import cleaned
from celery_singleton_lock.cli import command, target
from celery_singleton_lock.diagnosis.audit import pool_name
from celery_singleton_lock.options.rules import MAX_TTL, MIN_TTL, REPLACE, WHILE_EXECUTING
from celery_singleton_lock.options.task import options_for
from celery_singleton_lock.rehearsal.faults import FAULTS, perform
from celery_singleton_lock.rehearsal.scene import Outcome, Play, RehearsalFailed
from celery_singleton_lock.rehearsal.witness import without_limits
from celery_singleton_lock.runtime import Runtime

_ROW = "{:<15}{:<6}{:<10}{:<10}{}"
_VERDICTS = {True: ("as promised", "green"), False: ("NOT as promised", "red"), None: ("left out", "yellow")}


@command.locks_command("rehearse", short_help="Run a task under faults: what holds?")
@command.option(
    "--fault",
    "names",
    multiple=True,
    type=click.Choice(list(FAULTS)),
    help="Only this fault; can be repeated.",
)
@command.option(
    "--ttl",
    type=command.Number(MIN_TTL, MAX_TTL),
    help="The lock_ttl to rehearse with; a short one is quicker. By default the task's own.",
)
@command.option("--pool", "-P", help="The workers' pool; by default worker_pool of the app.")
@command.option(
    "--timeout",
    type=command.Number(1, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds that the task itself may take. Anything that takes longer counts as never happening.",
)
@command.option("--yes", "-y", is_flag=True, help="Do not ask.")
@command.as_json
@click.argument("words", nargs=-1, required=True, metavar="TASK [ARG]...")
def rehearsal(ctx: click.Context, words: tuple[str, ...], **given: Any) -> None:
    """Run a call of TASK under faults, and report what held: overlaps, runs, recovery. Use it on staging.

    The task really runs, several times for each fault, on workers that are started for it, with separate queues and
    keys. Only these workers are killed. Each run waits, under its lock, until its fault is over.

    The exit status is 1 if a promise was not kept, otherwise 0.
    """
    names = [name for name in FAULTS if name in given["names"] or not given["names"]]
    with command.runtime_of(ctx) as runtime:
        play = _play(ctx, runtime, words, given)
        if not given["yes"]:
            effort = f"Run {play.task.name} about {2 * len(names)} times, with all its effects"
            click.confirm(
                cleaned.line(f"{effort}, on separate workers, which are killed meanwhile?"), abort=True, err=True
            )
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # So that its workers end with it.
        if not given["as_json"]:
            click.echo(_ROW.format("FAULT", "RUNS", "OVERLAPS", "RECOVERY", "").rstrip())
        try:
            kept = [_shown(perform(play, name), given["as_json"]) for name in names]
        except RehearsalFailed as error:
            raise click.ClickException(str(error)) from error
    if False in kept:
        ctx.exit(1)


def _play(ctx: click.Context, runtime: Runtime, words: Sequence[str], given: dict[str, Any]) -> Play:
    app, settings = ctx.obj.app, runtime.settings
    task, args, kwargs = target.call_of(app, words)
    ttl = given["ttl"] or options_for(task, settings).ttl
    task.__dict__.update(without_limits(ttl))
    options, name = options_for(task, settings), ctx.find_root().params.get("app")
    for cannot, why in (
        (not settings.enabled, "singleton_lock_enabled is False: there is no lock to rehearse"),
        (app.conf.task_always_eager, "task_always_eager is True: no worker would run the task"),
        (not hasattr(os, "killpg"), "workers cannot be killed with their processes on this platform"),
        (
            options.scope != WHILE_EXECUTING,
            f"lock_scope of {task.name} is {options.scope!r}: only a lock that begins with the run can be rehearsed",
        ),
        (options.limit > 1, f"lock_limit of {task.name} is {options.limit}: its runs may overlap"),
        (options.on_conflict == REPLACE, f"on_conflict of {task.name} is {REPLACE!r}: its calls stop each other"),
    ):
        if cannot:
            raise click.ClickException(why)
    return Play(
        task=task,
        send=partial(task.apply_async, args, kwargs),
        ttl=ttl,
        celery=("-A", name) if isinstance(name, str) else (),
        pool=given["pool"] or pool_name(app.conf.worker_pool),
        patience=given["timeout"],
    )


def _shown(outcome: Outcome, as_json: bool) -> bool | None:
    """Print an outcome; returns whether all promises were kept."""
    if as_json:
        command.say_json(asdict(outcome))
        return outcome.kept
    verdict, color = _VERDICTS[outcome.kept]
    recovery = "-" if outcome.recovery is None else f"{outcome.recovery:.1f} s"
    counts = ("-", "-") if outcome.kept is None else (outcome.runs, outcome.overlaps)
    click.echo(_ROW.format(outcome.fault, *counts, recovery, click.style(verdict, fg=color)))
    for text in (FAULTS[outcome.fault][0], *outcome.broken, *outcome.notes):
        command.say(f"    {text}")
    return outcome.kept
