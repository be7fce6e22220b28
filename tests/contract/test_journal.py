"""What every journal promises: counts that add up, entries in their order, and refusals in a row."""

from __future__ import annotations

import pytest

from celery_singleton_lock import clock, stores
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.store import Journal, Store
from tests.redis_server import RedisServer

KEY = "contract:1:{report:1}"

#: The present, on the clock of a process that writes.
NOW = 1000.0


@pytest.fixture
def store(store_with_books: Store) -> Store:
    return store_with_books


@pytest.fixture
def journal(store: Store) -> Journal:
    return store.journal("contract", size=5000)


def run(began: float, ended: float, *, fence: int = 1, key: str = KEY, limit: int = 1) -> Entry:
    return Entry("run", "report", key, "id", "node", 7, NOW + began, NOW + ended, fence=fence, limit=limit)


def refusal(key: str = KEY) -> Entry:
    return Entry("skip", "report", key, "id", "node", 7, NOW, NOW, holder="other", holder_since=NOW - 60)


def test_counts_add_up(journal: Journal) -> None:
    assert journal.counts() == {}
    journal.write({"a": 1, "b|ünï": 2}, [], now=NOW)
    journal.write({"a": 10}, [], now=NOW)
    assert journal.counts() == {"a": 11, "b|ünï": 2}


def test_entries_come_back_as_they_were_written(journal: Journal) -> None:
    """With the server's time."""
    written = [run(-2.0, -1.0), refusal()._replace(task="ünï {}*", task_id=None, node=None), run(-1.0, 0.0)]
    before = clock.wall()
    journal.write({}, written, now=NOW)
    found = list(journal.entries(since=0.0))
    assert [entry._replace(began=0.0, ended=0.0) for entry in found] == [
        entry._replace(began=0.0, ended=0.0) for entry in written
    ]
    for entry, its in zip(found, written, strict=True):
        assert entry.ended - entry.began == pytest.approx(its.ended - its.began, abs=0.001)
        assert before - 0.01 <= entry.ended - its.ended + NOW <= clock.wall() + 0.01
    assert list(journal.entries(since=clock.wall() + 60)) == []


def test_oldest_entries_are_forgotten(store: Store) -> None:
    journal = store.journal("small", size=100)
    for number in range(30):
        journal.write({}, [run(0, 0, fence=number * 100 + index) for index in range(100)], now=NOW)
    fences = [entry.fence for entry in journal.entries(since=0.0)]
    assert 100 <= len(fences) < 500, "at least so many, and not many more"
    assert fences == list(range(3000 - len(fences), 3000))


def test_many_entries_are_read(journal: Journal) -> None:
    """More than one page."""
    for number in range(10):
        journal.write({}, [run(0, 0, fence=number * 250 + index) for index in range(250)], now=NOW)
    assert [entry.fence for entry in journal.entries(since=0.0)] == list(range(2500))


def test_refusals_are_counted_until_a_run_has_ended(journal: Journal) -> None:
    other = refusal()._replace(key="contract:1:{report:2}")
    assert [*journal.write({}, [refusal(), other, refusal()], now=NOW)] == [1, 1, 2]
    assert [*journal.write({}, [refusal()], now=NOW)] == [3]
    assert journal.refused() == {KEY: 3, other.key: 1}
    assert [*journal.write({}, [run(-1.0, 0.0), refusal()], now=NOW)] == [0, 1]
    assert journal.refused() == {KEY: 1, other.key: 1}


def test_number_of_refused_keys_is_bounded(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more of them, it starts afresh."""
    monkeypatch.setattr(stores.store, "KEYS_REMEMBERED", 3)
    for number in range(3):
        journal.write({}, [refusal(f"contract:1:{{report:{number}}}")], now=NOW)
    assert len(journal.refused()) == 3
    journal.write({}, [refusal()._replace(key="contract:1:{report:3}")], now=NOW)
    assert journal.refused() == {}


def test_entries_of_other_kinds_are_not_refusals(journal: Journal) -> None:
    kinds = ("retry", "stand-by", "drop", "repeat", "free")
    assert not any(journal.write({}, [refusal()._replace(kind=kind) for kind in kinds], now=NOW))


def test_foreign_values_are_left_out(redis_server: RedisServer) -> None:
    store = open_url(redis_server.url_of(0), {})
    journal = store.journal("contract", size=100)
    journal.write({"a": 1}, [run(-1, 0), refusal()], now=NOW)
    with redis_server.client() as client:
        (entries,) = client.scan_iter("contract:{journal}:*", _type="stream")
        hashes = [*client.scan_iter("contract:{journal}:*", _type="hash")]
        assert hashes
        kept = [client.ttl(name) for name in (entries, *hashes)]
        assert all(0 <= 30 * 86_400 - seconds < 60 for seconds in kept), kept
        for written in ({"e": "[1,2"}, {"e": '["walk"]'}, {"other": "x", "e": "{}"}):
            client.xadd(entries, written)
        for name in hashes:
            client.hset(name, mapping={"b": "many", KEY: "garbage"})
    assert len(list(journal.entries(since=0.0))) == 2
    assert journal.counts() == {"a": 1}
    assert [*journal.write({"b": 2}, [refusal()], now=NOW)] == [1]
    assert journal.counts() == {"a": 1, "b": 2}
    store.close()
    redis_server.flush()
