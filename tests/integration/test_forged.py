"""What an attacker may have written: into messages, with access to the broker only, or into Redis, with access to
that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry, generate_latest

from celery_singleton_lock import SingletonTask, cleaned
from celery_singleton_lock.contrib.prometheus import LockCollector
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.integration.conftest import Shop, until
from tests.integration.operators import ask
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Clears the screen, sets the title, and cannot be encoded.
EVIL = "\x1b[2J\x1b]0;owned\x07\ud800"

PREFIX = "singleton_lock"

#: Seconds of leases: no test here waits for the end of one, and a busy machine stops no process for so long.
TTL = 60.0


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[RedisStore]:
    opened = open_url(redis_server.url_of(2))
    assert isinstance(opened, RedisStore)
    yield opened
    opened.close()


def say_all(shop: Shop) -> str:
    """What an operator sees of every command that reads what others wrote."""
    said = [ask(shop, *words) for words in (["list"], ["list", "--json"], ["stats"], ["stats", "--json"])]
    said.append(ask(shop, "timeline", "--output", "-"))
    for result in said:
        assert result.exit_code == 0, result.output
    registry = CollectorRegistry()
    app = Celery("shop", set_as_current=False)
    app.conf.update(shop.conf)
    registry.register(LockCollector(app))
    metrics = generate_latest(registry).decode()
    assert "singleton_lock_up 1.0" in metrics
    return "".join(result.output for result in said) + metrics


def assert_harmless(said: str) -> None:
    assert not [char for char in said if not char.isprintable() and char != "\n"]


class TestMessages:
    def test_evil_headers_of_a_refused_copy_break_no_display(self, shop: Shop) -> None:
        """A lone surrogate in a header broke the exporter and `locks stats` for 30 days."""
        (worker,) = shop.start("one", concurrency=3)
        shop.send("exclusive", "report", 600.0, task_id=f"holder-{EVIL[:-1]}")
        shop.record.wait_for(starts=1)
        for number in range(3):
            task_id, entry = f"{EVIL[:-1]}-{number}", [f"{EVIL}{number}", 7, {"a": ["b"]}][number]
            headers = {"singleton_lock": {"id": task_id, "entry": entry, "put_back": EVIL}}
            shop.send("exclusive", "report", headers=headers, task_id=task_id).get(timeout=LIMIT, propagate=False)
        journal = open_url(shop.conf["singleton_lock_backend"]).journal(PREFIX, size=10_000)
        until(lambda: len(list(journal.entries(since=0.0))) == 3)
        assert_harmless(said := say_all(shop))
        assert "\\x1b[2J" in said, "it is shown as what it is"
        worker.kill()

    def test_options_that_are_not_accepted_fail_clearly_and_the_worker_goes_on(self, shop: Shop) -> None:
        (worker,) = shop.start("one")
        shop.send("exclusive", "report", 600.0)
        shop.record.wait_for(starts=1)
        for call in (False, {"at_least_for": 86_400.0}, {"ttl": 7200.0}, {"wait": 1e300}, {"ttl": 10**400}):
            with pytest.raises(Exception, match="singleton_lock in a call of"):
                shop.send("exclusive", "report", singleton_lock=call).get(timeout=LIMIT)
        assert len(shop.record.runs("report")) == 1
        assert shop.send("exclusive", "honest").get(timeout=LIMIT) == "honest"
        worker.kill()


def _nothing() -> None: ...


class TestMemory:
    @pytest.mark.slow
    def test_memory_that_a_forger_fills_is_bounded(self, redis_server: RedisServer, store: RedisStore) -> None:
        """2,000 messages with ids and entries of 10 kB each made 120 MB and more."""
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update(singleton_lock_backend=redis_server.url_of(2), singleton_lock_done_ttl=0)
        task = app.task(name="t", base=SingletonTask, lock_key=[], shared=False)(_nothing)
        runtime = Runtime.of(app)
        with redis_server.client(2) as client:
            held = store.acquire(LockRequest(task.lock_key_of(), new_owner(), ttl=3600.0, holder=Holder("x" * 10_000)))
            assert isinstance(held, Lease)
            for number in range(2000):
                big = f"{number}-" + "é\x1b" * 5000
                headers = {"singleton_lock": {"id": big, "entry": big}}
                request = {"id": big, "is_eager": True, "delivery_info": {"is_eager": True}, "headers": headers}
                task.push_request(**request, called_directly=False, hostname=big)
                with pytest.raises(Exception, match="skipped"):
                    task()
                task.pop_request()
                if number % 200 == 0:
                    assert runtime.journal.write()
            assert runtime.journal.write()
            journal = f"{PREFIX}:{{journal}}:"
            fields = client.hgetall(f"{journal}counts")
            assert len(fields) < 20
            assert max(len(field.encode()) for field in fields) < 2 * cleaned.MAX_BYTES + 100
            totals: Counter[str] = Counter()
            for count, value in metrics.read(runtime.store.journal(PREFIX, size=100).counts()).items():
                totals[count.name] += value
            assert totals["conflicts"] == totals["refused_ticks"] == 2000, "nothing is lost"
            entries = [entry["e"] for _, entry in client.xrange(f"{journal}entries")]
            assert max(len(entry.encode()) for entry in entries) < 12 * cleaned.MAX_BYTES
            assert client.dbsize() <= 8
            for key in client.scan_iter():
                assert len(key) < 1000
                assert client.memory_usage(key, samples=0) < 4_000_000, key
            print({key: client.memory_usage(key, samples=0) for key in client.scan_iter()})
            assert store.free(held)
        runtime.store.close()


class TestRedis:
    def test_escape_sequences_in_redis_do_not_reach_a_terminal(self, shop: Shop) -> None:
        with shop.locks() as client:
            value = new_owner() + json.dumps([EVIL, EVIL, 0, EVIL, 1, 1.0, 0, EVIL, 30.0])
            client.set(f"{PREFIX}:1:{{{EVIL[:-1]}:x}}:run", value, px=60_000)
            client.hset(f"{PREFIX}:{{journal}}:refused", f"{EVIL[:-1]}", 7)
            client.hset(f"{PREFIX}:{{journal}}:counts", json.dumps(["refused_ticks", EVIL, EVIL]), 7)
            client.expire(f"{PREFIX}:{{journal}}:refused", 60)
            client.expire(f"{PREFIX}:{{journal}}:counts", 60)
        assert_harmless(say_all(shop))

    def test_read_only_user_is_enough_to_look(self, shop_on: Callable[..., Shop], own_redis: RedisServer) -> None:
        """As `docs/security.md` says."""
        with own_redis.client() as client:
            client.execute_command("ACL", "SETUSER", "watcher", "on", ">secret", f"~{PREFIX}:*", "+@read")
            client.set(f"{PREFIX}:1:{{job:x}}:run", new_owner() + Holder("id", node="n").dumps(60.0), px=60_000)
        shop = shop_on(own_redis, singleton_lock_backend=own_redis.url.replace("redis://", "redis://watcher:secret@"))
        for words in (["list"], ["stats"], ["show", f"{PREFIX}:1:{{job:{'0' * 32}}}"]):
            assert ask(shop, *words).exit_code == 0
        registry = CollectorRegistry()
        app = Celery("shop", set_as_current=False)
        app.conf.update(shop.conf)
        registry.register(LockCollector(app))
        assert 'singleton_lock_held_now{lock="job"} 1.0' in generate_latest(registry).decode()
