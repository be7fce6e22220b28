from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence

import pytest

from celery_singleton_lock import LockLost, LockUnavailable, clock
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.lease import Holder, Lease, new_owner
from celery_singleton_lock.stores.memory import MemoryStore
from tests.patience import LIMIT

#: Short, so that renewals come soon.
TTL = 0.3


class Store(MemoryStore):
    """A memory store whose renewals are counted and can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fail = False
        self.renewals = 0
        self.renewed = threading.Event()
        self.failed = threading.Event()

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        if self.fail:
            self.failed.set()
            raise LockUnavailable("test", "told to fail")
        self.renewals += len(leases)
        self.renewed.set()
        return super().renew(leases, timeout=timeout)

    def take(self, key: str = "k", ttl: float = TTL) -> Lease:
        lease = self.acquire(key, new_owner(), ttl=ttl, holder=Holder())
        assert isinstance(lease, Lease)
        return lease


class Execution:
    """What the heartbeat knows of one: a method to call."""

    def __init__(self) -> None:
        self.lost = threading.Event()
        self.told = 0
        self.left = 0.0
        self.lease: Lease | None = None

    def when_lost(self) -> None:
        self.told += 1
        if self.lease is not None and not self.lost.is_set():
            self.left = self.lease.remaining
        self.lost.set()


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def heartbeat(store: Store) -> Heartbeat:
    return Heartbeat(store)


def threads() -> int:
    return sum(thread.name == "singleton-lock-heartbeat" for thread in threading.enumerate())


def test_lease_outlives_its_ttl(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(), Execution()
    first_end = lease.trusted_until
    heartbeat.start(lease, execution.when_lost)
    while clock.now() < first_end + TTL:
        store.renewed.clear()
        assert store.renewed.wait(LIMIT)
    assert lease.held
    assert not execution.lost.is_set()
    heartbeat.stop(lease)


def test_stopped_lease_is_not_renewed(store: Store, heartbeat: Heartbeat) -> None:
    stopped, going, execution = store.take("a"), store.take("b"), Execution()
    heartbeat.start(stopped, execution.when_lost)
    heartbeat.start(going, execution.when_lost)
    heartbeat.stop(stopped)
    end = stopped.trusted_until
    assert store.renewed.wait(LIMIT)
    assert stopped.trusted_until == end
    heartbeat.stop(going)


def test_one_thread_for_many_leases(store: Store, heartbeat: Heartbeat) -> None:
    before = threads()
    leases, execution = [store.take(str(n)) for n in range(100)], Execution()
    for lease in leases:
        heartbeat.start(lease, execution.when_lost)
    assert threads() == before + 1
    for lease in leases:
        heartbeat.stop(lease)


def test_thread_ends_when_there_is_nothing_to_renew_for_long(
    store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who makes a client for each request would gather threads; the next lease starts another."""
    monkeypatch.setattr("celery_singleton_lock.heartbeat.IDLE", 0.05)
    monkeypatch.setattr("celery_singleton_lock.heartbeat.MAX_SLEEP", 0.05)
    for _ in range(2):
        lease, execution = store.take(), Execution()
        store.renewed.clear()
        heartbeat.start(lease, execution.when_lost)
        thread = heartbeat._thread
        assert store.renewed.wait(LIMIT)
        heartbeat.stop(lease)
        store.release(lease)
        assert thread is not None
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_no_answer_is_tried_again_and_survived(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(ttl=2.0), Execution()
    store.fail = True
    heartbeat.start(lease, execution.when_lost)
    assert store.failed.wait(LIMIT)
    store.fail = False
    assert store.renewed.wait(LIMIT)
    assert not execution.lost.is_set()
    heartbeat.stop(lease)


def test_lost_before_the_lease_can_end_when_no_answer_comes(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(ttl=1.0), Execution()
    execution.lease = lease
    store.fail = True
    heartbeat.start(lease, execution.when_lost)
    assert execution.lost.wait(LIMIT)
    assert execution.left > 0
    assert lease.reason is not None
    assert "could not be renewed" in lease.reason
    heartbeat.stop(lease)


def test_lost_when_taken_over(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(ttl=1.0), Execution()
    heartbeat.start(lease, execution.when_lost)
    store.release(lease)
    store.take(ttl=5.0)
    assert execution.lost.wait(LIMIT)
    assert not lease.held
    heartbeat.stop(lease)


def test_told_again_until_stopped(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(), Execution()
    store.release(lease)
    heartbeat.start(lease, execution.when_lost)
    deadline = clock.now() + LIMIT
    while execution.told < 3:
        assert clock.now() < deadline
        clock.sleep(0.01)
    heartbeat.stop(lease)


def test_error_in_one_execution_does_not_end_the_thread(store: Store, heartbeat: Heartbeat) -> None:
    class Bad(Execution):
        def when_lost(self) -> None:
            super().when_lost()
            raise RuntimeError("told wrong")

    bad, good, execution, other = store.take("bad"), store.take("good"), Bad(), Execution()
    heartbeat.start(bad, execution.when_lost)
    heartbeat.start(good, other.when_lost)
    store.release(bad)
    assert execution.lost.wait(LIMIT)
    store.renewed.clear()
    assert store.renewed.wait(LIMIT)
    assert good.held
    heartbeat.stop(bad)
    heartbeat.stop(good)


def test_unexpected_error_does_not_end_the_thread(
    store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = threading.Event()

    def explode(leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        raised.set()
        monkeypatch.undo()
        raise RuntimeError("no such thing")

    lease, execution = store.take(ttl=3.0), Execution()
    monkeypatch.setattr(store, "renew", explode)
    heartbeat.start(lease, execution.when_lost)
    assert raised.wait(LIMIT)
    assert store.renewed.wait(LIMIT)
    heartbeat.stop(lease)


def test_forgotten_lease_ends(store: Store, heartbeat: Heartbeat) -> None:
    """A time limit that strikes right before `stop` must not leave a lock that is renewed for ever."""
    lease, execution = store.take(), Execution()
    heartbeat.start(lease, execution.when_lost)
    del lease, execution
    gc.collect()
    deadline = clock.now() + LIMIT
    while not isinstance(store.acquire("k", new_owner(), ttl=TTL, holder=Holder()), Lease):
        assert clock.now() < deadline, "still renewed"
        clock.sleep(0.01)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_of_a_fork_has_a_heartbeat_of_its_own(store: Store, heartbeat: Heartbeat) -> None:
    inherited, execution = store.take("parent", ttl=5.0), Execution()
    heartbeat.start(inherited, execution.when_lost)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine = store.take("child", ttl=1.0)
            end = mine.trusted_until
            store.renewed.clear()
            heartbeat.start(mine, execution.when_lost)
            renewed = store.renewed.wait(LIMIT)
            heartbeat.stop(mine)
            status = 0 if renewed and threads() == 1 and mine.trusted_until > end else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    heartbeat.stop(inherited)


class TestOverdue:
    """The process slept past the end of its lease, and comes to a check before the heartbeat comes to it."""

    @pytest.fixture
    def overdue(self, store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> Lease:
        lease, execution = store.take(ttl=600.0), Execution()
        heartbeat.start(lease, execution.when_lost)
        lease.extend(clock.now() - 700.0)
        return lease

    def test_lock_that_is_still_ours_is_held_on(self, store: Store, overdue: Lease) -> None:
        assert not overdue.held
        overdue.check()
        assert overdue.held
        assert overdue.remaining > 500

    def test_lock_that_is_gone_is_lost(self, store: Store, overdue: Lease) -> None:
        store.release(overdue)
        with pytest.raises(LockLost, match="no longer ours"):
            overdue.check()

    def test_lock_that_another_took_is_lost(self, store: Store, overdue: Lease) -> None:
        store.release(overdue)
        other = store.take()
        with pytest.raises(LockLost, match="no longer ours"):
            overdue.check()
        assert other.held

    def test_no_answer_is_no_trust(self, store: Store, overdue: Lease) -> None:
        store.fail = True
        with pytest.raises(LockLost, match="overdue"):
            overdue.check()

    def test_lost_lease_does_not_ask_again(self, store: Store, overdue: Lease) -> None:
        overdue.lose("told so")
        with pytest.raises(LockLost, match="told so"):
            overdue.check()
        assert store.renewals == 0


def test_answer_that_was_read_late_is_followed_by_a_question_at_once(store: Store, heartbeat: Heartbeat) -> None:
    """The process was stopped between sending and reading: the answer says how it was then."""
    lease, execution = store.take(ttl=3.0), Execution()
    late = threading.Event()

    def renew(leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        if late.is_set():
            return [False]
        late.set()
        lease.extend(clock.now() - 10.0)
        return [True]

    store.renew = renew  # type: ignore[method-assign]
    heartbeat.start(lease, execution.when_lost)
    assert late.wait(LIMIT)
    assert execution.lost.wait(0.9), "it asked no sooner than after another third of the ttl"
