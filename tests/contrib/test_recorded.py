"""The locks that a user's test records, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import DuplicateTask, LockConflict, SingletonTask, lock_acquired
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing import RecordedLocks, hold_lock, memory_locks
from tests.redis_server import RedisServer


class Shop:
    """An app with two tasks."""

    def __init__(self, **conf: Any) -> None:
        self.app = Celery("shop", set_as_current=False, **conf)
        self.rebuild = self.app.task(name="shop.rebuild", base=SingletonTask, shared=False)(_rebuild)
        self.bill = self.app.task(
            name="shop.bill", base=SingletonTask, shared=False, on_conflict="raise", lock_key=["tenant"]
        )(_bill)


def _rebuild(tenant: int, full: bool = False) -> str:
    return f"rebuilt {tenant}"


def _bill(tenant: int, month: int) -> None: ...


@pytest.fixture
def shop() -> Shop:
    # A broker and a lock server that nobody could reach.
    return Shop(broker="amqp://127.0.0.1:1", backend="cache+memory://")


@pytest.fixture
def locks() -> Iterator[RecordedLocks]:
    with memory_locks() as locks:
        yield locks


def test_call_that_ran_is_found_by_the_arguments_of_its_key(shop: Shop, locks: RecordedLocks) -> None:
    shop.rebuild.apply((7,))
    locks.assert_acquired(shop.rebuild, 7)
    (event,) = locks.assert_acquired(shop.rebuild, tenant=7, full=False)
    assert (event.task, event.args, event.kwargs) == ("shop.rebuild", (7,), {})
    assert locks.acquired == [event]
    assert [event.key for event in locks.released] == [event.key]
    assert locks.conflicts == locks.lost == []


def test_call_that_met_a_held_lock_was_skipped(shop: Shop, locks: RecordedLocks) -> None:
    with hold_lock(shop.rebuild, 7):
        assert shop.rebuild.apply((7,)).state == "IGNORED"
        assert shop.rebuild.apply((8,)).get() == "rebuilt 8"
    (event,) = locks.assert_skipped(shop.rebuild, 7)
    assert event.policy == "skip"
    assert event.held_by is not None
    assert event.held_by.startswith("hold-lock")
    with pytest.raises(AssertionError):
        locks.assert_skipped(shop.rebuild, 8)


def test_conflict_that_raises_was_not_skipped(shop: Shop, locks: RecordedLocks) -> None:
    with hold_lock(shop.bill, 7, month=1), pytest.raises(LockConflict):
        shop.bill.apply((7, 2)).get()
    (event,) = locks.assert_conflict(shop.bill, 7, month=3)
    assert event.policy == "raise"
    with pytest.raises(AssertionError, match=r"no shop.bill\(7, 2\) was skipped; what happened:\n  conflict:"):
        locks.assert_skipped(shop.bill, 7, 2)


@pytest.mark.parametrize("policy", ["existing", "skip", "raise"])
def test_call_that_was_not_sent_was_a_duplicate(locks: RecordedLocks, policy: str) -> None:
    app = Celery("shop", set_as_current=False, broker="memory://")
    options = {"lock_key": ["tenant"], "lock_scope": "until_executed", "on_duplicate": policy}
    bill = app.task(name="shop.bill", base=SingletonTask, shared=False, **options)(_bill)
    first = bill.delay(7, month=1)
    with pytest.raises(AssertionError, match=r"no shop.bill\(7, 1\) was a duplicate"):
        locks.assert_duplicate(bill, 7, 1)
    with suppress(DuplicateTask):
        bill.delay(7, month=2)
    (event,) = locks.assert_duplicate(bill, 7, month=3)
    assert (event.policy, event.held_by, event.task_id) == (policy, first.id, None)
    assert event.key == bill.lock_key_of(7, 1)
    assert str(event) == f"duplicate: shop.bill, {policy} (held by task {first.id}), {event.key}"
    assert locks.duplicates == [event]
    with pytest.raises(AssertionError):
        locks.assert_duplicate(bill, 8, month=2)


def test_argument_that_the_task_does_not_have_is_pointed_out(shop: Shop, locks: RecordedLocks) -> None:
    """`lock_key` does not use it."""
    shop.bill.apply((7, 1))
    for wrong in ({"month": 1, "tenannt": 3}, {"mont": 1}, {}):
        with pytest.raises(TypeError, match="is no call of this task: "):
            locks.assert_acquired(shop.bill, 7, **wrong)
        with pytest.raises(TypeError, match="is no call of this task: "), hold_lock(shop.bill, 7, **wrong):
            pass


def test_failed_assertion_says_why_nothing_was_recorded(shop: Shop, locks: RecordedLocks) -> None:
    shop.rebuild(7)
    with pytest.raises(AssertionError, match=r"no task asked for a lock.*a direct call takes no lock"):
        locks.assert_acquired(shop.rebuild, 7)
    with memory_locks() as disabled:
        shop.app.conf.singleton_lock_enabled = False
        shop.rebuild.apply((7,))
        with pytest.raises(AssertionError, match="setting singleton_lock_enabled is False"):
            disabled.assert_acquired(shop.rebuild, 7)


def test_task_that_is_not_exclusive_is_pointed_out(shop: Shop, locks: RecordedLocks) -> None:
    plain = shop.app.task(name="shop.plain", shared=False)(_rebuild)
    with pytest.raises(TypeError, match="base=SingletonTask"):
        locks.assert_acquired(plain, 7)
    with pytest.raises(TypeError, match="base=SingletonTask"), hold_lock(plain, 7):
        pass


def test_held_lock_is_free_after_the_block(shop: Shop, locks: RecordedLocks) -> None:
    with hold_lock(shop.rebuild, 7) as lease:
        assert lease.held
        with pytest.raises(AssertionError, match=r"the lock of shop.rebuild\(7\) is held by task hold-lock"):
            locks.assert_free(shop.rebuild, 7)
        with pytest.raises(LockConflict), hold_lock(shop.rebuild, 7):
            pass
    locks.assert_free(shop.rebuild, 7)
    shop.rebuild.apply((7,))
    locks.assert_acquired(shop.rebuild, 7)


def test_locks_are_fresh_each_time_and_leave_nothing_behind(shop: Shop) -> None:
    threads, receivers = set(threading.enumerate()), list(lock_acquired.receivers)
    with ExitStack() as held:
        with memory_locks() as first:
            held.enter_context(hold_lock(shop.rebuild, 7))
            shop.rebuild.apply((7,))
        with memory_locks() as second:
            shop.rebuild.apply((7,))
            second.assert_acquired(shop.rebuild, 7)
    assert len(first.conflicts) == 1
    assert first.acquired == second.conflicts == []
    assert [receiver for receiver in lock_acquired.receivers if receiver not in receivers] == []
    for heartbeat in set(threading.enumerate()) - threads:
        heartbeat.join(10)
        assert not heartbeat.is_alive()


def test_app_has_its_own_locks_again_afterwards(redis_server: RedisServer) -> None:
    shop = Shop(broker=redis_server.url)
    own = Runtime.of(shop.app)
    with memory_locks():
        assert Runtime.of(shop.app).store is not own.store
        shop.rebuild.apply((7,))
    assert Runtime.of(shop.app) is own
    with redis_server.client() as client:
        assert client.keys("*") == []
