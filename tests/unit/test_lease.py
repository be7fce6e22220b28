from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from celery_singleton_lock import LockLost, clock
from celery_singleton_lock.holder import OWNER_LENGTH, Holder, new_owner
from celery_singleton_lock.lease import Lease, unheld
from celery_singleton_lock.stores.redis.keyspace import PlainKey

TTL = 10.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until the test moves it."""
    time = [100.0]
    monkeypatch.setattr(clock, "now", lambda: time[0])
    return time


def lease(sent_at: float) -> Lease:
    return Lease("k", "o", ttl=TTL, fence=1, sent_at=sent_at)


def test_trust_counts_from_the_request_not_from_the_answer(now: list[float]) -> None:
    slow = lease(sent_at=95.0)
    assert slow.remaining < TTL - 5


def test_clock_drift_is_subtracted(now: list[float]) -> None:
    assert lease(100.0).remaining == pytest.approx(TTL - TTL * 0.01 - 0.002)


def test_lease_ends_by_itself(now: list[float]) -> None:
    held = lease(100.0)
    assert held.held
    now[0] += TTL
    assert not held.held
    with pytest.raises(LockLost, match="ended"):
        held.check()


def test_slow_renewal_does_not_extend_trust(now: list[float]) -> None:
    held = lease(100.0)
    now[0] = 109.0
    held.extend(sent_at=101.0)
    assert held.remaining < TTL - 8


def test_lost_lease_is_not_held_however_much_time_is_left(now: list[float]) -> None:
    held = lease(100.0)
    held.lose("taken over")
    assert not held.held
    with pytest.raises(LockLost, match="taken over"):
        held.check()


def test_unheld_has_the_lowest_fence() -> None:
    assert unheld().fence == 0
    assert not unheld().held


def test_owners_differ_and_have_the_same_length() -> None:
    owners = {new_owner() for _ in range(100)}
    assert len(owners) == 100
    assert {len(owner) for owner in owners} == {OWNER_LENGTH}


def test_holder_survives_a_round_trip() -> None:
    holder = Holder("id", 3, "celery@höst", 12, 1.5)
    assert Holder.loads(holder.dumps()) == holder


@pytest.mark.parametrize("text", [b"", b"x", b"[]", b"{}", b"null", b'["a", "b", "c", "d", "e"]', b"\xff"])
def test_foreign_holder_is_unknown(text: bytes) -> None:
    assert Holder.loads(text) is None


def test_clock_does_not_go_back() -> None:
    readings = [clock.now() for _ in range(1000)]
    assert readings == sorted(readings)


def slot_of(key: str) -> int:
    return key_slot(key.encode())


@given(st.one_of(st.text("{}ab:", max_size=12), st.text()))
@example("job}")
@example("a{")
@example("{}x")
@example("a{b}c")
@example("{{a}}")
@example("}{a}")
@example("{}{a}")
@example("a{}{b}")
@example("")
def test_keys_beside_a_lock_are_in_the_slot_of_its_name(name: str) -> None:
    """By the rule of Redis Cluster: the text between the first brace and the next closing one, unless it is empty."""
    beside = {slot_of(f"{PlainKey(name).base}:{what}") for what in ("fence", "wake", "over:{a}", "run:1", "done:}{")}
    assert beside == {slot_of(name)}


@given(st.text("{}a0", max_size=8))
def test_prefix_of_the_keys_beside_a_lock_contains_its_name(name: str) -> None:
    """So no two names share such keys."""
    assert name in PlainKey(name).base
