"""Findings, for people and for programs, and the exit status that follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import click

from celery_singleton_lock import cleaned
from celery_singleton_lock.cli import command
from celery_singleton_lock.diagnosis.finding import Finding

#: The option of the commands that report findings.
strict = command.option("--strict", is_flag=True, help="Exit with status 1 for a warning, too.")

_COLOURS = {"problem": "red", "warning": "yellow", "note": "cyan"}


def show(found: Sequence[Finding], *, subject: str | None = None) -> None:
    """Print findings for people; `subject` is already named in a headline, and is left out."""
    for finding in found:
        about = "" if finding.subject == subject else f"{finding.subject}: "
        indent = "  " if subject else ""
        severity = click.style(f"{finding.severity:<8}", fg=_COLOURS[finding.severity])
        click.echo(f"{indent}{severity} {cleaned.line(about + finding.text)}")
        click.echo(f"{indent}{'':<8} -> {cleaned.line(finding.remedy)}")


def dump(found: Sequence[Finding]) -> None:
    """Print findings for programs: one object per line."""
    for finding in found:
        command.say_json(asdict(finding))


def conclude(ctx: click.Context, found: Sequence[Finding], as_json: bool, strict: bool) -> None:
    """Count the findings, and end the command: with status 1 for a problem, and if `strict` for a warning."""
    counts = Counter(finding.severity for finding in found)
    if not as_json:
        click.echo(", ".join(f"{severity}s: {counts[severity]}" for severity in ("problem", "warning", "note")))
    if counts["problem"] or (strict and counts["warning"]):
        ctx.exit(1)
