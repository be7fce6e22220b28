"""Confirmations of sent messages, which follow a moment later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from celery_singleton_lock.confirmations import Confirmations
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Hold
from tests.patience import LIMIT


class Slow:
    """A store that answers when a test lets it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.is_asked, self.may_answer = threading.Event(), threading.Event()
        self.error: LockUnavailable | None = None

    def renew(self, holds: Sequence[Hold], **_: Any) -> list[bool]:
        self.is_asked.set()
        assert self.may_answer.wait(LIMIT)
        if self.error is not None:
            raise self.error
        self.said += [hold.owner for hold in holds]
        return [True for _ in holds]


def hold(owner: str) -> Hold:
    return Hold("key", owner, ttl=60.0)


def test_program_waits_at_its_end_for_a_confirmation_in_progress() -> None:
    store: Any = Slow()
    confirmations = Confirmations(store)
    confirmations.add(hold("a"))
    assert store.is_asked.wait(LIMIT)
    at_exit = threading.Thread(target=confirmations.write)
    at_exit.start()
    at_exit.join(0.2)
    assert at_exit.is_alive()
    store.may_answer.set()
    at_exit.join(LIMIT)
    assert store.said == ["a"]


def test_unanswered_confirmations_are_repeated_in_order() -> None:
    store: Any = Slow()
    store.may_answer.set()
    store.error = LockUnavailable("a server", "no answer")
    confirmations = Confirmations(store)
    for owner in "abc":
        confirmations._holds.append((hold(owner), float("inf")))
    assert confirmations.write() is not None
    store.error = None
    assert confirmations.write() is None
    assert store.said == ["a", "b", "c"]
