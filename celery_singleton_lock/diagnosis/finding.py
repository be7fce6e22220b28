"""A finding: how bad it is, what it is about, and what to do. Rules yield them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

#: "problem": a promise does not hold, or nothing works. "warning": not as somebody meant it. "note": good to know.
Severity = Literal["problem", "warning", "note"]

_ORDER: tuple[Severity, ...] = ("problem", "warning", "note")

#: Names that are written out of many.
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


@dataclass(frozen=True, slots=True)
class Subject:
    """Whatever findings are about. The context of a rule is one, with what the rule has to know of it."""

    subject: str

    def problem(self, text: str, remedy: str) -> Finding:
        return Finding("problem", self.subject, text, remedy)

    def warning(self, text: str, remedy: str) -> Finding:
        return Finding("warning", self.subject, text, remedy)

    def note(self, text: str, remedy: str) -> Finding:
        return Finding("note", self.subject, text, remedy)


Context = TypeVar("Context")


def judged(rules: Iterable[Callable[[Context], Iterator[Finding]]], *contexts: Context) -> list[Finding]:
    """The findings of all rules in each context."""
    return [finding for context in contexts for rule in rules for finding in rule(context)]


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, those that matter most first, else in the order in which they were found."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def serious(findings: Iterable[Finding]) -> list[Finding]:
    """All that is more than a note."""
    return [finding for finding in findings if finding.severity != "note"]


def notes(findings: Iterable[Finding]) -> list[Finding]:
    """All that is good to know, and no more."""
    return [finding for finding in findings if finding.severity == "note"]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Those that differ in their subjects only as one."""
    subjects: defaultdict[Finding, list[str]] = defaultdict(list)
    for finding in findings:
        subjects[replace(finding, subject="")].append(finding.subject)
    return [replace(finding, subject=some(names)) for finding, names in subjects.items()]


def some(names: Sequence[str]) -> str:
    """A few names of many."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
