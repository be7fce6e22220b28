"""Whether a holder can still be running under its lock."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

import pytest

from celery_singleton_lock import clock, process_identity
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.diagnosis.verdict import Verdict, judge, judged
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Reservation
from celery_singleton_lock.stores.memory import MemoryStore
from tests.patience import in_this_thread

TTL = 30.0
HELD = Held(Holder("id", 0, "one@host", 42, 1.0, ttl=TTL), "owner", 25.0)


def over() -> str:
    """The identity of a process that has ended."""
    code = "from celery_singleton_lock import process_identity; print(process_identity.own())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_renewed_lease_has_a_living_holder() -> None:
    assert judge(HELD, HELD, renewed=True) is Verdict.ALIVE


def test_nothing_is_known_while_the_holder_may_still_renew() -> None:
    assert judge(HELD, HELD) is None
    assert judge(HELD, replace(HELD, remaining=TTL / 3)) is None, "it may be trying to renew, and still running"
    assert judge(HELD, replace(HELD, remaining=TTL / 8)) is None, "it may be stopping"


def test_lease_that_was_not_renewed_in_time_has_no_holder() -> None:
    assert judge(HELD, replace(HELD, remaining=TTL / 10)) is Verdict.LATE


def test_process_that_is_provably_over_holds_nothing() -> None:
    gone = replace(HELD.holder, process=over())
    assert judge(replace(HELD, holder=gone), replace(HELD, holder=gone)) is Verdict.OVER


def test_living_process_proves_nothing() -> None:
    """It may run another task by now: a child of a worker outlives its tasks."""
    here = replace(HELD.holder, process=process_identity.own())
    assert judge(replace(HELD, holder=here), replace(HELD, holder=here)) is None


def test_lock_that_ended_or_changed_hands_is_not_touched() -> None:
    assert judge(HELD, None) is Verdict.ENDED
    assert judge(HELD, replace(HELD, owner="other")) is Verdict.ENDED


def test_kept_and_foreign_values_are_not_touched() -> None:
    assert judge(HELD, replace(HELD, holder=replace(HELD.holder, ttl=0.0))) is Verdict.KEPT
    assert judge(HELD, replace(HELD, holder=None)) is Verdict.FOREIGN


class Time:
    """A clock that advances only during sleep."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.alarms: list[Callable[[], object]] = []

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        for alarm in self.alarms:
            alarm()


class TestVerdicts:
    @pytest.fixture
    def time(self, monkeypatch: pytest.MonkeyPatch) -> Time:
        time = Time()
        monkeypatch.setattr(clock, "now", in_this_thread(time.now, clock.now))
        monkeypatch.setattr(clock, "sleep", in_this_thread(time.sleep, clock.sleep))
        return time

    def taken(self, store: MemoryStore, key: str, **options: Any) -> Lease:
        lease = store.acquire(LockRequest(key, new_owner(), ttl=TTL, holder=Holder(key, **options)))
        assert isinstance(lease, Lease)
        return lease

    def judged(self, store: MemoryStore, say: Callable[[str], object] = str) -> dict[str, Verdict]:
        locks = [*starmap(HeldLock.of, store.all_held("k"))]
        return {lock.key: found for lock, found in judged(store, None, locks, say=say)}

    @pytest.mark.parametrize("every", [0.1, 9.0], ids=["more often than the looks", "like a heartbeat"])
    def test_renewal_is_seen(self, time: Time, every: float) -> None:
        store, began = MemoryStore(), time.at
        lease = self.taken(store, "k:alive")
        time.alarms.append(lambda: lease.remaining < TTL * 0.99 - every and store.renew([lease], timeout=1))
        assert self.judged(store) == {"k:alive": Verdict.ALIVE}
        assert time.at - began < TTL / 2

    def test_each_lock_is_judged_by_itself(self, time: Time) -> None:
        store, gone, began, said = MemoryStore(), over(), time.at, list[str]()
        self.taken(store, "k:late")
        self.taken(store, "k:over", process=gone)
        store.free(self.taken(store, "k:kept"), reservation=Reservation(Holder("k:kept", 1), TTL))
        assert self.judged(store, said.append) == {
            "k:over": Verdict.OVER,
            "k:kept": Verdict.KEPT,
            "k:late": Verdict.LATE,
        }
        assert said == [f"Watching for a renewal, for at most {TTL * 0.9:.0f} s."]
        assert time.at - began >= TTL * 0.89, "nothing is late earlier"

    def test_lock_that_is_freed_meanwhile_has_ended(self, time: Time) -> None:
        store = MemoryStore()
        lease = self.taken(store, "k:short")
        time.alarms.append(lambda: store.free(lease))
        assert self.judged(store) == {"k:short": Verdict.ENDED}

    @pytest.mark.parametrize("is_alive", [True, False])
    def test_lease_that_lost_its_end_is_watched_for_one_ttl(self, time: Time, is_alive: bool) -> None:
        """PERSIST does that, for example; a renewal gives it an end again."""
        store, began = Endless(), time.at
        lease = self.taken(store, "k:endless")
        if is_alive:
            time.alarms.append(lambda: time.at > began + TTL / 3 and store.renew([lease], timeout=1))
        (lock,) = starmap(HeldLock.of, store.all_held("k"))
        assert lock.expires_in is None
        assert [*judged(store, None, [lock], patience=TTL * 0.8)] == [(lock, Verdict.UNKNOWN)]
        ((_, found),) = judged(store, None, [lock], patience=TTL * 0.95)
        assert found is (Verdict.ALIVE if is_alive else Verdict.LATE)
        assert time.at - began < (TTL / 2 if is_alive else TTL)
        assert is_alive or time.at - began >= TTL * 0.85, "it is not late earlier"


class Endless(MemoryStore):
    """A store whose holds have no end until they are renewed."""

    renewed = False

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        self.renewed = True
        return super().renew(leases, timeout=timeout)

    def held(self, key: str) -> list[Held]:
        return [self._endless(held) for held in super().held(key)]

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        for key, held in super().all_held(prefix):
            yield key, self._endless(held)

    def _endless(self, held: Held) -> Held:
        return held if self.renewed else replace(held, remaining=math.inf)
