"""Calls that a server has not answered, which are repeated."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import pytest
from redis.exceptions import TryAgainError

from celery_singleton_lock import clock
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.redis import lock_commands
from celery_singleton_lock.stores.redis.pending_calls import PendingCalls
from celery_singleton_lock.stores.redis.repeater import Repeater
from celery_singleton_lock.stores.redis.script import Call
from tests.patience import LIMIT


def test_signal_handler_adds_a_call_while_another_is_being_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when beat gets a second signal while the end of its lease waits for an answer."""
    both, plain = threading.Event(), clock.now
    first, second = (lock_commands.abandon(Hold("k", owner, ttl=5.0)) for owner in ("first", "second"))

    def run_each(calls: Sequence[Call]) -> list[int]:
        if len(calls) == 2:
            both.set()
        return [1] * len(calls)

    def interrupted() -> float:
        if threading.current_thread() is thread:  # Threads of other tests ask for the time, too.
            monkeypatch.setattr(clock, "now", plain)
            pending.add(("acquire", "k", "second"), second, seconds=60.0)
        return plain()

    def add() -> None:
        pending.add(("acquire", "k", "first"), first, seconds=60.0)

    pending = PendingCalls(run_each, "unit")
    thread = threading.Thread(target=add, daemon=True)
    monkeypatch.setattr(clock, "now", interrupted)
    thread.start()
    assert both.wait(LIMIT)


class TestSentNow:
    """Before the next question about their lock."""

    @pytest.fixture
    def pending(self, monkeypatch: pytest.MonkeyPatch) -> PendingCalls:
        """For two locks; nothing is repeated in the background."""
        monkeypatch.setattr(Repeater, "start", lambda self: None)
        self.sent: list[Call] = []
        self.answer: int | Exception = 1

        def run_each(calls: Sequence[Call]) -> list[int | Exception]:
            self.sent += calls
            return [self.answer] * len(calls)

        pending = PendingCalls(run_each, "unit")
        self.calls = {key: lock_commands.abandon(Hold(key, "x", ttl=5.0)) for key in ("mine", "other")}
        for key, call in self.calls.items():
            pending.add(("free", key, "x"), call, seconds=60.0)
        return pending

    def test_signal_handler_adds_a_call_while_they_are_looked_at(self, pending: PendingCalls) -> None:
        class Moment(float):
            def __lt__(_, now: float) -> bool:
                if "new" not in self.calls:
                    self.calls["new"] = lock_commands.abandon(Hold("new", "x", ttl=5.0))
                    pending.add(("free", "new", "x"), self.calls["new"], seconds=60.0)
                return False

        (id_of_mine, mine), _ = pending._calls.items()
        pending._calls[id_of_mine] = mine._replace(until=Moment())
        pending.send("mine")
        assert self.sent == [self.calls["mine"]]
        assert [key for _, key, _ in pending.ids()] == ["other", "new"]

    def test_signal_handler_gives_up_a_call_while_they_are_looked_at(self, pending: PendingCalls) -> None:
        class Moment(float):
            asked = 0

            def __lt__(self, now: float) -> bool:
                self.asked += 1
                if self.asked == 1:
                    pending.send("other")
                return True

        (id_of_mine, mine), _ = pending._calls.items()
        pending._calls[id_of_mine] = mine._replace(until=Moment())
        pending.send("mine")
        assert self.sent == [self.calls["other"]]
        assert pending.ids() == []

    def test_error_keeps_no_lease_of_its_callers_alive(self, pending: PendingCalls) -> None:
        """Not even until Python looks for cycles: the heartbeat renews what somebody refers to."""
        self.answer = TryAgainError()

        def ask(lease: Lease) -> None:
            with suppress(TryAgainError):
                pending.send("mine")

        lease = Lease("another", "x", ttl=5.0, fence=1, sent_at=clock.now())
        gone = weakref.ref(lease)
        gc.disable()
        try:
            ask(lease)
            self.answer = 1
            del lease
            assert gone() is None
        finally:
            gc.enable()
