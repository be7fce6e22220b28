"""A prepared command is the same as one that is packed anew."""

from __future__ import annotations

import pytest

from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.redis import lock_commands, stencil
from celery_singleton_lock.stores.redis.connection import packed
from celery_singleton_lock.stores.redis.keyspace import PlainKey

KEYS = ["singleton_lock:{task:ab}", "{", "ключ", *map(PlainKey, ["nightly", "a{b}c", "}x", "ü\x01\x02"])]
RECORDS = [None, Record("m", b"\x01\x02\xff", 60.0), Record("{[", b'["SUCCESS", 3600.0, true]\nnull', 0.5)]


def holder(number: int) -> Holder:
    return Holder("é\x01" * number, 0, "worker@host", 7, 1.5 * number, process="p/1/2", sending="s\x02", record="r\x03")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("ttl", [30.0, 0.1, 2])
def test_acquire_is_the_same_as_in_lock_commands(
    key: str, once: bool, waiting: bool, ttl: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 1):
        monkeypatch.setattr("celery_singleton_lock.clock.wall", lambda now=number: 1e9 * now)
        request = LockRequest(key, new_owner(), ttl, holder(number), waiting=waiting, once=once)
        name = new_owner()
        ready = stencil.acquire(request, name)
        assert ready is not None
        assert ready.by_digest == packed(lock_commands.acquire(request, name).by_digest)
        assert ready.by_text == lock_commands.acquire(request, name).by_text


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("slot", [0, None])
def test_free_is_the_same_as_in_lock_commands(key: str, record: Record | None, slot: int | None) -> None:
    for ttl in (30.0, 90.0, 30.0):
        hold = Hold(key, new_owner(), ttl=ttl, slot=slot)
        ready = stencil.free(hold, record)
        assert ready is not None
        assert ready.by_digest == packed(lock_commands.free(hold, record=record).by_digest)
        assert ready.by_text == lock_commands.free(hold, record=record).by_text


def test_results_of_all_lengths_share_a_stencil() -> None:
    stencil._for_free.cache_clear()
    for length in (1, 2, 7, 300, 4000):
        hold, record = Hold("k", new_owner(), ttl=30.0), Record("m", b"\x05" * length, 60.0)
        ready = stencil.free(hold, record)
        assert ready is not None
        assert ready.by_digest == packed(lock_commands.free(hold, record=record).by_digest)
    assert stencil._for_free.cache_info().misses == 1


def test_rare_calls_have_no_stencil() -> None:
    """They are packed as a whole."""
    owner, them = new_owner(), holder(1)
    rare = [
        LockRequest("k", owner, 30.0, them, limit=2),
        LockRequest("k", owner, 30.0, them, given_up=[new_owner()]),
        LockRequest("k", owner, 30.0, Holder("m", 1)),
        LockRequest("k", owner, 30.0, Holder("m", replaced=1)),
        LockRequest("", owner, 30.0, them),
    ]
    assert [stencil.acquire(request, new_owner()) for request in rare] == [None] * len(rare)
    assert stencil.free(Hold("k", owner, ttl=30.0, limit=2), None) is None
    assert stencil.free(Hold("k", owner, ttl=30.0, slot=1), None) is None
    assert stencil.free(Hold("k", owner, ttl=30.0), Record("m", b"", 60.0)) is None


def test_repeated_free_names_the_remaining_time_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the remaining time, readers compute how long ago the body ended."""
    hold, now = Hold("k", new_owner(), ttl=30.0), 1000.0
    monkeypatch.setattr("celery_singleton_lock.clock.now", lambda: now)
    ready = stencil.free(hold, Record("m", b"x", 60.0))
    now += 10
    assert ready is not None
    assert 50_000 in ready.again().args
