"""A program on a simulated host, which may be killed and started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Host, Process


class Program:
    """Call `start` to run it. The same faults may strike it as a worker.

    Args:
        world: where it is.
            host: on which it runs.
            name: of its first process; later processes have a number after it.
            main: called in its main thread, with this program.
    """

    def __init__(self, world: Any, host: Host, name: str, main: Callable[[Program], None]) -> None:
        self.world, self.host, self.name = world, host, name
        self.process: Process | None = None
        self.living: list[Any] = []
        self._main = main
        self._life = 0

    def start(self) -> None:
        """Start it as a new process, unless it is running."""
        if self.process is None or not self.process.alive:
            self._life += 1
            name = f"{self.name}.{self._life}" if self._life > 1 else self.name
            self.process = self.world.process(self.host, name)
            self.world.run.start(self.process, self._run)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.world.run.kill(self.process)

    def _run(self) -> None:
        assert self.process is not None
        self.process.package.begin()
        self._main(self)
