"""What an attacker may have written: into messages, with access to the broker only, or into Redis, with access to
that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from celery_singleton_lock import SingletonTask, cleaned
from celery_singleton_lock.cli.listing import locks_table
from celery_singleton_lock.contrib.prometheus import LockCollector
from celery_singleton_lock.diagnosis import peers
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.keys.key import key_of_text
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.integration.conftest import LONG, Shop, until
from tests.integration.operators import ask
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Clears the screen, sets the title, and cannot be encoded.
EVIL = "\x1b[2J\x1b]0;owned\x07\ud800"

PREFIX = "singleton_lock"

#: Seconds of leases: no test here waits for the end of one, and a busy machine stops no process for so long.
TTL = 60.0

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


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
    registry.register(LockCollector.of(app))
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

    def test_a_number_as_an_id_breaks_no_display(self, shop: Shop) -> None:
        (worker,) = shop.start("one", concurrency=2)
        with shop.app.connection_for_write() as connection:
            for task_id in (7, 8):
                headers = {"id": task_id, "task": "tests.integration.app.exclusive", "lang": "py", "root_id": 7}
                headers["ignore_result"] = True  # Celery's own result backends fail with such an id.
                connection.SimpleQueue("celery").put([["report", 600.0], {}, {}], headers=headers, serializer="json")
        shop.record.wait_for(starts=1)
        journal = open_url(shop.conf["singleton_lock_backend"]).journal(PREFIX, size=10_000)
        until(lambda: {"7", "8"} & {entry.task_id for entry in journal.entries(since=0.0)})
        (line,) = [json.loads(text) for text in ask(shop, "list", "--json").stdout.splitlines()]
        assert line["task_id"] in ("7", "8")
        assert_harmless(say_all(shop))
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

    def test_headers_of_the_wrong_type_are_left_out(self, shop: Shop) -> None:
        """A copy of such a message could not be sent again, and kept its worker's slot forever."""
        shop.start("one", concurrency=2)
        holder = shop.send("exclusive", "report", LONG)
        shop.record.wait_for(starts=1)
        call = {"on_conflict": "retry"}
        with shop.app.connection_for_write() as connection:
            headers = {
                "id": "strange",
                "task": "tests.integration.app.exclusive",
                "headers": "abc",
                "singleton_lock": call,
            }
            connection.SimpleQueue("celery").put([["report", 0.01], {}, {}], headers=headers, serializer="json")
        until(lambda: "on_conflict=retry" in shop.log)
        shop.record.let_end("report")
        holder.get(timeout=LIMIT)
        assert shop.app.AsyncResult("strange").get(timeout=LIMIT) == "report"

    def test_the_lock_is_switched_off_where_workers_accept_that(
        self, shop_on: Callable[..., Shop], redis_server: RedisServer
    ) -> None:
        shop = shop_on(redis_server, singleton_lock_accept=["disable"])
        (worker,) = shop.start("one")
        shop.send("exclusive", "report", 600.0)
        shop.record.wait_for(starts=1)
        assert shop.send("exclusive", "report", 0.01, singleton_lock=False).get(timeout=LIMIT) == "report"
        with pytest.raises(Exception, match="singleton_lock_accept"):
            shop.send("exclusive", "report", singleton_lock={"wait": 1.0}).get(timeout=LIMIT)
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


#: The types that a key may have, each with a function that writes it.
KINDS: dict[str, Callable[[Any, bytes, bytes], Any]] = {
    "string": lambda client, key, junk: client.set(key, junk, ex=600),
    "list": lambda client, key, junk: client.rpush(key, junk, junk),
    "hash": lambda client, key, junk: client.hset(key, mapping={junk: junk, b"x": junk}),
    "set": lambda client, key, junk: client.sadd(key, junk),
    "zset": lambda client, key, junk: client.zadd(key, {junk: 1.0}),
    "stream": lambda client, key, junk: client.xadd(key, {junk: junk}),
}

junk = st.binary(max_size=300) | anything.map(lambda value: json.dumps(value).encode())

#: An owner and what comes after it.
values = junk.map(lambda content: b"0" * 32 + content) | junk


class TestRedis:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["run", "run:" + "9" * 5000, "fence", "waiting", "wake", "done:x:0.0"]),
                st.sampled_from(sorted(KINDS)),
                values,
            ),
            max_size=6,
        )
    )
    @example([("run", "string", b"0" * 32 + b"[" * 100_000)])
    @example([("run", "string", b"0" * 32 + b"[1e999,1e999,1e999,1e999,1e999,1e999,1e999,1e999,1e999]")])
    @example([("run", "string", b"0" * 32 + b'["a",7,8,9,"c",1,2,3,4]'), ("waiting", "list", b"")])
    def test_other_locks_are_listed_despite_any_foreign_value(
        self, redis_server: RedisServer, store: RedisStore, written: list[tuple[str, str, bytes]]
    ) -> None:
        key = key_of_text(PREFIX, "ours", "x")
        strange = key_of_text(PREFIX, "strange", "x")
        with redis_server.client(2) as client:
            client.flushdb()
            lease = store.acquire(LockRequest(key, new_owner(), ttl=60.0, holder=Holder("id", node="n", pid=1)))
            assert isinstance(lease, Lease)
            for part, kind, content in written:
                place = f"{strange}:{part}".encode()
                client.delete(place)
                KINDS[kind](client, place, content)
            found = list(store.all_held(PREFIX))
            assert key in [name for name, _ in found]
            for name, held in found:
                lock = HeldLock.of(name, held)
                assert locks_table([lock], keys=True).replace("\n", "").isprintable()
                json.dumps(lock.fields(), allow_nan=False)
            if not any(part.startswith("run") and kind != "string" for part, kind, _ in written):
                store.inspect(strange)
            client.flushdb()

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["counts", "entries", "refused"]),
                st.sampled_from(sorted(KINDS)),
                junk,
            ),
            max_size=5,
        )
    )
    @example([("counts", "hash", b"9" * 5000), ("refused", "hash", b"--5")])
    def test_the_journal_works_despite_any_foreign_value(
        self, redis_server: RedisServer, store: RedisStore, written: list[tuple[str, str, bytes]]
    ) -> None:
        from tests.contract.test_journal import NOW, refusal, run

        with redis_server.client(2) as client:
            client.flushdb()
            for part, kind, content in written:
                place = f"{PREFIX}:{{journal}}:{part}".encode()
                client.delete(place)
                KINDS[kind](client, place, content)
            journal = store.journal(PREFIX, size=100)
            journal.counts(), journal.refused(), list(journal.entries(since=0.0))
            before = journal.counts()
            in_a_row = journal.write({"a": 1, "b": 2}, [run(-2, -1), refusal()], now=NOW)
            assert in_a_row[0] == 0
            assert in_a_row[1] >= 1
            after = journal.counts()
            assert (after["a"], after["b"]) == (before.get("a", 0) + 1, before.get("b", 0) + 2)
            assert len(list(journal.entries(since=0.0))) >= 2
            client.flushdb()

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
        registry.register(LockCollector.of(app))
        assert 'singleton_lock_held_now{lock="job"} 1.0' in generate_latest(registry).decode()


class TestOthers:
    @given(
        anything | st.dictionaries(st.sampled_from(["version", "enabled", "backend", "prefix"]), anything, min_size=4)
    )
    def test_any_answer_of_a_worker_can_be_judged(self, told: object) -> None:
        own = {"version": "1", "enabled": True, "backend": "redis://h", "prefix": "p"}
        setup = peers._known(told)
        peer = peers.Peer("n", frozenset({"t"}), frozenset(), setup)
        for finding in peers.of_peer(peer, frozenset({"t"}), own):
            assert len(finding.text) < 2000
            assert cleaned.printable(finding.text).isprintable()

    @given(st.lists(anything))
    def test_any_list_of_tasks_can_be_sorted_out(self, told: list[Any]) -> None:
        for names in peers._sorted_out(told):
            assert all(len(name.encode()) <= cleaned.MAX_BYTES for name in names)
