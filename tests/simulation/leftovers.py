"""Holds of dead processes that may last until their ttl is over, as the guarantees say."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.simulation import holds


class Leftovers:
    """Knows which holds of a dead child its main process has freed in vain."""

    def __init__(self, world: Any) -> None:
        #: Holds that had ended when a replica took the server's place that did not know it: their keys and owners.
        self._brought_back: set[tuple[str, str]] = set()
        for server in world.servers:
            if server.replica is not None:
                server.on_start.append(partial(self._bring_back, server))

    def has(self, key: str, _pid: int, owner: str) -> bool:
        """Whether this hold of a dead process may last for its ttl; `owner` is the beginning of its owner."""
        return (key, owner) in self._brought_back

    def _bring_back(self, server: Any, model: Any) -> None:
        there = model.dataset.database(0).values.items()
        values = [(key.decode(), value) for key, value in there if isinstance(value, bytes)]
        brought = {(key, holds.stem(value)) for key, value in values if ":run" in key}
        self._brought_back |= brought - {(key, holds.stem(value)) for key, value in server.last_values()}
