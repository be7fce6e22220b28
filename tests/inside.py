"""All that tests of messages know of the inside: that an app has one store, whose methods are its questions.

Nothing is named that a store may call otherwise one day: a moment is "before the third question", whatever it asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

import pytest
from celery import Celery

from celery_singleton_lock.runtime import Runtime


@contextmanager
def at_question(
    app: Celery, number: int, do: Callable[[], Any], when: Literal["before", "after"] = "before"
) -> Iterator[list[str]]:
    """Do something, once, as this thread asks the lock server the question of this number; yields the questions so far.

    If `do` raises, so does the question: before it was asked, or after it was answered, whose answer is then lost.
    """
    store, asked, inside, own = Runtime.of(app).store, list[str](), [False], threading.get_ident()
    names = [name for name in dir(type(store)) if not name.startswith("_") and callable(getattr(type(store), name))]
    assert names, "a store that is asked nothing"

    def asks(name: str) -> Callable[..., Any]:
        ask = getattr(store, name)

        @wraps(ask)
        def ask_and_do(*args: Any, **options: Any) -> Any:
            if inside[0] or threading.get_ident() != own:
                return ask(*args, **options)
            asked.append(name)
            is_now = len(asked) == number
            if is_now and when == "before":
                act()
            answer = ask(*args, **options)
            if is_now and when == "after":
                act()
            return answer

        return ask_and_do

    def act() -> None:
        inside[0] = True
        try:
            do()
        finally:
            inside[0] = False

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(store, name, asks(name))
        yield asked
