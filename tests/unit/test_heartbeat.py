from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from celery import Celery

from celery_singleton_lock import LockUnavailable, SingletonTask, clock
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from tests.patience import LIMIT
from tests.servers import until

#: Seconds: short, so that renewals come soon, but longer than a busy machine stops a thread for.
TTL = 1.0


class Store(MemoryStore):
    """A memory store that counts renewals, and can be told to fail."""

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
        lease = self.acquire(LockRequest(key, new_owner(), ttl=ttl, holder=Holder()))
        assert isinstance(lease, Lease)
        return lease


class Execution:
    """An execution as the heartbeat knows it: a method to call."""

    def __init__(self) -> None:
        self.lost = threading.Event()
        self.losses = 0
        self.left = 0.0
        self.lease: Lease | None = None

    def when_lost(self) -> None:
        self.losses += 1
        if self.lease is not None and not self.lost.is_set():
            self.left = self.lease.remaining
        self.lost.set()


@pytest.fixture(autouse=True)
def threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_singleton_lock.heartbeat.LINGER", 0.01)
    gc.collect()  # Tracebacks keep leases alive.
    until(lambda: threads() == 0, "the threads of other tests have ended")


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def heartbeat(store: Store) -> Heartbeat:
    return Heartbeat(store)


def threads() -> int:
    return sum(thread.name == "singleton-lock-heartbeat" for thread in threading.enumerate())


def test_stopped_lease_is_not_renewed(store: Store, heartbeat: Heartbeat) -> None:
    stopped, going, execution = store.take("a"), store.take("b"), Execution()
    heartbeat.start(stopped, execution.when_lost)
    heartbeat.start(going, execution.when_lost)
    heartbeat.stop(stopped)
    end = stopped.trusted_until
    assert store.renewed.wait(LIMIT)
    assert stopped.trusted_until == end
    heartbeat.stop(going)


def test_seeded_numbers_of_a_task_are_left_alone(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(), Execution()
    before = random.getstate()
    heartbeat.start(lease, execution.when_lost)
    until(lambda: store.renewals >= 3, "renewed")
    heartbeat.stop(lease)
    assert random.getstate() == before


def test_missing_answer_is_retried_and_survived(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(ttl=2.0), Execution()
    store.fail = True
    heartbeat.start(lease, execution.when_lost)
    assert store.failed.wait(LIMIT)
    store.fail = False
    assert store.renewed.wait(LIMIT)
    assert not execution.lost.is_set()
    heartbeat.stop(lease)


def test_loss_is_reported_until_the_lease_is_stopped(store: Store, heartbeat: Heartbeat) -> None:
    lease, execution = store.take(), Execution()
    store.free(lease)
    heartbeat.start(lease, execution.when_lost)
    deadline = clock.now() + LIMIT
    while execution.losses < 3:
        assert clock.now() < deadline
        clock.sleep(0.01)
    heartbeat.stop(lease)


class TestSuperseded:
    """A newer task must run."""

    def test_renewal_says_so_and_the_stop_is_repeated_while_the_lease_is_renewed(
        self, store: Store, heartbeat: Heartbeat
    ) -> None:
        lease, other, execution, unmoved = store.take("a"), store.take("b"), Execution(), Execution()
        heartbeat.start(other, unmoved.when_lost)
        heartbeat.start(lease, execution.when_lost)
        supersede(store, lease)
        until(lambda: execution.losses >= 3, "reported")
        first_end = lease.trusted_until
        until(lambda: lease.trusted_until > first_end, "renewed")
        assert lease.held
        assert lease.superseded_by == "newer"
        assert unmoved.losses == 0
        heartbeat.stop(lease)
        heartbeat.stop(other)

    def test_lease_that_may_be_superseded_is_renewed_more_often(self, store: Store, heartbeat: Heartbeat) -> None:
        lease, execution = store.take(ttl=3600.0), Execution()
        heartbeat.start(lease, execution.when_lost, every=0.05)
        until(lambda: lease.renewals >= 3, "renewed")
        supersede(store, lease)
        assert execution.lost.wait(LIMIT)
        heartbeat.stop(lease)

    def test_superseded_lease_may_be_lost_later(self, store: Store, heartbeat: Heartbeat) -> None:
        lease, execution = store.take(), Execution()
        supersede(store, lease)
        heartbeat.start(lease, execution.when_lost)
        assert execution.lost.wait(LIMIT)
        store.free(lease)
        until(lambda: not lease.held, "lost")
        losses = execution.losses
        until(lambda: execution.losses > losses, "reported again")
        heartbeat.stop(lease)


def supersede(store: Store, lease: Lease) -> None:
    (occupant,) = store._occupants[lease.key].values()
    occupant.holder = replace(occupant.holder, superseded_by="newer")


class TestRoundOfALongLease:
    """It may take seconds, and other leases in the store wait for it, which have a shorter ttl."""

    @pytest.fixture
    def store(self) -> HangingStore:
        return HangingStore(threading.Event())

    @pytest.fixture
    def long(self, store: HangingStore) -> Lease:
        """It is due as soon as it is under watch."""
        lease = store.take("long", ttl=3600.0)
        lease.acquired_at -= 1300.0
        return lease

    def test_holder_that_is_to_stop_is_still_asked_again(self, store: HangingStore, long: Lease) -> None:
        heartbeat, other, execution = Heartbeat(store), store.take("other", ttl=600.0), Execution()
        other.supersede("newer")
        heartbeat.start(other, execution.when_lost)
        assert execution.lost.wait(LIMIT)
        heartbeat.start(long, Execution().when_lost)
        assert store.hangs.wait(LIMIT)
        losses = execution.losses
        until(lambda: execution.losses > losses + 2, "it is asked again and again")
        store.go_on.set()
        heartbeat.stop(other)
        heartbeat.stop(long)


class HangingStore(Store):
    def __init__(self, go_on: threading.Event) -> None:
        super().__init__()
        self.go_on = go_on
        self.hangs = threading.Event()

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        self.hangs.set()
        assert self.go_on.wait(LIMIT)
        return super().renew(leases, timeout=timeout)


class TestRenewNow:
    """A lock was taken away: its holder notices long before a renewal would be due."""

    def test_loss_is_noticed_at_once(self, store: Store, heartbeat: Heartbeat) -> None:
        taken, kept = (store.take(key, ttl=3600.0) for key in ("a", "b"))
        execution, unmoved = Execution(), Execution()
        heartbeat.start(taken, execution.when_lost)
        heartbeat.start(kept, unmoved.when_lost)
        store.free(taken)
        heartbeat.renew_now()
        assert execution.lost.wait(LIMIT)
        until(lambda: kept.renewals == 1, "the other one is renewed")
        assert not unmoved.lost.is_set()
        heartbeat.stop(taken)
        heartbeat.stop(kept)

    def test_forked_child_hears_its_parent(self, store: Store, heartbeat: Heartbeat) -> None:
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                lease, execution = store.take(ttl=3600.0), Execution()
                heartbeat.start(lease, execution.when_lost)
                store.free(lease)
                os.write(writable, b".")
                status = 0 if execution.lost.wait(LIMIT) else 2
            finally:
                os._exit(status)
        os.read(readable, 1)
        heartbeat.renew_now()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert threads() == 0, "no thread is started if there is nothing to renew"
        os.close(readable)
        os.close(writable)

    def test_pending_renewal_is_followed_by_another(self) -> None:
        """The pending one may have been sent before the lock was taken away."""
        go_on = threading.Event()
        store = HangingStore(go_on)
        heartbeat, lease, execution = Heartbeat(store), store.take(ttl=3600.0), Execution()
        heartbeat.start(lease, execution.when_lost)
        heartbeat.renew_now()
        assert store.hangs.wait(LIMIT)
        heartbeat.renew_now()
        go_on.set()
        until(lambda: store.renewals >= 2, "renewed once more")
        heartbeat.stop(lease)


class TestErrors:
    """Whatever goes wrong, the other leases are renewed, and an overdue lease is given up."""

    class Picky(Store):
        """Cannot renew some leases, and finds that out before anything is sent."""

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
            self.calls += 1
            for lease in leases:
                if lease.key.startswith("bad"):
                    raise OverflowError("cannot convert float infinity to integer")
            return super().renew(leases, timeout=timeout)

    def test_one_bad_lease_does_not_harm_the_others(self) -> None:
        store = self.Picky()
        heartbeat = Heartbeat(store)
        good = [(store.take(str(number), ttl=1.0), Execution()) for number in range(20)]
        bad, execution = store.take("bad", ttl=1.0), Execution()
        ends = [lease.trusted_until for lease, _ in good]
        for lease, its in [*good[:10], (bad, execution), *good[10:]]:
            heartbeat.start(lease, its.when_lost)
        assert execution.lost.wait(LIMIT)
        until(lambda: clock.now() > max(ends), "without a renewal they would have ended")
        assert all(lease.held for lease, _ in good)
        assert not any(its.lost.is_set() for _, its in good)
        assert bad.reason is not None
        assert "OverflowError" in bad.reason or "infinity" in bad.reason
        for lease in (bad, *(lease for lease, _ in good)):
            heartbeat.stop(lease)

    def test_unknown_failure_of_a_store_is_reported_in_time(
        self, store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def explode(leases: Sequence[Lease], *, timeout: float) -> list[bool]:
            raise RuntimeError("no such thing")

        monkeypatch.setattr(store, "renew", explode)
        held = [(store.take(str(number), ttl=1.0), Execution()) for number in range(5)]
        for lease, execution in held:
            execution.lease = lease
            heartbeat.start(lease, execution.when_lost)
        for lease, execution in held:
            assert execution.lost.wait(LIMIT)
            assert execution.left > 0
            assert "no such thing" in str(lease.reason)
            heartbeat.stop(lease)

    def test_too_few_answers_do_not_count(
        self, store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store, "renew", lambda leases, timeout: [])
        lease, execution = store.take(ttl=1.0), Execution()
        heartbeat.start(lease, execution.when_lost)
        assert execution.lost.wait(LIMIT)
        heartbeat.stop(lease)

    def test_lease_that_was_renewed_before_the_store_fell_silent_is_not_renewed_again(
        self, store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cluster with one silent node."""
        asked: list[str] = []

        def renew(leases: Sequence[Lease], *, timeout: float) -> list[bool]:
            asked.extend(lease.key for lease in leases)
            for lease in leases:
                if lease.key == "there":
                    lease.extend(clock.now())
            raise LockUnavailable("test", "one node is silent")

        there, silent, execution = store.take("there", ttl=9.0), store.take("silent", ttl=9.0), Execution()
        monkeypatch.setattr(store, "renew", renew)
        for lease in (there, silent):
            lease.acquired_at -= 4.0  # Makes both due.
            heartbeat.start(lease, execution.when_lost)
        until(lambda: asked.count("silent") >= 3, "it is tried again")
        assert asked.count("there") <= 2
        heartbeat.stop(there)
        heartbeat.stop(silent)


class TestAnotherTtl:
    def test_longer_lease_is_renewed_less_often(self, store: Store, heartbeat: Heartbeat) -> None:
        lease, execution = store.take(), Execution()
        heartbeat.start(lease, execution.when_lost)
        assert heartbeat.renew(lease, 600.0)
        assert lease.remaining > 500
        renewals = store.renewals
        assert not threading.Event().wait(TTL)
        assert store.renewals == renewals
        heartbeat.stop(lease)

    def test_missing_answer_to_a_longer_ttl_leaves_the_trust_unchanged(
        self, store: Store, heartbeat: Heartbeat
    ) -> None:
        lease = store.take(ttl=10.0)
        end = lease.trusted_until
        store.fail = True
        with pytest.raises(LockUnavailable):
            heartbeat.renew(lease, 600.0)
        assert (lease.ttl, lease.trusted_until) == (10.0, end)

    def test_lock_that_is_gone_is_lost(self, store: Store, heartbeat: Heartbeat) -> None:
        lease, execution = store.take(ttl=600.0), Execution()
        heartbeat.start(lease, execution.when_lost)
        store.free(lease)
        assert not heartbeat.renew(lease, 10.0)
        assert execution.lost.wait(LIMIT)
        assert lease.reason is not None
        heartbeat.stop(lease)

    def test_renewal_waits_for_the_round_that_renews_the_same_lease(self) -> None:
        """Otherwise nobody knows which ttl the store has in the end."""
        go_on, ttls = threading.Event(), []

        class Slow(HangingStore):
            def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
                renewed = super().renew(leases, timeout=timeout)
                ttls.append(leases[0].ttl)
                return renewed

        store = Slow(go_on)
        heartbeat, lease, execution = Heartbeat(store), store.take(ttl=10.0), Execution()
        lease.acquired_at -= 5.0
        heartbeat.start(lease, execution.when_lost)
        assert store.hangs.wait(LIMIT)
        thread = threading.Thread(target=heartbeat.renew, args=(lease, 600.0))
        thread.start()
        go_on.set()
        thread.join(LIMIT)
        assert ttls == [10.0, 600.0]
        assert lease.remaining > 500
        heartbeat.stop(lease)

    def test_lease_is_given_up_in_time_during_its_renewal(self) -> None:
        go_on = threading.Event()
        store = HangingStore(go_on)
        heartbeat, lease, execution = Heartbeat(store), store.take(ttl=1.0), Execution()
        execution.lease = lease
        heartbeat.start(lease, execution.when_lost)
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(heartbeat.renew(lease, 600.0)))
        thread.start()
        assert execution.lost.wait(LIMIT)
        go_on.set()
        thread.join(LIMIT)
        assert answers == [False]
        heartbeat.stop(lease)

    def test_lease_is_given_up_in_time_while_its_shorter_ttl_is_being_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The heartbeat's thread sleeps until the longer one would be renewed."""
        monkeypatch.setattr("celery_singleton_lock.pulse.MAX_SLEEP", 2 * LIMIT)
        store, sleeps = HangingStore(threading.Event()), threading.Event()
        heartbeat, lease, execution = Heartbeat(store), store.take(ttl=50 * LIMIT), Execution()
        heartbeat.start(lease, execution.when_lost, on_moved=sleeps.set)
        assert sleeps.wait(LIMIT)
        shorter = threading.Thread(target=heartbeat.renew, args=(lease, 1.0))
        shorter.start()
        assert execution.lost.wait(LIMIT)
        store.go_on.set()
        shorter.join(LIMIT)
        heartbeat.stop(lease)

    def test_shorter_ttl_limits_the_trust_while_it_is_being_sent(
        self, store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server may have carried it out while another thread still trusts the lease."""
        lease, remaining, renew = store.take(ttl=600.0), [], store.renew

        def renewed(leases: Sequence[Lease], *, timeout: float) -> list[bool]:
            remaining.append(lease.remaining)
            return renew(leases, timeout=timeout)

        monkeypatch.setattr(store, "renew", renewed)
        assert heartbeat.renew(lease, 60.0)
        assert remaining[0] < 60
        assert heartbeat.renew(lease, 600.0)
        assert lease.remaining > 500

    def test_check_of_an_overdue_lease_waits_for_its_pending_renewal(
        self, store: Store, heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the check renewed in between, the lease would be trusted for the longer ttl but last for the shorter."""
        lease, asked, under_way, goes_on = store.take(ttl=30.0), [], threading.Event(), threading.Event()
        renew = store.renew

        def renewed(leases: Sequence[Lease], *, timeout: float) -> list[bool]:
            asked.append(leases[0].ttl)
            under_way.set()
            assert goes_on.wait(LIMIT)
            return renew(leases, timeout=timeout)

        monkeypatch.setattr(store, "renew", renewed)
        longer = threading.Thread(target=heartbeat.renew, args=(lease, 600.0))
        lease.ask, lease.trusted_until = heartbeat._ask, 0.0
        longer.start()
        assert under_way.wait(LIMIT)
        check = threading.Thread(target=lease.check)
        check.start()
        check.join(0.1)
        goes_on.set()
        for thread in (longer, check):
            thread.join(LIMIT)
        assert lease.held
        assert asked == [600.0]


def test_thread_ends_with_the_last_lease_on_request(store: Store, heartbeat: Heartbeat) -> None:
    """After `apply()`: Celery's own tests look for threads."""
    for _ in range(20):
        lease, execution = store.take(), Execution()
        heartbeat.start(lease, execution.when_lost, linger=False)
        assert threads() == 1
        heartbeat.stop(lease)
        store.free(lease)
        assert threads() == 0


def test_task_that_is_called_here_leaves_no_thread() -> None:
    app = Celery(set_as_current=False)
    app.conf.update(singleton_lock_backend="memory://", singleton_lock_journal=0)

    @app.task(base=SingletonTask, name="called")
    def called() -> int:
        return threads()

    for _ in range(5):
        assert called.apply().get() == 1
        assert threads() == 0
