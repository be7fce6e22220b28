"""How a run in the memory of this process hears at once that it is to stop."""

from __future__ import annotations

import queue

from celery_singleton_lock.stores.stops import Stop

#: Seconds that one call waits.
SLICE = 1.0


class MemoryStops:
    """`Stops` of this process."""

    def __init__(self) -> None:
        self._told: queue.Queue[Stop] = queue.Queue()

    def tell(self, stop: Stop) -> None:
        self._told.put(stop)

    def wait(self) -> Stop | None:
        try:
            return self._told.get(timeout=SLICE)
        except queue.Empty:
            return None

    def close(self) -> None:
        pass
