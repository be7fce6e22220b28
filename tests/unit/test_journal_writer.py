"""What a process writes to the journal: everything once, with the server's time, and without blocking anybody."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from celery_singleton_lock import clock, signals
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal import writer
from celery_singleton_lock.journal.writer import MOST, JournalWriter
from celery_singleton_lock.journal_entry import CRASHED, LOST, Entry
from celery_singleton_lock.stores.memory import MemoryStore
from tests.servers import until

KEY = "p:1:{report:1}"


def run(
    began: float, ended: float, *, waited: float = 0.0, outcome: str = "SUCCESS", fence: int = 1, renewals: int = 0
) -> Entry:
    return Entry("run", "report", KEY, "id", "node", 7, began, ended, waited, outcome, fence, renewals)


def refusal() -> Entry:
    now = clock.now()
    return Entry("skip", "report", KEY, "id", "node", 7, now, now, holder="other", holder_node="there")


class Book:
    """A journal in memory that can be unreachable."""

    def __init__(self) -> None:
        self.inner = MemoryStore().journal("p", size=10_000)
        self.fails = False

    def write(self, counts: Mapping[str, int], entries: Sequence[Entry], *, now: float) -> Sequence[int]:
        if self.fails:
            raise LockUnavailable("book", "closed")
        return self.inner.write(counts, entries, now=now)

    def entries(self) -> list[Entry]:
        return list(self.inner.entries(since=0.0))

    def counts(self) -> dict[metrics.Count, int]:
        return metrics.read(self.inner.counts())


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    monkeypatch.setattr(writer, "WRITE_AFTER", 3600.0)  # Only the tests write here.
    return Book()


@pytest.fixture
def journal_writer(book: Book) -> JournalWriter:
    app = SimpleNamespace(tasks={"report": "the task"})
    return JournalWriter(book, lambda: app, 3)  # type: ignore[arg-type]


def test_entries_are_written_once(book: Book, journal_writer: JournalWriter) -> None:
    now = clock.now()
    journal_writer.add(run(now - 2.0, now - 1.0))
    assert journal_writer.write()
    assert journal_writer.write()
    (entry,) = book.entries()
    assert entry.ended - entry.began == pytest.approx(1.0)
    assert entry.ended == pytest.approx(clock.wall() - 1.0, abs=0.5)


def test_each_kind_of_entry_is_counted(book: Book, journal_writer: JournalWriter) -> None:
    now = clock.now()
    journal_writer.add(run(now - 2.0, now, waited=0.3, renewals=4))
    journal_writer.add(run(now - 700.0, now, outcome=LOST))
    for kind in ("skip", "skip", "raise", "retry", "stand-by", "repeat", "free"):
        journal_writer.add(refusal()._replace(kind=kind))
    journal_writer.add(refusal()._replace(scheduled="every night"))
    journal_writer.write()
    counts = book.counts()
    assert counts["runs", "report", "SUCCESS"] == counts["runs", "report", LOST] == 1
    assert counts["conflicts", "report", "skip"] == 3
    assert counts["refused_ticks", "report", ""] == 1
    assert counts["conflicts", "report", "raise"] == counts["conflicts", "report", "retry"] == 1
    assert counts["redeliveries", "report", "stand-by"] == counts["redeliveries", "report", "repeat"] == 1
    assert counts["takeovers", "report", ""] == counts["losses", "report", ""] == 1
    assert counts["renewals", "report", ""] == 4
    assert metrics.runs("report", counts) == 2
    assert metrics.seconds("held", "report", counts) == pytest.approx(702.0, abs=0.01)
    assert metrics.seconds("waited", "report", counts) == pytest.approx(0.3, abs=0.01)


def test_crash_is_counted_as_a_run_and_as_a_takeover(book: Book, journal_writer: JournalWriter) -> None:
    now = clock.now()
    journal_writer.add(run(now - 30.0, now, outcome=CRASHED)._replace(kind="free"))
    journal_writer.write()
    counts = book.counts()
    assert counts["runs", "report", CRASHED] == counts["takeovers", "report", ""] == 1
    assert metrics.seconds("held", "report", counts) == pytest.approx(30.0, abs=0.01)


def test_failed_write_is_repeated_later(book: Book, journal_writer: JournalWriter) -> None:
    now = clock.now()
    journal_writer.add(run(now - 3, now - 2, fence=1))
    book.fails = True
    assert not journal_writer.write()
    journal_writer.add(run(now - 1, now, fence=2))
    assert not journal_writer.write()
    book.fails = False
    assert journal_writer.write()
    assert [entry.fence for entry in book.entries()] == [1, 2]
    assert book.counts()["runs", "report", "SUCCESS"] == 2


def test_many_entries_are_all_counted_and_the_latest_are_kept(book: Book, journal_writer: JournalWriter) -> None:
    now = clock.now()
    for fence in range(MOST + 250):
        journal_writer.add(run(now, now, fence=fence))
    journal_writer.write()
    assert [entry.fence for entry in book.entries()] == list(range(250, MOST + 250))
    assert book.counts()["runs", "report", "SUCCESS"] == MOST + 250


def test_concurrent_threads_lose_nothing(book: Book, journal_writer: JournalWriter) -> None:
    def work() -> None:
        for _ in range(500):
            journal_writer.add(refusal())
            if threading.get_ident() % 3 == 0:
                journal_writer.write()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal_writer.write()
    assert book.counts()["conflicts", "report", "skip"] == 4000


def test_own_thread_writes(book: Book, journal_writer: JournalWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when there is nothing to write."""
    monkeypatch.setattr(journal_writer._later, "_after", 0.01)
    for number in (1, 2):
        journal_writer.add(refusal())
        until(lambda: journal_writer._later._thread is None, "the thread has ended")
        assert book.counts()["conflicts", "report", "skip"] == number


def test_forked_child_reports_only_its_own_entries(book: Book, journal_writer: JournalWriter) -> None:
    journal_writer.add(refusal())
    pid = os.fork()
    if pid == 0:
        journal_writer.add(refusal())
        journal_writer.write()
        os._exit(book.counts().get(("conflicts", "report", "skip"), 0))  # type: ignore[call-overload]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_no_server_is_asked_if_there_is_nothing_to_write(book: Book, journal_writer: JournalWriter) -> None:
    book.fails = True
    assert journal_writer.write()


def test_nothing_is_kept_without_a_journal() -> None:
    journal_writer = JournalWriter(None, lambda: None, 3)  # type: ignore[arg-type]
    journal_writer.add(refusal())
    assert journal_writer.write()
    assert not journal_writer._counts


class TestWarnings:
    @pytest.fixture
    def blocked(self) -> Iterator[list[dict[str, Any]]]:
        yield from heard(signals.lock_blocked)

    def test_repeated_refusals_are_reported(
        self, book: Book, journal_writer: JournalWriter, blocked: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
    ) -> None:
        """After three, six and twelve of them, not each time."""
        since = clock.wall() - 3 * 3600
        with caplog.at_level(logging.WARNING):
            for _ in range(14):
                journal_writer.add(refusal()._replace(holder_since=since, label="tenant=7"))
                journal_writer.write()
        assert [it["in_a_row"] for it in blocked] == [3, 6, 12]
        assert blocked[0]["sender"] == "the task"
        assert (blocked[0]["key"], blocked[0]["holder"], blocked[0]["node"]) == (KEY, "other", "there")
        assert blocked[0]["held"] == pytest.approx(3 * 3600, abs=5)
        assert f"task report was refused 3 times in a row: {KEY} (tenant=7) has been held by" in caplog.text
        assert "held by task other on there for 1080" in caplog.text
        journal_writer.write()
        assert book.counts()["blocked", "report", ""] == 3

    def test_foreign_value_has_no_holder_and_no_age(
        self, journal_writer: JournalWriter, blocked: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
    ) -> None:
        for _ in range(3):
            journal_writer.add(refusal()._replace(holder=None, holder_node=None, holder_since=0.0))
        journal_writer.write()
        assert [(it["holder"], it["node"], it["held"]) for it in blocked] == [(None, None, None)]
        assert f"{KEY} is held by something that this package did not write" in caplog.text

    def test_run_in_between_resets_the_count(
        self, journal_writer: JournalWriter, blocked: list[dict[str, Any]]
    ) -> None:
        for _ in range(3):
            journal_writer.add(refusal())
            journal_writer.add(refusal())
            journal_writer.add(run(clock.now(), clock.now()))
        journal_writer.write()
        assert blocked == []

    def test_zero_disables_the_warning(self, book: Book, blocked: list[dict[str, Any]]) -> None:
        journal_writer = JournalWriter(book, lambda: None, 0)  # type: ignore[arg-type]
        for _ in range(20):
            journal_writer.add(refusal())
        journal_writer.write()
        assert blocked == []


def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    got: list[dict[str, Any]] = []

    def receive(**details: Any) -> None:
        got.append(details)

    signal.connect(receive)
    yield got
    signal.disconnect(receive)


def test_foreign_counts_are_left_out() -> None:
    assert metrics.read({"x": 1, '["a"]': 2, '["a", "b", 3]': 4, '["runs", "t", "SUCCESS"]': 5}) == {
        metrics.Count("runs", "t", "SUCCESS"): 5
    }
