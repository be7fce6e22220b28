"""What an audit or the doctor has to say: how bad it is, what it is about, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: "problem": a promise does not hold, or nothing works. "warning": not as somebody meant it. "note": good to know.
Severity = Literal["problem", "warning", "note"]

_ORDER: tuple[Severity, ...] = ("problem", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was found.

    Attributes:
        severity: how bad it is.
        subject: what it is about: a task, a setting, a server, a key.
        text: what is the matter.
        remedy: what to do about it.
    """

    severity: Severity
    subject: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}; {self.remedy}"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, those that matter most first, else in the order in which they were found."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))
