"""What every ledger promises: which beat may send a tick, and what was sent."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_singleton_lock import clock
from celery_singleton_lock.beat.claims import Claims
from celery_singleton_lock.beat.ticks import Tick
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.store import Ledger, Refused, Store
from tests.contract import inside
from tests.redis_server import RedisServer

KEY = "contract:{beat:1}"
TTL = 5.0
SHORT = 0.2
CEILING = 1_000_000


@pytest.fixture
def store(store_with_books: Store) -> Store:
    return store_with_books


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return store.ledger(KEY)


def claim(ledger: Ledger, entry: str, last: int, owner: str = "a", *, ttl: float = TTL) -> Refused | None:
    return ledger.claim(entry, last, owner, ttl=ttl, ceiling=CEILING)


def record(ledger: Ledger, entry: str, last: int, owner: str = "a") -> None:
    ledger.record({entry: last}, owner, ceiling=CEILING)


def align(ledger: Ledger, **lasts: int) -> dict[str, int]:
    return ledger.align(lasts, ceiling=CEILING)


def test_last_runs_are_shown_and_not_changed(ledger: Ledger) -> None:
    assert ledger.lasts() == {}
    align(ledger, x=10, y=20)
    record(ledger, "x", 15)
    assert ledger.lasts() == {"x": 15, "y": 20}
    assert ledger.lasts() == {"x": 15, "y": 20}


def test_first_beat_decides_an_unknown_last_run(ledger: Ledger) -> None:
    assert align(ledger, x=10, y=20) == {"x": 10, "y": 20}
    assert align(ledger, x=99, y=1) == {"x": 10, "y": 20}


def test_removed_entries_are_forgotten(ledger: Ledger) -> None:
    align(ledger, x=10, y=20)
    align(ledger, y=20)
    assert align(ledger, x=99, y=99) == {"x": 99, "y": 20}


def test_last_run_of_an_entry_that_was_just_removed_is_remembered(ledger: Ledger) -> None:
    """Another beat may have found it due before it was removed, and ask for its tick now."""
    record(ledger, "x", 20)
    record(ledger, "wrong", CEILING + 1)
    align(ledger, y=1)
    assert claim(ledger, "x", 10) == Refused(20, 0.0)
    assert claim(ledger, "wrong", 10) is None
    align(ledger, y=1)
    assert claim(ledger, "x", 10) == Refused(20, 0.0)


def test_entry_that_comes_back_starts_afresh(ledger: Ledger) -> None:
    record(ledger, "x", 20)
    align(ledger, y=1)
    assert align(ledger, x=30, y=1) == {"x": 30, "y": 1}
    assert claim(ledger, "x", 30) is None
    record(ledger, "x", 40)
    assert claim(ledger, "x", 10) == Refused(40, 0.0)


def test_tick_of_an_entry_that_comes_back_is_not_sent_twice(ledger: Ledger) -> None:
    """A beat whose file is older than that leads, after one with a schedule that lacks the entry."""
    record(ledger, "x", 20)
    record(ledger, "wrong", CEILING + 1)
    align(ledger, y=1)
    assert align(ledger, x=10, y=1, wrong=10) == {"x": 20, "y": 1, "wrong": 10}
    assert claim(ledger, "x", 10) == Refused(20, 0.0)
    assert claim(ledger, "wrong", 10) is None


def test_entry_that_comes_back_without_a_last_run_gets_its_old_one(ledger: Ledger) -> None:
    """For entries that a database keeps, only what was sent is recorded."""
    record(ledger, "x", 20)
    align(ledger, y=1)
    assert align(ledger, x=0, y=1) == {"x": 0, "y": 1}
    assert claim(ledger, "x", 10) == Refused(20, 0.0)
    assert claim(ledger, "x", 30) is None


def test_foreign_value_does_not_stop_other_entries(redis_server: RedisServer) -> None:
    with closing(open_url(redis_server.url_of(0), {})) as store, redis_server.client() as client:
        ledger = store.ledger(KEY)
        claim_of_x, gone_x = inside.beats_keys(KEY, "x")
        for key in (claim_of_x, gone_x):
            client.lpush(key, "a stranger's")
        assert [claim(ledger, entry, 10) for entry in ("x", "y")] == [None, None]
        client.delete(claim_of_x)
        client.lpush(claim_of_x, "a stranger's")
        ledger.record({"x": 20, "y": 20}, "a", ceiling=CEILING)
        assert align(ledger, x=0, y=0) == {"x": 20, "y": 20}
        ledger.unclaim(["x", "y"], "a")
        client.set(inside.beats_keys(KEY, "z")[0], "a stranger's, forever")
        assert claim(ledger, "z", 10) == Refused(None, TTL, "a stranger's, forever")


def test_claim_ends_with_its_ttl(ledger: Ledger) -> None:
    assert claim(ledger, "x", 10, "a", ttl=SHORT) is None
    clock.sleep(1.5 * SHORT)
    assert claim(ledger, "x", 10, "b") is None


def test_claim_that_is_taken_back_is_free_at_once(ledger: Ledger) -> None:
    assert claim(ledger, "x", 10, "a") is None
    assert claim(ledger, "y", 10, "b") is None
    ledger.unclaim(["x", "y", "z"], "a")
    assert claim(ledger, "x", 10, "c") is None
    assert claim(ledger, "y", 10, "c") is not None, "another beat's claim"


def test_claim_that_arrives_after_its_withdrawal_does_not_count(store: Store, ledger: Ledger) -> None:
    """A server that was silent carries out the pending requests in any order."""
    ledger.unclaim(["x"], "a")
    assert claim(ledger, "x", 10, "a") is not None
    assert claim(ledger, "x", 10, "b") is None


def test_schedule_may_be_large(ledger: Ledger) -> None:
    """On a Redlock nobody waits for a node to read: what is sent at once must fit into a socket's buffer."""
    lasts = {f"entry {number} {'x' * 200}": number + 1 for number in range(20_000)}
    assert ledger.align(lasts, ceiling=CEILING) == lasts
    few = dict(list(lasts.items())[:1000])
    ledger.record({entry: last + 1 for entry, last in few.items()}, "a", ceiling=CEILING)
    assert ledger.align(few, ceiling=CEILING) == {entry: last + 1 for entry, last in few.items()}
    assert ledger.align(lasts, ceiling=CEILING) == {entry: last + (entry in few) for entry, last in lasts.items()}


@pytest.mark.parametrize("entry", ["x:run", "x:run:1", "ünïcode {braces} *", "a\nb", " "])
def test_entry_may_have_any_name(store: Store, ledger: Ledger, entry: str) -> None:
    assert claim(ledger, entry, 10, "a") is None
    assert list(store.all_held("contract")) == [], "a claim is not a lock"
    record(ledger, entry, 20)
    assert claim(ledger, entry, 10, "b") == Refused(20, 0.0)
    align(ledger, other=1)
    assert list(store.all_held("contract")) == [], "nor is a removed entry"
    assert claim(ledger, entry, 10, "b") == Refused(20, 0.0)


def test_last_run_in_the_future_is_not_believed(ledger: Ledger) -> None:
    """Written by a host whose clock was wrong: the entry would not run until then."""
    record(ledger, "x", CEILING + 1, "a")
    assert claim(ledger, "x", 10, "b") is None
    record(ledger, "x", 20, "b")
    assert align(ledger, x=0) == {"x": 20}
    record(ledger, "x", CEILING + 1, "a")
    assert align(ledger, x=40) == {"x": 40}


def test_missing_server_is_reported(own_redis: RedisServer) -> None:
    store = open_url(own_redis.url)
    own_redis.kill()
    with pytest.raises(LockUnavailable):
        claim(store.ledger(KEY), "x", 10)


def test_foreign_value_is_an_error_and_stays(redis_server: RedisServer) -> None:
    store = open_url(redis_server.url)
    with redis_server.client(0) as client:
        client.set(f"{KEY}:ledger", "foreign")
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            claim(store.ledger(KEY), "x", 10)
        client.delete(f"{KEY}:ledger")
        client.hset(f"{KEY}:ledger", "x", "nonsense")
        assert align(store.ledger(KEY), x=7) == {"x": 7}
    store.close()
    redis_server.flush()


def test_claim_that_a_silent_server_carries_out_later_delays_nobody(own_redis: RedisServer) -> None:
    store = open_url(own_redis.url, {"socket_timeout": 0.2})
    beats = [Claims(store.ledger(KEY), ttl=600.0) for _ in range(2)]
    tick = Tick("x", 10, 20, 20, None)
    own_redis.pause()
    with pytest.raises(LockUnavailable):
        beats[0].take(tick)
    with pytest.raises(LockUnavailable):
        beats[0].settle()
    own_redis.resume()
    beats[0].settle()
    assert beats[1].take(tick) is None
    refused = beats[0].take(tick)
    assert refused is not None
    assert refused.remaining > 0
    store.close()


def test_redlock_goes_on_with_a_majority(redis_server: RedisServer) -> None:
    urls = [redis_server.url_of(number) for number in range(3)] + ["redis://127.0.0.1:1", "redis://127.0.0.1:2"]
    store = open_url(";".join(urls), {"restart_delay": False})
    ledger = store.ledger(KEY)
    assert claim(ledger, "x", 10) is None
    record(ledger, "x", 20)
    assert claim(ledger, "x", 10, "b") == Refused(20, 0.0)
    with redis_server.client(0) as client:
        client.flushdb()  # A node that lost everything: the others remember.
    assert claim(ledger, "x", 10, "b") == Refused(20, 0.0)
    store.close()
    redis_server.flush()


def test_node_that_has_lost_its_ledger_does_not_take_ticks_for_sent(redis_server: RedisServer) -> None:
    """A beat that starts passes the present as the last run: a missed tick would never be made up for."""
    store = open_url(";".join(map(redis_server.url_of, range(3))), {"restart_delay": False})
    ledger = store.ledger(KEY)
    for number in range(3):
        record(ledger, "x", 10 * (number + 1))
        with redis_server.client(number) as client:
            client.flushdb()
        assert align(ledger, x=99) == {"x": 10 * (number + 1)}
        assert claim(ledger, "x", 10 * (number + 1)) is None
    store.close()
    redis_server.flush()


def test_unused_ledger_expires(redis_server: RedisServer) -> None:
    store = open_url(redis_server.url)
    align(store.ledger(KEY), x=10, y=20)
    align(store.ledger(KEY), x=10)
    claim(store.ledger(KEY), "x", 10)
    with redis_server.client(0) as client:
        assert all(client.pttl(key) > 0 for key in client.scan_iter())
    store.close()
    redis_server.flush()


class _Beats(RuleBasedStateMachine):
    """Beats that claim, send, die and forget, compared with what is true of each entry."""

    ENTRIES = ("x", "y")
    OWNERS = ("a", "b", "c")
    store: Store

    @initialize()
    def begin(self) -> None:
        self.ledger = self.store.ledger(f"model:{{{new_owner()}}}")
        self.sent = dict.fromkeys(self.ENTRIES, 0)
        self.claimed: dict[str, tuple[str, int]] = {}

    @rule(entry=st.sampled_from(ENTRIES), owner=st.sampled_from(OWNERS), back=st.integers(0, 2))
    def claim(self, entry: str, owner: str, back: int) -> None:
        """With a last run that may be outdated."""
        last = max(self.sent[entry] - back, 0)
        refused = claim(self.ledger, entry, last, owner)
        claimer = self.claimed.get(entry, (owner, 0))[0]
        if self.sent[entry] > last:
            assert refused == Refused(self.sent[entry], 0.0)
        elif claimer != owner:
            assert refused is not None
            assert refused.last is None
        else:
            assert refused is None
            self.claimed[entry] = owner, last

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), sets=st.integers(1, 3))
    def record(self, data: st.DataObject, sets: int) -> None:
        entry = data.draw(st.sampled_from(sorted(self.claimed)))
        owner, last = self.claimed.pop(entry)
        record(self.ledger, entry, last + sets, owner)
        self.sent[entry] = max(self.sent[entry], last + sets)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(sorted(self.claimed)))
        record(self.ledger, entry, 0, self.claimed.pop(entry)[0])

    @invariant()
    def last_runs_are_known(self) -> None:
        if hasattr(self, "sent"):
            assert self.ledger.align(dict.fromkeys(self.ENTRIES, 0), ceiling=CEILING) == self.sent


def test_model(store: Store) -> None:
    class Beats(_Beats):
        pass

    Beats.store = store
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    run_state_machine_as_test(
        Beats, settings=settings(max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=checks)
    )


def test_one_of_many_threads_gets_each_tick(store: Store) -> None:
    granted: list[tuple[int, str]] = []
    start = threading.Barrier(8)

    def contend(owner: str) -> None:
        ledger = store.ledger(KEY)
        start.wait()
        for last in range(20):
            while (refused := claim(ledger, "x", last, owner)) is not None and refused.last is None:
                clock.sleep(0.001)
            if refused is None:
                granted.append((last, owner))
                record(ledger, "x", last + 1, owner)

    threads = [threading.Thread(target=contend, args=(f"owner {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [last for last, _ in granted] == list(range(20))
