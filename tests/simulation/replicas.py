"""A replica of a lock server that takes its place; thanks to Sentinels, clients find it under the same name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.simulation.scheduler import Simulation

#: Seconds that a write takes to reach the replica, and its acknowledgement to come back.
DELAY = (0.0002, 0.003)

#: Seconds after which a server has a replica again.
JOINS = (0.05, 0.5)


class Replica:
    """Has the writes of a server that have arrived.

    Args:
        server: which has this replica from now on.
    """

    def __init__(self, run: Simulation, server: Any) -> None:
        self.run, self.server = run, server
        self._data: Any = None
        #: With what the replica takes the server's place, while nothing is there.
        self._next_data: Any = None
        self._followed: Any = None
        self._last = 0.0
        self._cut_at: float | None = None
        #: When it was cut off, and when it took the server's place all the same.
        self.missed: list[tuple[float, float]] = []
        #: Writes, and copies of everything, that wait until the link is open again.
        self._held_up: deque[Callable[[], None]] = deque()
        server.on_start.append(self._joins)
        self._follow(server.model)

    def cut(self, seconds: float) -> None:
        """Nothing arrives for a while."""
        self._cut_at = self.run.now if self._cut_at is None else self._cut_at
        self.run.after(seconds, self._open)

    def take_over(self, seconds: float) -> None:
        """The server is gone, and after some seconds the replica is the server; nothing happens while it has none."""
        if self.server.model is None or self.server.model is not self._followed:
            return
        if self._cut_at is not None:
            self.missed.append((self._cut_at, self.run.now))
        self.server.crash()
        data = self._next_data = self._data
        # Not if the server was restarted meanwhile, and has gone again: its replica knows more by then.
        self.run.after(seconds, lambda: self.server.start(data.copy()) if self._next_data is data else None)

    def _joins(self, model: Any) -> None:
        self._next_data = None
        self.run.after(self.run.rng.uniform(*JOINS), lambda: self._follow(model))

    def _follow(self, model: Any) -> None:
        if self._cut_at is not None:
            self._held_up.append(lambda: self._follow(model))
        elif self.server.model is model:
            self._followed = model
            self._data = model.dataset.copy()
            model.on_write = lambda offset, changes: self._written(model, offset, changes)
            self._acknowledge(model, model.offset)

    def _written(self, model: Any, offset: int, changes: Sequence[Any]) -> None:
        self._last = max(self._last, self.run.now + self.run.rng.uniform(*DELAY))
        self.run.at(self._last, lambda: self._arrive(model, offset, changes))

    def _arrive(self, model: Any, offset: int, changes: Sequence[Any]) -> None:
        if self.server.model is not model:
            return
        if self._cut_at is not None:
            self._held_up.append(lambda: self._arrive(model, offset, changes))
            return
        for change in changes:
            self._data.apply(change)
        self._acknowledge(model, offset)

    def _acknowledge(self, model: Any, offset: int) -> None:
        def heard() -> None:
            if self.server.model is model:
                self.server.do(lambda: model.replica_has("replica", offset))

        self.run.after(self.run.rng.uniform(*DELAY), heard)

    def _open(self) -> None:
        self._cut_at = None
        held_up, self._held_up = self._held_up, deque()
        for arrive in held_up:
            arrive()
