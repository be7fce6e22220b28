"""How long tests wait for what is sure to come, however slow the machine is, and what need not wait at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from celery_singleton_lock import clock

Answer = TypeVar("Answer")

#: Seconds until a test gives up. Only a failing test takes that long.
LIMIT = 180


def until(true: Callable[[], object], what: str = "it is so", *, seconds: float = LIMIT) -> None:
    """Wait for what no event reports."""
    deadline = clock.now() + seconds
    while not true():
        assert clock.now() < deadline, f"waited {seconds:g} s in vain until {what}"
        clock.sleep(0.02)


def in_this_thread(this: Callable[..., Answer], others: Callable[..., Answer]) -> Callable[..., Answer]:
    """A function that is replaced for this thread.

    Threads left by other tests go on with the real time: without sleeping they would keep the machine busy.
    """
    thread = threading.get_ident()
    return lambda *arguments: (this if threading.get_ident() == thread else others)(*arguments)


def from_here_on(this: Callable[..., Answer], others: Callable[..., Answer]) -> Callable[..., Answer]:
    """A function that is replaced for this thread and for all threads that start later.

    A thread left by another test may call what it was given even after this test is over.
    """
    left = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return lambda *arguments: (others if threading.current_thread() in left else this)(*arguments)


def sleepless() -> Callable[[float], None]:
    """`clock.sleep` for a thread that is to try again at once."""
    return in_this_thread(lambda seconds: None, clock.sleep)
