"""A storm as a table."""

from __future__ import annotations

from collections import Counter

from tests.storm.checker import BROKEN, Verdict


def table(verdict: Verdict, ttl: float) -> str:
    """By kind of fault: a finding counts with each fault of the two leases before it."""
    heads = ["fault", "times", "double runs", "lost", "told twice", "stuck", "recovery p50", "p99", "max"]
    rows = [heads, ["---"] * len(heads)]
    for kind, times in sorted(Counter(fault.kind for fault in verdict.faults).items()):
        twice = verdict.of(kind, "overlap", ttl) + verdict.of(kind, "again", ttl)
        found = [twice, verdict.of(kind, "lost", ttl), verdict.of(kind, "told twice", ttl)]
        stuck = verdict.of(kind, "stuck", ttl) + verdict.of(kind, "left", ttl)
        rows.append([kind, *map(str, [times, *found, stuck]), *_recovery(verdict.recovery.get(kind, []))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _recovery(seconds: list[float]) -> list[str]:
    if not seconds:
        return ["", "", ""]
    ordered = sorted(seconds)
    return [f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:.1f} s" for share in (0.5, 0.99, 1.0)]


def summary(verdict: Verdict) -> str:
    """Counts, then each finding that has no excuse."""
    counts = Counter(finding.broken for finding in verdict.broken)
    excused = Counter(f"{finding.broken}: {finding.excuse}" for finding in verdict.findings if finding.excuse)
    lines = [
        f"{len(verdict.faults)} faults, {verdict.messages} messages, {verdict.bodies} bodies",
        "broken promises: " + ", ".join(f"{counts[broken]} {broken}" for broken in BROKEN),
        f"not promised: {dict(excused)}; lost by the broker: {verdict.lost_by_broker}",
    ]
    lines += [f"{one.broken} of {one.subject} at {one.at:.2f}: {one.text}" for one in verdict.broken]
    return "\n".join(lines)
