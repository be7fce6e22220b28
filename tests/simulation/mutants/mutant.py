"""A fault that is deliberately put into the package, to see whether the simulator finds it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one file.

    Attributes:
        name: the promise that it breaks.
        file: in the package's folder.
        old: the text that `new` replaces; it occurs once.
        new: the fault.
        nodes: number of servers in the plans; None: as they are drawn.
        kind: of the plans.
    """

    name: str
    file: str
    old: str
    new: str
    nodes: int | None = None
    kind: str = "tasks"

    @property
    def path(self) -> str:
        """The file, relative to the project's folder."""
        return f"celery_singleton_lock/{self.file}"

    def edit(self, path: str, text: str) -> str:
        """The text of a file with the fault: an `Edit` of `loading`."""
        if path != self.path:
            return text
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is there {text.count(self.old)} times")
        return text.replace(self.old, self.new)
