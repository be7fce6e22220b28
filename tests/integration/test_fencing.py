"""A worker that is stopped until its lease has ended, and then goes on to write."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import StaleFence
from tests.integration.conftest import Shop, until
from tests.integration.test_losses import asks_for_messages
from tests.patience import LIMIT

APP = "tests.integration.fencing_app"

STORES = ("redis", "sqlalchemy", "django")


@pytest.fixture
def stores(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stores, which workers find through their environment."""
    database = shop.directory / "database"
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE report (name TEXT PRIMARY KEY, text TEXT, fence BIGINT NOT NULL DEFAULT 0)")
    connection.execute("INSERT INTO report (name, text) VALUES ('sqlalchemy', '')")
    connection.commit()
    connection.close()
    monkeypatch.setenv("TEST_DATABASE", str(database))


def contents(shop: Shop) -> dict[str, str]:
    """The contents of each store."""
    connection = sqlite3.connect(shop.directory / "database")
    rows = dict(connection.execute("SELECT name, text FROM report").fetchall())
    connection.close()
    with Redis.from_url(shop.events, decode_responses=True) as events:
        kept = str(events.get("report"))
    return {**rows, "redis": kept}


@pytest.mark.usefixtures("stores")
def test_write_of_a_worker_that_slept_past_its_lease_is_refused(shop: Shop) -> None:
    gate = shop.directory / "gate"

    def send(*args: str) -> Any:
        return shop.app.send_task(f"{APP}.write", args)

    (stale_worker,) = shop.start("one", concurrency=len(STORES), app=APP)
    stale = {store: send(store, "stale", str(gate)) for store in STORES}
    first = shop.record.wait_for(starts=len(STORES))
    stale_worker.pause()
    until(lambda: not asks_for_messages(shop))
    shop.start("two", concurrency=len(STORES), app=APP)
    for result in [send(store, "new") for store in STORES]:
        assert result.get(timeout=LIMIT) == "new"
    stale_worker.resume()
    gate.touch()
    fences = {run.job: run.fence for run in first}
    for store, result in stale.items():
        refused = result.get(timeout=LIMIT, propagate=False)
        assert isinstance(refused, StaleFence), store
        assert refused.fence == fences[store] < refused.seen
    assert contents(shop) == dict.fromkeys(STORES, "new")
