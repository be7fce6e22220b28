from __future__ import annotations

from collections.abc import Sequence

import pytest

from celery_singleton_lock.batches import Batches
from celery_singleton_lock.errors import LockUnavailable


class Letters(Batches[str]):
    """For the servers that their first letters name; nothing is sent but by a test."""

    def __init__(self, *silent: str) -> None:
        super().__init__("letters", after=1000.0)
        self.silent = silent
        self.sent: list[str] = []

    def send(self, items: Sequence[str]) -> Sequence[bool]:
        self.sent += items
        if items[0][0] in self.silent:
            raise LockUnavailable(items[0][0], "it is silent")
        return [True] * len(items)

    def place_of(self, item: str) -> str:
        return item[0]

    def add(self, *items: str) -> None:
        for item in items:
            self.put(item, item, 1000.0)


def test_servers_that_were_silent_come_last() -> None:
    letters = Letters("a", "b")
    letters.add("a1", "b1")
    assert letters.send_all() is not None
    letters.add("c1")
    letters.send_all()
    assert letters.sent[2] == "c1"


def test_process_that_ends_does_not_wait_for_one_silent_server_after_the_other() -> None:
    letters = Letters("c", "d")
    letters.add("a1", "b1", "c1", "d1")
    assert letters.send_all(until=0.0) is not None
    assert letters.sent == ["a1", "b1", "c1"]


def test_what_comes_meanwhile_for_others_is_sent_before_the_next_silent_server() -> None:
    class Busy(Letters):
        def send(self, items: Sequence[str]) -> Sequence[bool]:
            if not self.sent:
                self.add("c1")
            return super().send(items)

    letters = Busy("a", "b")
    letters.add("a1", "b1")
    letters.send_all()
    letters.sent.clear()
    letters.send_all()
    assert letters.sent[1] == "c1"


def test_batch_that_failed_goes_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_singleton_lock.batches.BATCH", 1)
    letters = Letters("a")
    letters.add("a1", "a2", "a3")
    for _ in range(3):
        letters.send_all()
    assert letters.sent == ["a1", "a2", "a3"]


def test_what_is_given_up_is_counted_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("celery_singleton_lock.batches.MOST", 2)
    letters = Letters("a")
    letters.add("a1", "a2", "a3", "a4", "a5")
    letters.send_all()
    assert letters.sent == ["a4", "a5"]
    assert [it.getMessage() for it in caplog.records] == ["3 letters were never answered, and are given up"]


def test_what_replaces_an_item_under_way_is_sent() -> None:
    class Replacing(Letters):
        def send(self, items: Sequence[str]) -> Sequence[bool]:
            if items == ["a1"]:
                self.put("a1", "a2", 1000.0)
            return super().send(items)

    letters = Replacing()
    letters.add("a1")
    assert letters.send_all() is None
    assert letters.sent == ["a1", "a2"]


def test_item_that_makes_trouble_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does it fill the log."""

    class Broken(Letters):
        def send(self, items: Sequence[str]) -> Sequence[bool]:
            if "a2" in items:
                raise ZeroDivisionError
            return super().send(items)

    letters = Broken()
    letters.add("a1", "a2", "a3", "b1")
    for _ in range(3):
        assert letters.send_all() is not None
    assert letters.sent == ["a1", "a3", "b1"]
    assert [it.levelname for it in caplog.records] == ["ERROR"]
