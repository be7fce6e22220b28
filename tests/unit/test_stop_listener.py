from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from celery_singleton_lock import LockUnavailable, stop_listener
from celery_singleton_lock.stop_listener import StopListener
from celery_singleton_lock.stores.stops import StopOrder
from tests.patience import LIMIT
from tests.servers import until


class Heard:
    """What a process hears, as the test decides: an order, nothing for now, or an error."""

    def __init__(self) -> None:
        self.says: queue.Queue[StopOrder | Exception | None] = queue.Queue()
        self.closed = threading.Event()

    def wait(self) -> StopOrder | None:
        said = self.says.get(timeout=LIMIT)
        if isinstance(said, Exception):
            raise said
        return said

    def close(self) -> None:
        self.closed.set()


class Runs:
    """Replaces a heartbeat."""

    def __init__(self) -> None:
        self.superseded: list[tuple[str, str]] = []

    def supersede(self, owner: str, by: str) -> None:
        self.superseded.append((owner, by))


@pytest.fixture(autouse=True)
def threads_of_other_tests() -> None:
    until(lambda: threads() == 0, "the threads of other tests have ended")


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def runs() -> Any:
    return Runs()


def threads() -> int:
    return sum(thread.name == "singleton-lock-stops" for thread in threading.enumerate())


def test_run_gets_its_order_and_the_thread_ends_with_the_last_run(heard: Heard, runs: Any) -> None:
    listener = StopListener(lambda: heard, runs)
    for owner in ("one", "two"):
        listener.expect(owner)
    assert threads() == 1
    heard.says.put(StopOrder("of another policy", "newer"))
    heard.says.put(StopOrder("one", "newer"))
    until(lambda: runs.superseded == [("one", "newer")], "stopped")
    listener.forget("one")
    heard.says.put(None)
    heard.says.put(StopOrder("two", "newest"))
    until(lambda: len(runs.superseded) == 2, "stopped")
    listener.forget("two")
    heard.says.put(None)
    assert heard.closed.wait(LIMIT)


def test_order_that_comes_before_its_run_is_kept(heard: Heard, runs: Any) -> None:
    """The lock server knows of the run before this process expects it."""
    listener = StopListener(lambda: heard, runs)
    listener.expect("another")
    heard.says.put(StopOrder("one", "newer"))
    heard.says.put(StopOrder("another", "newest"))
    until(lambda: runs.superseded == [("another", "newest")], "both were read")
    listener.expect("one")
    assert runs.superseded[1:] == [("one", "newer")]
    listener.forget("one")
    listener.expect("one")
    assert len(runs.superseded) == 2
    for owner in ("one", "another"):
        listener.forget(owner)
    heard.says.put(None)
    assert heard.closed.wait(LIMIT)


def test_orders_for_runs_that_never_come_are_forgotten(
    heard: Heard, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_listener, "EARLY", 2)
    listener = StopListener(lambda: heard, runs)
    listener.expect("one")
    for owner in ("oldest", "older", "latest", "one"):
        heard.says.put(StopOrder(owner, "newer"))
    until(lambda: runs.superseded, "all were read")
    for owner in ("oldest", "older", "latest"):
        listener.expect(owner)
    assert [owner for owner, _ in runs.superseded] == ["one", "older", "latest"]
    for owner in ("one", "oldest", "older", "latest"):
        listener.forget(owner)
    heard.says.put(None)
    assert heard.closed.wait(LIMIT)


def test_run_that_comes_after_the_thread_has_ended_starts_another(heard: Heard, runs: Any) -> None:
    listener = StopListener(lambda: heard, runs)
    for owner in ("one", "two"):
        listener.expect(owner)
        heard.says.put(StopOrder(owner, "newer"))
        until(lambda owner=owner: (owner, "newer") in runs.superseded, "stopped")
        listener.forget(owner)
        heard.says.put(None)
        until(lambda: threads() == 0, "the thread has ended")


def test_lock_server_that_does_not_answer_is_asked_again(
    heard: Heard, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_listener, "PAUSE", 0.001)
    listener = StopListener(lambda: heard, runs)
    listener.expect("one")
    for _ in range(3):
        heard.says.put(LockUnavailable("test"))
    heard.says.put(StopOrder("one", "newer"))
    until(lambda: runs.superseded == [("one", "newer")], "stopped")
    listener.forget("one")
    heard.says.put(None)
    assert heard.closed.wait(LIMIT)


def test_thread_ends_soon_on_a_store_without_orders(runs: Any) -> None:
    listener = StopListener(lambda: None, runs)
    listener.expect("one")
    until(lambda: threads() == 0, "the thread has ended")


def test_forked_child_starts_anew(heard: Heard, runs: Any) -> None:
    listener = StopListener(lambda: heard, runs)
    listener.expect("one")
    listener.start_anew()
    listener._later.start_anew()
    listener.expect("two")
    until(lambda: threads() == 2, "it has its own thread")
    listener.forget("two")
    for _ in range(2):
        heard.says.put(None)
    until(lambda: threads() == 0, "both have ended")
