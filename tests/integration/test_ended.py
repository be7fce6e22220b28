"""What stays on a server of messages that have ended, and of locks that are free."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest
from celery import Celery, states
from redis import Redis

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Record
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.task.ends import Outcome, read
from celery_singleton_lock.task.message import record_name
from tests.bench import Bench
from tests.contract.store_contract.asking import taken
from tests.patience import LIMIT
from tests.redis_server import RedisServer

KEY = "ended:1:{job:1}"
FENCE = KEY + keyspace.FENCE


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

    def test_record_says_at_last_that_all_was_sent(self, redis_server: RedisServer, client: Redis) -> None:
        """In a process where nobody else listens to Celery's signals."""
        program = f"""
from celery import Celery
from celery.app.trace import build_tracer
from celery_singleton_lock import SingletonTask
from celery_singleton_lock.runtime import write_all
app = Celery("told", broker="memory://", backend="cache+memory://", singleton_lock_backend="{redis_server.url}")
@app.task(base=SingletonTask, name="report")
def report(): ...
trace = build_tracer(report.name, report, app=app)
request = dict(id="one", hostname="w", retries=0, delivery_info=dict(redelivered=False), is_eager=False)
request |= dict(args=(), kwargs={{}}, called_directly=False, headers={{}}, root_id="one", parent_id=None)
trace("one", (), {{}}, request)
write_all()
"""
        subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)
        (name,) = client.scan_iter(match="*:done:*")
        found, _ = read(Record("one", client.get(name).encode(), client.ttl(name)))
        assert (found.state, found.settled) == (states.SUCCESS, True)

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
        assert [*client.scan_iter()] == [nightly + keyspace.FENCE] == ["{nightly}:fence"]


class TestFences:
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
