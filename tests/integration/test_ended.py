"""What stays on a server of messages that have ended, and of locks that are free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from celery import Celery, states
from redis import Redis

from celery_singleton_lock import LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.task.ends import Outcome
from celery_singleton_lock.task.message import record_name
from tests.bench import Bench, Sent
from tests.contract.store_contract.asking import ME, ask, taken
from tests.redis_server import RedisServer
from tests.servers import until

KEY = "ended:1:{job:1}"
FENCE = keyspace.fence_key(KEY)
RECORD = Record(ME.message, b"record", 60.0)


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    store = open_url(redis_server.url)
    assert isinstance(store, RedisStore)
    yield store
    store.close()
    redis_server.flush()


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Redis]:
    with redis_server.client() as client:
        yield client


def content_found(store: RedisStore) -> bytes:
    found = ask(store, key=KEY, holder=ME, check_finished=True)
    assert isinstance(found, Record)
    return found.content


class TestEnds:
    def test_late_record_does_not_replace_a_newer_one(self, store: RedisStore, client: Redis) -> None:
        """Another worker, which has the message's end since then, may be sending the next tasks."""
        lease = taken(store, key=KEY, holder=ME)
        store.remember(KEY, RECORD._replace(content=b"newer", seconds=600.0))
        store._servers.run(lock_commands.free(lease, record=RECORD).again(repeated=True))
        assert content_found(store) == b"newer"
        assert 590_000 < client.pttl(keyspace.done_key(KEY, ME.message)) <= 600_000, "its age is that of the newer end"

    def test_record_is_sent_again_if_there_was_no_room(self, store: RedisStore, client: Redis) -> None:
        lease = taken(store, key=KEY, holder=ME)
        store.abandon(lease)
        client.config_set("maxmemory", 1)
        try:
            store.remember(KEY, RECORD)
            with pytest.raises(LockUnavailable):
                store.free(lease, record=RECORD)
        finally:
            client.config_set("maxmemory", 0)
        until(lambda: not store._outbox, "it was repeated")
        assert content_found(store) == RECORD.content

    def test_lock_is_not_reserved_for_a_message_that_has_ended(self, store: RedisStore) -> None:
        following = replace(ME, retries=1)
        store.remember(KEY, RECORD._replace(message=following.message))
        store.free(taken(store, key=KEY, holder=ME), reservation=Reservation(following, 60.0))
        assert store.held(KEY) == []


class TestWhatIsLeft:
    def test_of_a_message_is_one_small_key(self, store: RedisStore, client: Redis) -> None:
        key, task_id = "singleton_lock:1:{shop.rebuild:29a0445b522f48344b5fa4579cbe1d1a}", str(uuid4())
        holder = Holder(task_id, record=record_name("shop.rebuild", task_id, "a sending"))
        ended = Outcome(states.SUCCESS, settled=True).record_of(holder, 3600.0)
        store.free(taken(store, key=key, holder=holder), record=ended)
        left, _ = sorted(client.scan_iter(), key=lambda name: name.endswith(":fence"))
        assert 3590 < client.ttl(left) <= 3600
        assert client.memory_usage(left) <= 180

    def test_message_asks_once_and_leaves_its_record_as_it_frees(
        self, redis_server: RedisServer, client: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = Celery("asks", broker="memory://", set_as_current=False)
        app.conf.update(singleton_lock_backend=redis_server.url, singleton_lock_journal=0)
        bench = Bench(app, monkeypatch)
        task = bench.task(ignore_result=True)
        bench.deliver(bench.send(task))  # The server knows the scripts from here on.
        message = bench.send(task)
        assert self.cost_of(lambda: bench.deliver(message), client) == (2, {"done", "fence"})
        assert self.cost_of(task, client) == (0, set()), "a direct call"

    def cost_of(self, run: Callable[[], object], client: Redis) -> tuple[int, set[str]]:
        """How many scripts the server runs for it, and the kinds of keys that it leaves."""
        client.flushdb()
        client.config_resetstat()
        run()
        calls = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
        kinds = {name.rpartition("}:")[2].partition(":")[0] for name in client.scan_iter()}
        return calls.get("cmdstat_evalsha", 0) + calls.get("cmdstat_eval", 0), kinds

    def test_of_a_named_lock_is_its_counter(self, store: RedisStore, client: Redis) -> None:
        nightly = keyspace.PlainKey("nightly")
        store.free(taken(store, key=nightly))
        assert [*client.scan_iter()] == [keyspace.fence_key(nightly)] == ["{nightly}:fence"]


class TestFences:
    def test_grow_beyond_the_last_one(self, store: RedisStore, client: Redis) -> None:
        """On a server whose clock was set back."""
        client.set(FENCE, 2**52)
        fences = []
        for _ in range(2):
            lease = taken(store, key=KEY)
            fences.append(lease.fence)
            store.free(lease)
        assert fences == [2**52 + 1, 2**52 + 2]

    def test_are_kept_until_the_clock_has_caught_up(self, store: RedisStore, client: Redis) -> None:
        """The clock was set back by a day: ten minutes later, the time is still below the fences."""
        ahead = 24 * 3600
        seconds, microseconds = client.time()
        client.set(FENCE, (seconds + ahead) * 10**6 + microseconds)
        taken(store, key=KEY)
        assert ahead * 1000 < client.pttl(FENCE) <= (ahead + 600) * 1000

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "x", str(2**63)])
    def test_foreign_value_is_replaced(self, store: RedisStore, client: Redis, value: str) -> None:
        client.set(FENCE, value)
        fence = taken(store, key=KEY).fence
        assert 10**15 < fence < 2**53
        assert client.get(FENCE) == str(fence)

    def test_last_one_is_known_when_the_lock_is_free(self, store: RedisStore) -> None:
        lease = taken(store, key=KEY)
        assert store.inspect(KEY).fence == lease.fence
        store.free(lease)
        assert store.inspect(KEY).fence == lease.fence

    def test_hold_that_is_given_back_is_found_by_its_holder(self, store: RedisStore) -> None:
        """The call that undoes an acquire does not know its fence."""
        lease = taken(store, key=KEY, holder=ME)
        request = LockRequest(KEY, lease.owner, ttl=lease.ttl, holder=ME)
        assert store._servers.run(lock_commands.undo(request)) == 1
        assert store.held(KEY) == []


def test_result_of_an_earlier_task_with_this_id_is_not_that_of_a_retry(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("ended", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_backend = redis_server.url
    bench, copies = Bench(app, monkeypatch), list[Sent]()

    def body() -> None:
        bench.deliver(copy)
        copies.append(bench.put_back())
        task.retry(countdown=100)

    task = bench.task(body, on_conflict="join")
    first, copy = bench.send(task), bench.send(task)
    before = (datetime.now(timezone.utc) - timedelta(minutes=5)).isoformat()
    bench.stored(first, {"status": "SUCCESS", "result": "old", "date_done": before})
    bench.deliver(first)
    assert bench.deliver(copies[0]) == "PENDING"
    redis_server.flush()
