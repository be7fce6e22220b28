"""Calls that a server has not answered, which are repeated."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.redis import lock_commands
from celery_singleton_lock.stores.redis.pending_calls import PendingCalls
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
