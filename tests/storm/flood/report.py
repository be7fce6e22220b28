"""Floods as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.storm.flood.flood import Plan
from tests.storm.flood.judge import Verdict


class Row(NamedTuple):
    """One scope of one flood."""

    scope: str
    plan: Plan
    verdict: Verdict


def tables(rows: Sequence[Row]) -> str:
    """A table for the floods without kills, a table for the others, and each finding without an excuse."""
    calm = [_calm(row) for row in rows if not row.plan.is_deadly]
    deadly = [_deadly(row) for row in rows if row.plan.is_deadly]
    parts = []
    if calm:
        heads = ["`lock_scope`", "sends", "queued before the first worker", "sent", "duplicates", "run", "skipped"]
        parts.append(_table([*heads, "too many", "too few"], calm))
    if deadly:
        heads = ["`lock_scope`", "sends", "killed: senders, workers, children", "sent", "run", "lost by the broker"]
        more = ["run again", "too many", "too few", "can be sent and run again after", "bound"]
        parts.append(_table([*heads, *more], deadly))
    found = [f"- {one.broken}, {one.scope}: {one.text}" for row in rows for one in row.verdict.broken]
    return "\n\n".join([*parts, *(["\n".join(found)] if found else [])])


def _calm(row: Row) -> list[str]:
    counts = row.verdict.counts[row.scope]
    told = [counts.sends, counts.queued or 0, counts.sent, counts.duplicates, counts.runs, counts.refused]
    return [f"`{row.scope}`", *(f"{number:,}" for number in told), *_wrong(row)]


def _deadly(row: Row) -> list[str]:
    counts, verdict = row.verdict.counts[row.scope], row.verdict
    killed = " ".join(str(counts.killed[kind]) for kind in ("sender", "worker", "child"))
    lost, again = (verdict.number_of(row.scope, broken, excused=True) for broken in ("lost", "again"))
    freed = "–" if counts.freed is None else f"{counts.freed:.1f} s"
    told = [f"{counts.sends:,}", killed, f"{counts.sent:,}", f"{counts.runs:,}", str(lost), str(again)]
    return [f"`{row.scope}`", *told, *_wrong(row), freed, f"{row.plan.bound:g} s"]


def _wrong(row: Row) -> list[str]:
    """Messages and runs that should not exist, and those that are missing."""
    many = sum(row.verdict.number_of(row.scope, broken) for broken in ("sent twice", "overlap", "again"))
    few = sum(row.verdict.number_of(row.scope, broken) for broken in ("refused", "lost", "stuck", "queue"))
    return [str(many), str(few)]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])
