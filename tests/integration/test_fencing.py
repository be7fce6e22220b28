"""A worker that is stopped until its lease has ended, and then goes on to write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import StaleFence
from tests.contrib.s3 import s3_client, s3_server
from tests.integration.conftest import Shop, until
from tests.integration.test_losses import asks_for_messages
from tests.patience import LIMIT

APP = "tests.integration.fencing_app"

STORES = ("redis", "sqlalchemy", "django", "s3")


@pytest.fixture
def s3(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make the stores, which workers find through their environment; returns the URL of the object store."""
    database = shop.directory / "database"
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE report (name TEXT PRIMARY KEY, text TEXT, fence BIGINT NOT NULL DEFAULT 0)")
    connection.execute("INSERT INTO report (name, text) VALUES ('sqlalchemy', '')")
    connection.commit()
    connection.close()
    with s3_server() as url:
        monkeypatch.setenv("TEST_DATABASE", str(database))
        monkeypatch.setenv("TEST_S3", url)
        client = s3_client(url)
        client.create_bucket(Bucket="reports")
        client.close()
        yield url


def contents(shop: Shop, s3: str) -> dict[str, str]:
    """The contents of each store."""
    connection = sqlite3.connect(shop.directory / "database")
    rows = dict(connection.execute("SELECT name, text FROM report").fetchall())
    connection.close()
    with Redis.from_url(shop.events, decode_responses=True) as events:
        kept = str(events.get("report"))
    client = s3_client(s3)
    put = client.get_object(Bucket="reports", Key="report")["Body"].read().decode()
    client.close()
    return {**rows, "redis": kept, "s3": put}


def test_write_of_a_worker_that_slept_past_its_lease_is_refused(shop: Shop, s3: str) -> None:
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
    assert contents(shop, s3) == dict.fromkeys(STORES, "new")
