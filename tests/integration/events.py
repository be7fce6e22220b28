"""A monitor of a cluster, like Flower and `celery events`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.integration.conftest import Shop
from tests.patience import LIMIT


@contextmanager
def watching(shop: Shop, told: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """Report each event of a shop's workers that comes meanwhile."""
    ready, done = threading.Event(), threading.Event()

    def capture() -> None:
        with shop.app.connection() as connection:
            receiver = shop.app.events.Receiver(connection, handlers={"*": told})
            with receiver.consumer_context(wakeup=False) as (own, _, _):
                ready.set()
                while not done.is_set():
                    try:
                        own.drain_events(timeout=0.5)
                    except TimeoutError:
                        continue

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert ready.wait(LIMIT)
        yield
    finally:
        done.set()
        thread.join()
