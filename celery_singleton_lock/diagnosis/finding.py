"""A finding: how bad it is, what it is about, and what to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

#: "problem": a promise does not hold, or nothing works. "warning": probably not as intended. "note": good to know.
Severity = Literal["problem", "warning", "note"]

_ORDER: tuple[Severity, ...] = ("problem", "warning", "note")

#: A rule about a subject: whether it applies, and the severity, the text and the remedy of what is found then.
Rule = tuple[object, Severity, str, str]

#: How many of several names are written out.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was found.

    Attributes:
        subject: what it is about: a task, a setting, a server, a key.
    """

    severity: Severity
    subject: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}; {self.remedy}"


def judged(subject: str, *rules: Rule) -> list[Finding]:
    """The findings of the rules that apply to a subject."""
    return [Finding(severity, subject, text, remedy) for applies, severity, text, remedy in rules if applies]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, the most severe first, otherwise in the order in which they were found."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, with those that differ only in their subjects merged into one."""
    subjects: defaultdict[Finding, list[str]] = defaultdict(list)
    for finding in findings:
        subjects[replace(finding, subject="")].append(finding.subject)
    return [replace(finding, subject=some(names)) for finding, names in subjects.items()]


def some(names: Sequence[str]) -> str:
    """A few of the names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
