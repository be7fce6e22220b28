"""The copies of a worker's main process, and which one is begun when a lock is free."""

from __future__ import annotations

import gc
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from celery_singleton_lock import LockUnavailable
from celery_singleton_lock.stores.wake_ups import Freed, Place
from celery_singleton_lock.worker.line import Line
from tests.integration.conftest import until


class Request:
    """A request as the line knows it."""

    has_begun = False

    def __init__(self, name: str) -> None:
        self.name = name


class WakeUps:
    """Returns wake-ups when told to; or fails once."""

    most = 100

    def __init__(self) -> None:
        self.freed: deque[Freed] = deque()
        self.places: dict[str, Place] = {}
        self.passed: list[Freed] = []
        self.given_back: list[str] = []
        self.looked_at: list[tuple[str, int]] = []
        self.takes_back = True
        self.failures: list[Exception] = []
        self.waited = self.left = 0
        self.copies: dict[str, int] = {}
        self.place_now: Callable[[str], Place | None] = self.places.get

    def wait(
        self,
        places: Mapping[str, Place],
        interrupt: int,
        copies: Callable[[str], int],
        place_now: Callable[[str], Place | None],
    ) -> Sequence[Freed]:
        self.place_now, self.copies = place_now, {key: copies(key) for key in places}
        self.places, self.waited = dict(places), self.waited + 1  # Last: tests wait for these.
        if self.failures:
            raise self.failures.pop()
        select.select([interrupt], [], [], 0.01)
        freed, self.freed = [*self.freed], deque()
        return freed

    def pass_on(self, freed: Freed) -> bool:
        self.passed.append(freed)
        return self.takes_back

    def give_back(self, key: str) -> None:
        self.given_back.append(key)

    def wake_if_free(self, key: str, limit: int) -> None:
        self.looked_at.append((key, limit))

    def leave(self) -> None:
        self.left += 1


class Loop:
    """A consumer's loop, which another thread can wake by writing to a pipe."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}

    def add_reader(self, descriptor: int, callback: Callable[[], None]) -> None:
        self.readers[descriptor] = callback

    def turn(self) -> None:
        for callback in self.readers.values():
            callback()


class Worker:
    """A line, the timer that has the copies, and the names of those that were begun."""

    def __init__(self, *, in_loop: bool = True) -> None:
        self.wake_ups = WakeUps()
        self.timer: list[Request] = []
        self.begun: list[str] = []
        self.has_room = True
        self.begins_at_once = True
        self.began_in: set[str] = set()
        self.line = Line(self.wake_ups, self._begin, lambda: self.has_room, in_loop=in_loop)
        self.loop = Loop()
        self.line.register(self.loop)

    def park(self, name: str, since: float, key: str = "key", *, limit: int = 1, is_woken: bool = True) -> Request:
        request = Request(name)
        self.timer.append(request)
        assert self.line.park(request, key, Place(since, limit)) is is_woken
        return request

    def frees(self, key: str = "key", place: Place | None = None) -> None:
        self.wake_ups.freed.append(Freed(key, place=place))

    def begins(self, *names: str) -> None:
        def has() -> bool:
            self.loop.turn()
            return self.begun == [*names]

        until(has)

    def _begin(self, request: Request) -> bool:
        with suppress(ValueError):
            self.timer.remove(request)
            self.begun.append(request.name)
            request.has_begun = self.has_room and self.begins_at_once
            self.began_in.add(threading.current_thread().name)
            return True
        return False


@contextmanager
def started(**options: Any) -> Iterator[Worker]:
    worker = Worker(**options)
    yield worker
    worker.line.close()
    until(lambda: not any(thread.name == "singleton-lock-line" for thread in threading.enumerate()))


@pytest.fixture
def worker() -> Iterator[Worker]:
    with started() as worker:
        yield worker


def test_no_thread_runs_before_the_first_copy(worker: Worker) -> None:
    assert not any(thread.name == "singleton-lock-line" for thread in threading.enumerate())


def test_first_in_line_is_begun_first(worker: Worker) -> None:
    worker.park("second", 2.0)
    worker.park("first", 1.0)
    worker.park("third", 3.0)
    until(lambda: worker.wake_ups.places == {"key": Place(1.0, 1)})
    for begun in (["first"], ["first", "second"], ["first", "second", "third"]):
        worker.frees()
        worker.begins(*begun)


def test_copies_of_the_same_moment_keep_their_order(worker: Worker) -> None:
    """They are never compared themselves."""
    for name in "abc":
        worker.park(name, 1.0)
    for begun in ("a", "ab", "abc"):
        worker.frees()
        worker.begins(*begun)


def test_waiting_copies_are_counted(worker: Worker) -> None:
    """Those that the timer has begun, or has no more, do not count, wherever they are in the line."""
    first, due = worker.park("first", 1.0), worker.park("due", 2.0)
    worker.park("gone", 3.0)
    worker.park("last", 4.0)
    worker.park("there", 1.0, "other")
    until(lambda: worker.wake_ups.copies == {"key": 4, "other": 1})
    due.has_begun = True
    del worker.timer[2]
    until(lambda: worker.wake_ups.copies == {"key": 2, "other": 1})
    worker.frees()
    worker.begins("first")
    assert first.has_begun
    until(lambda: worker.wake_ups.copies == {"key": 1, "other": 1})
    worker.frees()
    worker.begins("first", "last")


def test_copy_begins_in_the_loop(worker: Worker) -> None:
    worker.park("one", 1.0)
    worker.frees()
    worker.begins("one")
    assert worker.began_in == {threading.current_thread().name}


def test_copy_begins_at_once_without_a_loop() -> None:
    with started(in_loop=False) as worker:
        worker.park("one", 1.0)
        worker.frees()
        until(lambda: worker.begun == ["one"])
        assert worker.began_in == {"singleton-lock-line"}


def test_each_lock_has_its_own_line(worker: Worker) -> None:
    worker.park("here", 2.0)
    worker.park("there", 1.0, "other")
    worker.frees()
    worker.begins("here")
    worker.frees("other")
    worker.begins("here", "there")


def test_copy_that_its_timer_has_begun_is_not_begun_again(worker: Worker) -> None:
    worker.park("due", 1.0)
    worker.park("next", 2.0)
    del worker.timer[0]
    worker.frees()
    worker.begins("next")


def test_place_is_that_of_the_first_copy_that_still_waits(worker: Worker) -> None:
    first, second = worker.park("first", 1.0), worker.park("second", 2.0)
    until(lambda: worker.wake_ups.places == {"key": Place(1.0, 1)})
    assert worker.wake_ups.place_now("key") == Place(1.0, 1)
    first.has_begun = True  # Its time has come.
    assert worker.wake_ups.place_now("key") == Place(2.0, 1)
    second.has_begun = True
    assert worker.wake_ups.place_now("key") is None


@pytest.mark.parametrize("has_slot", [False, True])
@pytest.mark.parametrize("is_called", [False, True])
def test_wake_up_of_a_copy_that_has_begun_by_itself_is_passed_on_to_an_older_place(
    worker: Worker, is_called: bool, has_slot: bool
) -> None:
    """Another process may have waited longer than the next copy, which nothing was compared with."""
    first = worker.park("first", 1.0)
    worker.park("next", 3.0)
    until(lambda: worker.wake_ups.waited)
    if is_called:
        worker.frees(place=Place(1.0, 1))
        until(lambda: worker.line._called)
    first.has_begun = has_slot  # Its time has come.
    worker.timer.remove(first)
    if not is_called:
        worker.frees(place=Place(1.0, 1))
    until(lambda: worker.loop.turn() or worker.wake_ups.passed)  # type: ignore[func-returns-value]
    assert worker.wake_ups.passed == [Freed("key", place=Place(1.0, 1))]
    assert worker.begun == []
    worker.frees(place=Place(3.0, 1))
    worker.begins("next")


def test_wake_up_that_cannot_be_passed_on_is_given_back(worker: Worker) -> None:
    worker.wake_ups.takes_back = False
    worker.park("one", 2.0)
    worker.frees(place=Place(1.0, 1))
    until(lambda: worker.loop.turn() or worker.wake_ups.given_back)  # type: ignore[func-returns-value]
    assert worker.wake_ups.given_back == ["key"]
    assert worker.begun == []


def test_unusable_wake_up_is_given_back(worker: Worker) -> None:
    worker.park("due", 1.0)
    due = worker.timer.pop()
    worker.frees()
    until(lambda: worker.loop.turn() or worker.wake_ups.given_back)  # type: ignore[func-returns-value]
    assert worker.wake_ups.given_back == ["key"]
    assert worker.begun == []
    assert due.name == "due"


def test_revoked_copy_gives_its_wake_up_back(worker: Worker) -> None:
    worker.park("one", 1.0)
    worker.line.give_back("key")
    until(lambda: worker.wake_ups.given_back == ["key"])


def test_revoked_copy_gives_its_wake_up_back_if_the_lock_is_free(worker: Worker) -> None:
    worker.park("one", 1.0)
    worker.line.give_back_if_free("key", 2)
    until(lambda: worker.wake_ups.looked_at == [("key", 2)])
    assert worker.wake_ups.given_back == []


def test_line_without_copies_is_left(worker: Worker) -> None:
    """After the loss of the broker: the timer was cleared, and nothing else has the copies."""
    worker.park("one", 1.0)
    until(lambda: worker.wake_ups.waited)
    left = worker.wake_ups.left
    worker.timer.clear()
    gc.collect()
    until(lambda: worker.wake_ups.left > left)
    worker.park("new", 2.0, "other")
    until(lambda: worker.wake_ups.places == {"other": Place(2.0, 1)})


def test_running_copy_does_not_wait_any_more(worker: Worker) -> None:
    one = worker.park("one", 1.0)
    until(lambda: worker.wake_ups.waited)
    left = worker.wake_ups.left
    one.has_begun = True
    until(lambda: worker.wake_ups.left > left)


def test_copies_of_a_lost_connection_keep_nobody_waiting(worker: Worker) -> None:
    """One was called and dropped before it had a slot; Celery's timer and reference cycles keep both for a while."""
    worker.begins_at_once = False
    lost = [worker.park("called", 1.0), worker.park("behind", 2.0)]
    worker.frees()
    worker.begins("called")
    worker.timer.clear()
    worker.line.register(worker.loop)
    again = worker.park("called again", 1.0)
    until(lambda: worker.wake_ups.places == {"key": Place(1.0, 1)})
    worker.frees()
    worker.begins("called", "called again")
    assert again not in lost


def woken_of_two(worker: Worker) -> Request:
    """The first of two copies, which was woken and has no slot yet."""
    worker.begins_at_once = False
    one = worker.park("one", 1.0)
    worker.park("two", 2.0)
    worker.frees()
    worker.begins("one")
    return one


def left_to_one(worker: Worker) -> Request:
    """The same, and another wake-up was left to it."""
    one, asked = woken_of_two(worker), worker.wake_ups.waited
    worker.frees()
    until(lambda: worker.wake_ups.waited > asked + 2)
    return one


def test_lock_whose_wake_up_was_left_to_a_copy_is_looked_at_again_once_that_has_a_slot(worker: Worker) -> None:
    """It may already have run, and its end may have woken this process, before the pool reports its start."""
    one, asked = woken_of_two(worker), worker.wake_ups.waited
    worker.line.has_begun("key", wakes=False)
    worker.frees()
    until(lambda: worker.wake_ups.waited > asked + 2)
    assert worker.wake_ups.looked_at == []
    one.has_begun = True
    worker.line.has_begun("key", wakes=False)
    until(lambda: worker.wake_ups.looked_at == [("key", 1)])
    worker.line.has_begun("key", wakes=False)
    asked = worker.wake_ups.waited
    until(lambda: worker.wake_ups.waited > asked + 2)
    assert worker.wake_ups.looked_at == [("key", 1)]


def test_wake_up_that_was_left_to_a_copy_that_wakes_others_is_given_back_once_that_has_a_slot(worker: Worker) -> None:
    """It may be from that copy, which has taken the lock, and is for others that do not need it."""
    one = left_to_one(worker)
    assert worker.wake_ups.given_back == []
    one.has_begun = True
    worker.line.has_begun("key", wakes=True)
    until(lambda: worker.wake_ups.given_back == ["key"])
    worker.line.has_begun("key", wakes=True)
    asked = worker.wake_ups.waited
    until(lambda: worker.wake_ups.waited > asked + 2)
    assert worker.wake_ups.given_back == ["key"]
    assert worker.wake_ups.looked_at == []


def test_busy_worker_passes_wake_ups_on_while_others_may_have_room(worker: Worker) -> None:
    worker.has_room = False
    worker.park("one", 1.0)
    worker.frees()
    until(lambda: worker.wake_ups.passed == [Freed("key")])
    assert worker.begun == []
    worker.wake_ups.takes_back = False
    worker.frees()
    worker.begins("one")


def test_several_copies_are_called_for_a_semaphore(worker: Worker) -> None:
    """Otherwise only one: the lock may seem free because the last copy is about to take it."""
    one = left_to_one(worker)
    worker.begins("one")
    one.has_begun = True
    worker.frees()
    worker.begins("one", "two")
    for name in "ab":
        worker.park(name, 1.0, "shared", limit=2)
    worker.frees("shared")
    worker.frees("shared")
    worker.begins("one", "two", "a", "b")


def test_busy_worker_lets_one_copy_wait_for_a_slot(worker: Worker) -> None:
    worker.has_room = worker.wake_ups.takes_back = False
    one = worker.park("one", 1.0)
    worker.park("two", 2.0)
    worker.frees()
    worker.begins("one")
    worker.frees()
    until(lambda: len(worker.wake_ups.passed) == 2)
    one.has_begun = True
    worker.frees()
    worker.begins("one", "two")


def test_nobody_is_woken_while_the_lock_server_is_silent(worker: Worker) -> None:
    worker.wake_ups.failures += [LockUnavailable("server", "cut")] * 50
    worker.park("one", 1.0)
    until(lambda: worker.wake_ups.waited)
    worker.park("two", 1.0, is_woken=False)
    worker.wake_ups.failures.clear()
    worker.line.give_back("key")
    until(lambda: worker.wake_ups.waited > 2)
    until(lambda: not worker.line._failures)
    worker.park("three", 1.0)


@pytest.mark.parametrize("error", [LockUnavailable("server", "cut"), RuntimeError("an internal fault")])
def test_line_goes_on_after_an_error(worker: Worker, error: Exception) -> None:
    worker.wake_ups.failures.append(error)
    worker.park("one", 1.0)
    until(lambda: worker.wake_ups.waited > 1)
    worker.frees()
    worker.begins("one")


def test_stopping_worker_begins_nothing(worker: Worker) -> None:
    worker.park("one", 1.0)
    until(lambda: worker.wake_ups.waited)
    left = worker.wake_ups.left
    worker.line.close()
    worker.line.join()
    assert worker.wake_ups.left > left
    worker.park("two", 2.0, is_woken=False)
    worker.frees()
    worker.loop.turn()
    assert worker.begun == []


def test_stopping_worker_gives_back_wake_ups_that_its_loop_has_not_used(worker: Worker) -> None:
    worker.park("one", 1.0)
    worker.frees()
    until(lambda: worker.line._called)
    worker.line.give_back("other")
    worker.line.give_back_if_free("another", 1)
    worker.line.close()
    until(lambda: sorted(worker.wake_ups.given_back) == ["key", "other"])
    until(lambda: worker.wake_ups.looked_at == [("another", 1)])
    worker.loop.turn()
    assert worker.begun == []


def test_copies_wait_for_their_own_time_if_no_thread_can_start(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        worker.park("one", 1.0, is_woken=False)
    worker.park("two", 2.0)
    worker.frees()
    worker.begins("one")


def test_locks_beyond_the_bound_are_left_to_their_delay(worker: Worker) -> None:
    worker.wake_ups.most = 2
    for key in ("one", "two", "three"):
        worker.park(key, 1.0, key, is_woken=key != "three")
    until(lambda: worker.wake_ups.places.keys() == {"one", "two"})
    worker.frees("one")
    worker.begins("one")
    until(lambda: worker.wake_ups.places.keys() == {"two", "three"})
