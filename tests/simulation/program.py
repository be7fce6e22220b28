"""A program on a simulated host, which may be killed and started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import Host


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
        #: Its present process, or the last one.
        self.process: Any = None
        self._main = main
        self._life = 0

    @property
    def living(self) -> list[Any]:
        """Its living children."""
        return []

    def start(self) -> None:
        """Start it as a new process, unless it is running."""
        if not self.is_alive:
            self._life += 1
            name = f"{self.name}.{self._life}" if self._life > 1 else self.name
            self.process = self.world.process(self.host, name)
            self.world.run.start(self.process, self._run)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.alive

    def kill(self) -> None:
        """SIGKILL; children of a worker end after their present job."""
        if self.process is not None:
            self.world.run.kill(self.process)

    def kill_for(self, seconds: float) -> bool:
        """The same, and start it again after some seconds; returns whether it was alive."""
        was_alive = self.is_alive
        self.kill()
        self.world.run.after(seconds, self.start)
        return was_alive

    def _run(self) -> None:
        self.process.package.begin()
        self._main(self)
