"""Holds of dead processes that may last until their ttl is over, as the guarantees say."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from tests.simulation import holds, inside, trouble


class Leftovers:
    """Knows which holds of a dead child its main process cannot know of, or has freed in vain."""

    def __init__(self, world: Any) -> None:
        self._run, self._servers = world.run, world.servers
        #: Holds that had ended when a replica took the server's place that did not know it: their keys and owners.
        self._brought_back: set[tuple[str, str]] = set()
        for server in world.servers:
            if server.replica is not None:
                server.on_start.append(partial(self._bring_back, server))

    @trouble.excuse
    def has(self, key: str, pid: int, owner: str) -> bool:
        """Whether this hold of a dead process may last for its ttl; `owner` is the beginning of its owner."""
        return (key, owner) in self._brought_back or self._is_unanswered(pid, owner)

    def _bring_back(self, server: Any, model: Any) -> None:
        there = model.dataset.values.items()
        values = [(key.decode(), value) for key, value in there if isinstance(value, bytes)]
        self._brought_back |= _holds_in(values) - _holds_in(server.last_values())

    def _is_unanswered(self, pid: int, owner: str) -> bool:
        """Whether a process has given this owner up, or freed its hold, and died before the server answered that.

        Its main process frees what the last delivery has asked for last. It does not know of anything before that.
        """
        (dead,) = [process for process in self._run.processes if process.pid == pid]
        return len(self._servers) == 1 and any(
            call_owner.startswith(owner) for *_, call_owner in inside.repeated_by(dead)
        )


def _holds_in(values: Iterable[tuple[str, bytes]]) -> set[tuple[str, str]]:
    return {(key, holds.stem(value)) for key, value in values if inside.part_of(key) == "run"}
