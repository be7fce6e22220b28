"""A thread that repeats unanswered calls, and ends when none is left."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.stores.redis.repeater import Repeater
from tests.patience import LIMIT


def test_work_that_comes_just_as_nothing_is_left_is_done() -> None:
    again, asked = threading.Event(), threading.Event()

    def settle() -> bool:
        if asked.is_set():
            again.set()
        else:
            asked.set()
            repeater.start()
        return False

    repeater = Repeater(settle)
    repeater.start()
    assert again.wait(LIMIT)


def test_no_thread_is_started_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are collected then may have pending calls; the start of a thread would never return."""
    repeater = Repeater(lambda: False)
    monkeypatch.setattr("sys.is_finalizing", lambda: True)
    repeater.start()
    assert repeater._thread is None
