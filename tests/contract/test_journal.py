"""What every journal promises: counts that add up, entries in their order, refusals in a row, and runs that overlap."""

from __future__ import annotations

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.journal import MAX_LABELS, Journal
from celery_singleton_lock.stores.store import Store
from tests.redis_server import RedisServer

KEY = "contract:1:{report:1}"

#: The same for both runs of a pair.
NOW = clock.wall()


@pytest.fixture
def journal(store: Store) -> Journal:
    return store.journal("contract", size=5000)


def run(began: float, ended: float, *, fence: int = 1, key: str = KEY, limit: int = 1) -> Entry:
    return Entry("run", "report", key, "id", "node", 7, NOW + began, NOW + ended, fence=fence, limit=limit)


def refusal(key: str = KEY) -> Entry:
    return Entry("skip", "report", key, "id", "node", 7, NOW, NOW, holder="other", holder_since=NOW - 60)


def test_counts_add_up(journal: Journal) -> None:
    assert journal.counts() == {}
    journal.write({"a": 1, "b|ünï": 2}, [], slack=0.0)
    journal.write({"a": 10}, [], slack=0.0)
    assert journal.counts() == {"a": 11, "b|ünï": 2}


def test_only_the_latest_labels_that_messages_choose_are_kept(journal: Journal) -> None:
    """The others are added up under a common label, so that no count is lost."""
    names = [f"label {number}" for number in range(MAX_LABELS + 50)]
    journal.write({"a": 7}, [], slack=0.0)
    for start in range(0, len(names), 100):
        part = names[start : start + 100]
        journal.write(dict.fromkeys(part, 2), [], slack=0.0, coarse=dict.fromkeys(part, "other"))
    journal.write({names[-1]: 1}, [], slack=0.0, coarse={names[-1]: "other"})
    counts = journal.counts()
    assert len(counts) == MAX_LABELS + 2
    assert counts["a"] == 7
    assert counts["other"] == 100
    assert counts[names[-1]] == 3
    assert sum(counts.values()) == 7 + 2 * len(names) + 1
    journal.write({names[0]: 1}, [], slack=0.0, coarse={names[0]: "other"})
    assert journal.counts()[names[0]] == 1, "it starts from zero"


def test_write_returns_the_servers_time(journal: Journal) -> None:
    before = clock.wall()
    now = journal.write({}, [], slack=0.0).now
    assert before - 0.01 <= now <= clock.wall() + 0.01


def test_entries_come_back_as_they_were_written(journal: Journal) -> None:
    written = [run(-2.0, -1.0), refusal()._replace(task="ünï {}*", task_id=None, node=None), run(-1.0, 0.0)]
    journal.write({}, written, slack=0.0)
    assert list(journal.entries(since=0.0)) == written
    assert list(journal.entries(since=clock.wall() + 60)) == []


def test_oldest_entries_are_forgotten(store: Store) -> None:
    journal = store.journal("small", size=100)
    for number in range(30):
        journal.write({}, [run(0, 0, fence=number * 100 + index) for index in range(100)], slack=0.0)
    fences = [entry.fence for entry in journal.entries(since=0.0)]
    assert 100 <= len(fences) < 500, "at least so many, and not many more"
    assert fences == list(range(3000 - len(fences), 3000))


def test_many_entries_are_read(journal: Journal) -> None:
    """More than one page."""
    for number in range(10):
        journal.write({}, [run(0, 0, fence=number * 250 + index) for index in range(250)], slack=0.0)
    assert [entry.fence for entry in journal.entries(since=0.0)] == list(range(2500))


def test_refusals_are_counted_until_a_run_has_ended(journal: Journal) -> None:
    other = refusal()._replace(key="contract:1:{report:2}")
    assert [*journal.write({}, [refusal(), other, refusal()], slack=0.0).in_a_row] == [1, 1, 2]
    assert [*journal.write({}, [refusal()], slack=0.0).in_a_row] == [3]
    assert journal.refused() == {KEY: 3, other.key: 1}
    assert [*journal.write({}, [run(-1.0, 0.0), refusal()], slack=0.0).in_a_row] == [0, 1]
    assert journal.refused() == {KEY: 1, other.key: 1}


def test_entries_of_other_kinds_are_not_refusals(journal: Journal) -> None:
    kinds = ("retry", "stand-by", "drop", "repeat", "free")
    assert not any(journal.write({}, [refusal()._replace(kind=kind) for kind in kinds], slack=0.0).in_a_row)


class TestOverlaps:
    def test_overlapping_runs_are_found(self, journal: Journal) -> None:
        first = run(-10.0, -5.0, fence=1)
        assert journal.write({}, [first], slack=0.01).overlaps[0] is None
        assert journal.write({}, [run(-5.1, -1.0, fence=2)], slack=0.01).overlaps[0] == first

    def test_longer_run_that_ends_last_overlaps_the_latest(self, journal: Journal) -> None:
        short = run(-4.0, -3.0, fence=2)
        assert [*journal.write({}, [short, run(-10.0, -1.0, fence=1)], slack=0.01).overlaps] == [None, short]

    def test_consecutive_runs_do_not_overlap(self, journal: Journal) -> None:
        runs = [run(number - 10.0, number - 9.0, fence=number) for number in range(5)]
        assert not any(journal.write({}, runs, slack=0.01).overlaps)

    def test_clocks_that_may_be_wrong_prove_nothing(self, journal: Journal) -> None:
        journal.write({}, [run(-10.0, -5.0, fence=1)], slack=0.2)
        assert journal.write({}, [run(-5.25, -1.0, fence=2)], slack=0.1).overlaps[0] is None

    def test_entry_that_is_written_again_does_not_overlap_itself(self, journal: Journal) -> None:
        """The reply to the first write was lost."""
        entry = run(-10.0, -5.0)
        assert not any(journal.write({}, [entry, entry], slack=0.0).overlaps)

    def test_runs_of_other_keys_and_semaphores_may_overlap(self, journal: Journal) -> None:
        runs = [run(-10.0, -5.0, fence=number, key=f"contract:1:{{report:{number}}}") for number in range(3)]
        runs += [run(-10.0, -5.0, fence=number, limit=3) for number in range(3)]
        assert not any(journal.write({}, runs, slack=0.0).overlaps)


def test_foreign_values_are_left_out(redis_server: RedisServer) -> None:
    store = open_url(redis_server.url_of(0), {})
    journal = store.journal("contract", size=100)
    journal.write({"a": 1}, [run(-1, 0)], slack=0.0)
    with redis_server.client() as client:
        (entries,) = client.scan_iter("contract:{journal}:*", _type="stream")
        hashes = [*client.scan_iter("contract:{journal}:*", _type="hash")]
        assert hashes
        for written in ({"e": "[1,2"}, {"e": '["walk"]'}, {"other": "x", "e": "{}"}):
            client.xadd(entries, written)
        for name in hashes:
            client.hset(name, mapping={"b": "many", KEY: "garbage"})
    assert len(list(journal.entries(since=0.0))) == 1
    assert journal.counts() == {"a": 1}
    assert journal.write({}, [run(-1, 0)], slack=0.0).overlaps == [None]
    store.close()
    redis_server.flush()
