"""Selling tickets without selling one twice.

The stock is a plain file: read, think, write. With two workers at once, that is how seats are sold twice. As a
singleton task, only one sale per show happens at a time, and buyers wait for their turn.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask

app = Celery("tickets", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")

STOCK = Path(os.environ.get("TICKETS", "tickets.json"))


@app.task(base=SingletonTask, lock_key=["show"], lock_wait=60, on_conflict="raise")
def sell(show: str, buyer: str) -> int | None:
    """Return the number of the ticket that the buyer got, or None if the show is sold out."""
    return take_one(show, buyer)


@app.task
def sell_without_lock(show: str, buyer: str) -> int | None:
    """The same, for contrast."""
    return take_one(show, buyer)


def take_one(show: str, buyer: str) -> int | None:
    stock: dict[str, Any] = json.loads(STOCK.read_text())[show]
    if len(stock["sold"]) >= stock["tickets"]:
        return None
    time.sleep(0.02)  # Payment.
    stock["sold"].append(buyer)
    copy = STOCK.with_suffix(f".{os.getpid()}")
    copy.write_text(json.dumps({show: stock}))
    copy.rename(STOCK)
    return len(stock["sold"])
