"""A storm as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.storm.checker import BROKEN, Verdict
from tests.storm.excuses import REASONS
from tests.storm.ticks import AT_THE_END, Ticks


def faults(verdict: Verdict, ttl: float) -> str:
    """A table by kind of fault: a finding counts for each fault in the two leases before it."""
    rows = []
    for kind, times in sorted(Counter(fault.kind for fault in verdict.faults).items()):
        twice = verdict.of(kind, "overlap", ttl) + verdict.of(kind, "again", ttl)
        found = [twice, verdict.of(kind, "lost", ttl), verdict.of(kind, "told twice", ttl)]
        stuck = verdict.of(kind, "stuck", ttl) + verdict.of(kind, "left", ttl)
        rows.append([kind, *map(str, [times, *found, stuck]), *_recovery(verdict.recovery.get(kind, []))])
    counts = Counter(finding.broken for finding in verdict.broken)
    twice, stuck = counts["overlap"] + counts["again"], counts["stuck"] + counts["left"]
    in_all = [len(verdict.faults), twice, counts["lost"], counts["told twice"], stuck]
    seconds = [one for some in verdict.recovery.values() for one in some]
    rows.append(["**all**", *map(str, in_all), *_recovery(seconds)])
    heads = ["fault", "times", "double runs", "lost", "told twice", "stuck", "recovery p50", "p99", "max"]
    return _table(heads, rows)


def excuses(verdict: Verdict) -> str:
    """What was seen and the guarantees do not exclude."""
    found = Counter((finding.excuse, finding.broken) for finding in verdict.findings if finding.excuse)
    rows = [
        [broken, excuse, str(found[excuse, broken]), REASONS[excuse]]
        for excuse in REASONS
        for broken in BROKEN
        if found[excuse, broken]
    ]
    return _table(["seen", "excused as", "times", "because"], rows) if rows else "Nothing was excused."


def summary(verdict: Verdict) -> str:
    """Counts, then each finding without an excuse."""
    counts = Counter(finding.broken for finding in verdict.broken)
    minutes = verdict.seconds / 60 or 1.0
    lines = [
        f"{len(verdict.faults)} faults in {minutes:.1f} min ({len(verdict.faults) / minutes:.0f} a minute), "
        f"{verdict.messages} messages, {verdict.bodies} bodies, {verdict.unsure} refused as they were sent",
        f"{verdict.clicks} clicks at jobs that are locked as they are sent, {verdict.duplicates} of them duplicates",
        "broken promises: " + ", ".join(f"{counts[broken]} {broken}" for broken in BROKEN),
    ]
    lines += [f"- {one.broken} of {one.subject} at {one.at:.2f}: {one.text}" for one in verdict.broken]
    return "\n".join(lines)


def ticks(counted: Mapping[str, Ticks]) -> str:
    """A table of the ticks that beats sent, by scheduler."""
    heads = ["by", "faults", "beats ended by themselves", "ticks", "sent twice", "of these, under one id"]
    heads += [
        "by or beside a resumed beat",
        "close to a late tick",
        "without a tick",
        "longest time between two ticks",
        f"last {AT_THE_END:g} s of the calm",
    ]
    rows = []
    for title, one in counted.items():
        counts = [str(one.faults), str(one.ended), f"{one.arrived} of {one.seconds:.0f}"]
        counts += map(str, [one.twice, one.repeated, one.resumed, one.late])
        rows.append([title, *counts, f"{one.silent:.0f} s", f"{one.longest:.1f} s", f"{one.at_the_end} ticks"])
    return _table(heads, rows)


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Consecutive storms as one."""
    whole = Verdict()
    for one in verdicts:
        whole.findings += one.findings
        whole.faults += one.faults
        whole.messages, whole.bodies = whole.messages + one.messages, whole.bodies + one.bodies
        whole.clicks, whole.duplicates = whole.clicks + one.clicks, whole.duplicates + one.duplicates
        whole.unsure, whole.seconds = whole.unsure + one.unsure, whole.seconds + one.seconds
        for kind, seconds in one.recovery.items():
            whole.recovery[kind] += seconds
    return whole


def page(verdict: Verdict, title: str, ttl: float) -> str:
    return "\n\n".join([f"### {title}", summary(verdict), faults(verdict, ttl), excuses(verdict)])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def _recovery(seconds: list[float]) -> list[str]:
    if not seconds:
        return ["", "", ""]
    ordered = sorted(seconds)
    return [f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:.1f} s" for share in (0.5, 0.99, 1.0)]
