"""A small change of one file."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    """A new text for the part of a file between two offsets."""

    start: int
    end: int
    new: str
    rule: str


class Change(NamedTuple):
    """An edit of a file, as the simulator's runner takes it.

    Attributes:
        file: its path in the project's folder.
        text: the unchanged text of the file.
        edit_of: the edit.
        nodes, kind: as in any plan.
    """

    file: str
    text: str
    edit_of: Edit
    nodes: None = None
    kind: None = None

    @property
    def name(self) -> str:
        start, end, new, rule = self.edit_of
        line = self.text.count("\n", 0, start) + 1
        old = " ".join(self.text[start:end].split())
        return f"{self.file.removeprefix('celery_singleton_lock/')}:{line} {rule}: {old[:60]!r} -> {new[:60]!r}"

    @property
    def changed(self) -> str:
        start, end, new, _ = self.edit_of
        return self.text[:start] + new + self.text[end:]

    def edit(self, path: str, text: str) -> str:
        """The text of a file after the change."""
        return self.changed if path == self.file else text
