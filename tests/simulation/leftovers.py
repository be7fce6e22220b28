"""Holds of dead processes that may last until their ttl is over, as the guarantees say."""

from __future__ import annotations

from typing import Any

from tests.simulation import inside, trouble


class Leftovers:
    """Knows which holds of a dead child its main process cannot know of, or has freed in vain."""

    def __init__(self, world: Any) -> None:
        self._run, self._servers = world.run, world.servers

    @trouble.excuse
    def has(self, pid: int, owner: str) -> bool:
        """Whether this hold of a dead process may last for its ttl; `owner` is the beginning of its owner."""
        return self._is_unanswered(pid, owner)

    def _is_unanswered(self, pid: int, owner: str) -> bool:
        """Whether a process has given this owner up, or freed its hold, and died before the server answered that.

        Its main process frees what the last delivery has asked for last. It does not know of anything before that.
        """
        (dead,) = [process for process in self._run.processes if process.pid == pid]
        return len(self._servers) == 1 and any(
            call_owner.startswith(owner) for *_, call_owner in inside.repeated_by(dead)
        )
