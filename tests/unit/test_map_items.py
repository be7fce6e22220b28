"""`map`, `starmap` and `chunks` of an exclusive task: each call is exclusive."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task

from celery_singleton_lock import (
    LockConflict,
    LockUnavailable,
    SingletonTask,
    clock,
)
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task import requeue
from tests.inside import hold
from tests.patience import LIMIT, in_this_thread, sleepless

_numbers = itertools.count()


@pytest.fixture(params=[SingletonTask, None], ids=["everywhere", "for one task"])
def app(request: pytest.FixtureRequest) -> Celery:
    """With "everywhere", Celery's own tasks have our class as well."""
    options = {"task_cls": request.param} if request.param else {}
    made = Celery(f"i{next(_numbers)}", set_as_current=False, broker="memory://", backend="cache+memory://", **options)
    made.conf.singleton_lock_prefix = made.main
    return made


def make(app: Celery, seen: list[Any] | None = None, function: Callable[..., Any] | None = None, **options: Any) -> Any:
    @app.task(base=SingletonTask, bind=True, shared=False, **options)
    def job(self: Any, x: int, y: int = 0) -> Any:
        if seen is not None:
            seen.append((x, y, self.lock.held, self.lock.key == self.lock_key_of(x, y)))
        return x + y if function is None else function(x)

    return job


def held(app: Celery) -> list[str]:
    return [key for key, _ in Runtime.of(app).store.all_held(app.main)]


def test_each_item_is_called_under_its_own_lock(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    assert task.map([1, 2, 1]).apply().get() == [1, 2, 1]
    assert task.starmap([(1, 2), (3, 4)]).apply().get() == [3, 7]
    assert [it[:2] for it in seen] == [(1, 0), (2, 0), (1, 0), (1, 2), (3, 4)]
    assert all(it[2:] == (True, True) for it in seen)
    assert held(app) == []


def test_chunks_are_exclusive(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    results = task.chunks([(5, 6), (7, 8), (9, 0)], 2).group().apply()
    assert [result.get() for result in results] == [[11, 15], [9]]
    assert all(it[2:] == (True, True) for it in seen)


def test_item_whose_lock_is_held_fails_the_map(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    hold(task, 2)
    result = task.map([1, 2, 3]).apply()
    assert result.state == "FAILURE"
    assert isinstance(result.result, LockConflict)
    assert result.result.task_id == "other-task"
    assert [it[0] for it in seen] == [1], "later items are not called either"


@pytest.mark.parametrize("policy", ["skip", "raise", "reject", lambda task, conflict: "skip"])
def test_refused_item_has_no_result(app: Celery, policy: Any) -> None:
    task = make(app, on_conflict=policy)
    hold(task, 1)
    with pytest.raises(LockConflict):
        task.map([1]).apply().get()


def test_item_waits_for_as_long_as_lock_wait_allows(app: Celery) -> None:
    task = make(app, lock_wait=60)
    lease = hold(task, 1)
    threading.Timer(0.1, Runtime.of(app).store.free, (lease,)).start()
    assert task.map([1]).apply().get() == [1]


def test_item_waits_for_its_lock_if_a_message_would_be_put_back(app: Celery) -> None:
    task = make(app, on_conflict="retry")
    lease = hold(task, 1)
    threading.Timer(0.1, Runtime.of(app).store.free, (lease,)).start()
    assert task.map([1]).apply().get() == [1]


def test_item_within_an_exclusive_task_does_not_wait_forever(app: Celery) -> None:
    inner = make(app, on_conflict="retry", name=f"inner{next(_numbers)}")
    hold(inner, 1)
    outer = make(app, function=lambda x: inner.map([x]).apply().get(), name=f"outer{next(_numbers)}")
    with pytest.raises(LockConflict):
        outer.apply((1,)).get()


def test_item_of_the_holder_itself_does_not_run_beside_it(app: Celery) -> None:
    task = make(app, on_conflict="retry", lock_key=[], function=lambda x: task.map([x]).apply().get())
    with pytest.raises(LockConflict):
        task.apply((1,)).get()


def test_call_within_an_item_is_a_plain_call(app: Celery) -> None:
    seen: list[Any] = []
    inner = make(app, seen, name=f"inner{next(_numbers)}")
    outer = make(app, function=inner, name=f"outer{next(_numbers)}")
    assert outer.map([1]).apply().get() == [1]
    assert seen == [(1, 0, False, False)]


def test_direct_call_after_a_map_is_a_plain_call(app: Celery) -> None:
    seen: list[Any] = []
    task = make(app, seen)
    task.map([1]).apply()
    task(2)
    assert seen[-1] == (2, 0, False, False)


def test_failed_item_frees_its_lock(app: Celery) -> None:
    def fail(x: int) -> None:
        raise ValueError(x)

    task = make(app, function=fail)
    with pytest.raises(ValueError, match="1"):
        task.map([1, 2]).apply().get()
    assert held(app) == []


def test_item_waits_for_the_lock_server(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "FIRST_DELAY", 0.01)
    acquire, tries = MemoryStore.acquire, []

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        tries.append(args)
        if len(tries) < 3:
            raise LockUnavailable("k", "no answer")
        return acquire(self, *args, **options)

    monkeypatch.setattr(MemoryStore, "acquire", failing)
    assert make(app).map([1]).apply().get() == [1]
    assert len(tries) == 3


def test_silence_of_the_server_does_not_shorten_the_wait_of_an_item(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in its slot, so no later delivery could start a new wait."""
    monkeypatch.setattr(requeue, "FIRST_DELAY", 0.01)
    task = make(app, lock_wait=60)
    store = Runtime.of(app).store
    other = store.acquire(LockRequest(task.lock_key_of(1), new_owner(), ttl=10_000, holder=Holder("other")))
    assert isinstance(other, Lease)
    acquire, waiter, now, silent = MemoryStore.acquire, MemoryStore.waiter, clock.now, [100.0, 100.0]
    outage = 0.0

    def failing(self: MemoryStore, request: LockRequest) -> Any:
        nonlocal outage
        if silent:
            outage += silent.pop()
            raise LockUnavailable("k", "no answer")
        return acquire(self, request)

    def freed_soon(self: MemoryStore, request: LockRequest) -> Any:
        threading.Timer(0.1, self.free, (other,)).start()
        return waiter(self, request)

    monkeypatch.setattr(clock, "now", in_this_thread(lambda: now() + outage, now))
    monkeypatch.setattr(MemoryStore, "acquire", failing)
    monkeypatch.setattr(MemoryStore, "waiter", freed_soon)
    assert task.map([1]).apply().get() == [1]


def test_item_that_asks_many_times_names_only_its_latest_given_up_owners(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it named all of them, each question would be longer than the one before."""
    named: list[tuple[str, ...]] = []
    acquire = MemoryStore.acquire

    def failing(self: Any, request: LockRequest) -> Any:
        named.append(request.given_up)
        if len(named) <= 2 * requeue.MAX_GIVEN_UP:
            raise LockUnavailable("k", "no answer")
        return acquire(self, request)

    monkeypatch.setattr(MemoryStore, "acquire", failing)
    monkeypatch.setattr(clock, "sleep", sleepless())
    assert make(app).map([1]).apply().get() == [1]
    assert [len(owners) for owners in named] == [min(tries, requeue.MAX_GIVEN_UP) for tries in range(len(named))]


def test_item_asks_a_silent_lock_server_after_growing_delays(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    acquire = MemoryStore.acquire

    def failing(self: Any, request: LockRequest) -> Any:
        if len(waited) < 8:
            raise LockUnavailable("k", "no answer")
        return acquire(self, request)

    monkeypatch.setattr(MemoryStore, "acquire", failing)
    monkeypatch.setattr(clock, "sleep", in_this_thread(waited.append, clock.sleep))
    assert make(app).map([1]).apply().get() == [1]
    most = requeue.MAX_DELAY["unavailable"]
    for seconds, longest in zip(waited, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], strict=True):
        assert min(longest, most) / 2 <= seconds <= min(longest, most)


def test_silent_lock_server_is_handled_as_the_task_says(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, *args: Any, **options: Any) -> Any:
        raise LockUnavailable("k", "no answer")

    monkeypatch.setattr(MemoryStore, "acquire", failing)
    with pytest.raises(LockUnavailable):
        make(app, on_unavailable="raise").map([1]).apply().get()
    assert make(app, on_unavailable="run", name=f"runs{next(_numbers)}").map([1]).apply().get() == [1]


def test_error_of_the_function_is_not_taken_for_a_silent_lock_server(app: Celery) -> None:
    calls = []

    def fail(x: int) -> None:
        calls.append(x)
        raise LockUnavailable("its own", "no answer")

    with pytest.raises(LockUnavailable, match="its own"):
        make(app, function=fail).map([1]).apply().get()
    assert calls == [1]


def test_two_maps_do_not_overlap(app: Celery) -> None:
    inside, most, mutex = 0, 0, threading.Lock()

    def work(x: int) -> None:
        nonlocal inside, most
        with mutex:
            inside, most = inside + 1, max(most, inside + 1)
        clock.sleep(0.01)
        with mutex:
            inside -= 1

    task = make(app, function=work, on_conflict="retry", lock_key=[])
    app.finalize()
    threads = [threading.Thread(target=task.map(range(5)).apply) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert most == 1


def test_retry_in_an_item_works_as_in_celery(app: Celery) -> None:
    @app.task(bind=True, base=Task, shared=False, name=f"plain{next(_numbers)}")
    def plain(self: Any, x: int) -> None:
        raise self.retry(countdown=0)

    task = make(app, function=lambda x: task.retry(countdown=0))
    assert task.map([1]).apply().state == plain.map([1]).apply().state
    assert held(app) == []
