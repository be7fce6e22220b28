"""All that tests of messages know of the inside: that an app has one store, whose methods are its questions.

Nothing is named that may be called otherwise one day: a moment is "before the third question", or "as the fortieth
function is called".
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import CO_GENERATOR
from types import FrameType, SimpleNamespace
from typing import Any, Literal

import pytest
from celery import Celery

import celery_singleton_lock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.in_bulk import Records
from celery_singleton_lock.journal import writer
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.task import queue_lock, run
from celery_singleton_lock.worker.line import line_of
from celery_singleton_lock.worker.request import aside, children_of
from tests.patience import LIMIT

#: The folder of the package, and that of the stores: no signal comes there, as far as a caller can tell.
PACKAGE = os.path.dirname(celery_singleton_lock.__file__) + os.sep
STORES = os.path.join(PACKAGE, "stores") + os.sep


#: What a store is told, and says nothing about.
NEVER_RAISES = {"abandon", "remember", "wake"}

Ask = Callable[..., Any]


@contextmanager
def _every_question(app: Celery, asked_by: Callable[[str, Ask], Ask]) -> Iterator[None]:
    store = Runtime.of(app).store
    names = [name for name in dir(type(store)) if not name.startswith("_") and callable(getattr(type(store), name))]
    assert {*names} >= NEVER_RAISES, f"a store has no {NEVER_RAISES - {*names}} any more"
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            ask = getattr(store, name)
            patch.setattr(store, name, wraps(ask)(asked_by(name, ask)))
        yield


@contextmanager
def at_question(
    app: Celery, number: int, do: Callable[[], Any], when: Literal["before", "after"] = "before"
) -> Iterator[list[str]]:
    """Do something, once, as this thread asks the lock server the question of this number; yields the questions so far.

    If `do` raises, so does the question: before it was asked, or after it was answered, whose answer is then lost.
    """
    asked, inside, own = list[str](), [False], threading.get_ident()

    def asked_by(name: str, ask: Ask) -> Ask:
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

    with _every_question(app, asked_by):
        yield asked


@contextmanager
def first_try_fails(app: Celery) -> Iterator[None]:
    """The first try of each acquire fails, as on a Redlock: the store tries again as another owner."""

    def asked_by(name: str, ask: Ask) -> Ask:
        def try_again(*args: Any, **options: Any) -> Any:
            if name == "acquire" and args[0].another is not None:
                args[0].give_up(args[0].another())
            return ask(*args, **options)

        return try_again

    with _every_question(app, asked_by):
        yield


@contextmanager
def silence(app: Celery, *, heard: int) -> Iterator[list[int]]:
    """The lock server answers nothing; it hears so many questions, and carries them out; yields their sizes so far."""
    asked, sizes = itertools.count(), list[int]()

    def asked_by(name: str, ask: Ask) -> Ask:
        def get_no_answer(*args: Any, **options: Any) -> Any:
            if name == "place_of" or not (args or options):  # It asks nothing.
                return ask(*args, **options)
            sizes.append(len(repr((args, options))))
            if next(asked) < heard:
                ask(*args, **options)
            if name not in NEVER_RAISES:
                raise LockUnavailable("the server", "silent")
            return None

        return get_no_answer

    with _every_question(app, asked_by):
        yield sizes


def do_at_call(number: int, do: Callable[[], object]) -> list[str]:
    """Do something in this thread, once, as the package's function of this number is called, counted from now on:
    there, Python has the handlers of signals called. Until `sys.settrace(None)`; returns where it was done, then.
    """
    return _do_at("call", number, do)


def raise_at_line(number: int, error: BaseException) -> list[str]:
    """Raise an error before the line of this number: Python has handlers called as a call returns, too. Not for code
    with `with`: there, no handler is called between the block's last line and its end, but a line counts.
    """
    return do_at_line(number, partial(_raise, error))


def do_at_line(number: int, do: Callable[[], object]) -> list[str]:
    """Do something there, as a handler does that raises nothing."""
    return _do_at("line", number, do)


def _raise(error: BaseException) -> None:
    raise error


def _do_at(event: str, number: int, do: Callable[[], object]) -> list[str]:
    seen, where = [0], list[str]()

    def count(frame: FrameType, happens: str, _argument: Any) -> Any:
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(STORES)
        if not is_ours or code.co_flags & CO_GENERATOR:  # Which may only be collected as garbage.
            return None
        if happens == event:
            seen[0] += 1
            if seen[0] == number:
                sys.settrace(None)
                where.append(f"{code.co_filename}:{frame.f_lineno}: {code.co_name}")
                do()
                return None
        return count if event == "line" else None

    sys.settrace(count)
    return where


def settles_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second after the end of a message, its process notes beside the record that everything was sent. It would
    depend on the speed of the machine whether a test comes before that; in the tests of messages, no process lives on
    for so long.
    """
    monkeypatch.setattr(Records, "replace", lambda *_: None)


def writes_no_journal(monkeypatch: pytest.MonkeyPatch, *, most: int) -> None:
    """Nobody writes the journal but the test: else, a thread does some seconds later. At most so many entries wait."""
    monkeypatch.setattr(writer, "WRITE_AFTER", 3600.0)
    monkeypatch.setattr(writer, "MOST", most)


def learns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that a newer message stops learns of it within some milliseconds, and not within a second."""
    monkeypatch.setattr(run, "STOPPED_WITHIN", 0.005)


def says_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of locks with another prefix is said once in a process; as if it had not been said yet."""
    monkeypatch.setattr(queue_lock, "_reported", [])


@contextmanager
def line(app: Celery, *, wakes: bool = True, since: list[float] | None = None) -> Iterator[list[str]]:
    """Messages that are put back wait in a line, which may not be able to wake them; yields for which locks they do.
    Since when goes into `since`.
    """
    keys = list[str]()

    def park(_request: Any, key: str, at: float, _limit: int) -> bool:
        keys.append(key)
        if since is not None:
            since.append(at)
        return wakes

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(line_of, app, SimpleNamespace(park=park))  # type: ignore[arg-type]
        yield keys


@contextmanager
def woken(app: Celery) -> Iterator[list[str]]:
    """For which locks the next one in line is woken although nobody frees them: somebody got a wake-up for nothing."""
    keys = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime.of(app).store, "wake", keys.append)
        yield keys


@contextmanager
def children(app: Celery) -> Iterator[None]:
    """As if the pool had processes: a message's process is gone as soon as that is asked."""
    family = SimpleNamespace(assign=lambda *_: None, forget=lambda *_: True, free_when_gone=lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(children_of, app, family)  # type: ignore[arg-type]
        yield


def finish_aside() -> None:
    """Wait until a main process has done what it does in another thread."""
    done = threading.Event()
    aside.do(done.set)
    assert done.wait(LIMIT)


def hold(task: Any, *args: Any, **kwargs: Any) -> Lease:
    """Hold the lock of a call as another task does."""
    asked = LockRequest(task.lock_key_of(*args, **kwargs), new_owner(), ttl=60, holder=Holder("other-task"))
    lease = Runtime.of(task.app).store.acquire(asked)
    assert isinstance(lease, Lease)
    return lease
