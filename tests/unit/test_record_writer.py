"""That all was sent of a message is recorded late, if the lock server was silent meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.record_writer import RecordWriter
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.memory import MemoryStore

SETTLED = Record("m", b"settled", 3600.0)


class Store(MemoryStore):
    """Is silent at first."""

    def __init__(self) -> None:
        super().__init__()
        self.is_silent = True
        self.replaced: list[tuple[str, Record]] = []

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        if self.is_silent:
            raise LockUnavailable("test", "told to be silent")
        self.replaced.extend(records)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def writer(store: Store, monkeypatch: pytest.MonkeyPatch) -> RecordWriter:
    """Has a record that could not be written."""
    writer = RecordWriter(store)
    monkeypatch.setattr(writer._later, "want", lambda: None)
    writer.replace("k", SETTLED)
    assert writer.write() is not None
    store.is_silent = False
    return writer


def wait(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + seconds)


def test_late_record_expires_when_it_would_have_expired(
    store: Store, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the message would seem to have ended only now, and its result to be that of an earlier task."""
    wait(600.0, monkeypatch)
    assert writer.write() is None
    ((key, record),) = store.replaced
    assert (key, record.content) == ("k", b"settled")
    assert 2990 < record.seconds <= 3000


def test_record_that_is_over_by_now_replaces_no_other(
    store: Store, writer: RecordWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same message may have been sent again, and carried out, since then: its callbacks may be on their way."""
    wait(3600.0, monkeypatch)
    assert writer.write() is None
    assert store.replaced == []
