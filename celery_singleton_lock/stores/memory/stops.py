"""How a run learns at once that it is to stop, in the memory of this process."""

from __future__ import annotations

import queue
from contextlib import suppress

from celery_singleton_lock.stores.stops import Stop

#: Seconds that one call waits.
SLICE = 1.0

#: The most stops that are kept for a process that does not listen at this moment; others are dropped.
KEPT = 1000


class MemoryStops:
    """`Stops` of this process."""

    def __init__(self) -> None:
        self._told: queue.Queue[Stop] = queue.Queue(KEPT)

    def tell(self, stop: Stop) -> None:
        with suppress(queue.Full):
            self._told.put_nowait(stop)

    def wait(self) -> Stop | None:
        try:
            return self._told.get(timeout=SLICE)
        except queue.Empty:
            return None

    def close(self) -> None:
        pass
