"""The harness that races the textbook schemes finds their faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import race
from benchmarks.schemes import SCHEMES
from tests.redis_server import RedisServer


@pytest.fixture(autouse=True)
def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that do not end while a busy machine stops a process."""
    monkeypatch.setattr(race, "TTL", 3.0)


def course(name: str, server: RedisServer) -> race.Course:
    return race.Course(SCHEMES[name], [server], ttl=race.TTL)


@pytest.mark.parametrize("name", SCHEMES)
def test_each_scheme_excludes_when_nothing_goes_wrong(own_redis: RedisServer, name: str) -> None:
    """Nor may a busy machine stop a process for as long as its lock lasts."""
    assert race.race(replace(course(name, own_redis), ttl=60.0)).startswith("0 of")


@pytest.mark.parametrize(
    ("name", "found"), [("SETNX + EXPIRE", "stuck"), ("INCR + EXPIRE", "stuck"), ("SET NX PX + Lua", "–")]
)
def test_holder_dies_between_two_commands(own_redis: RedisServer, name: str, found: str) -> None:
    assert race.killed_within_acquire(course(name, own_redis)) == found


@pytest.mark.parametrize(
    ("name", "found"), [("SET NX PX + DEL", "deletes the other's"), ("SET NX PX + Lua", "leaves it alone"),
                        ("`Lock`", "leaves it alone")],
)  # fmt: skip
def test_release_by_a_late_holder(own_redis: RedisServer, name: str, found: str) -> None:
    assert race.paused_holder(course(name, own_redis))["its release then"] == found


def test_lock_is_kept_while_its_holder_keeps_working(own_redis: RedisServer) -> None:
    assert race.long_work(course("SET NX PX + Lua", own_redis)) == "second holder in"
    own_redis.flush()
    assert race.long_work(course("`Lock`", own_redis)) == "kept"
