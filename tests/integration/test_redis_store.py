"""The lock on a real Redis that loses replies, forgets scripts, is full, has foreign values, or is gone."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from celery_singleton_lock import InvalidOption, LockUnavailable, clock
from tests.contract import inside
from tests.contract.inside import (
    Held,
    Hold,
    Holder,
    Lease,
    LockRequest,
    Record,
    Reservation,
    Store,
    new_owner,
    open_url,
)
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.servers import until

KEY = "probe:{job:1}"
TTL = 10.0
ME = Holder("my-task", 0, "worker@host", 42, 1000.0)


@pytest.fixture
def client(own_redis: RedisServer) -> Iterator[Redis]:
    with own_redis.client() as client:
        yield client


@pytest.fixture
def store(own_redis: RedisServer) -> Iterator[Store]:
    store = open_url(own_redis.url)
    yield store
    store.close()


def acquire(store: Store, *, ttl: float = TTL, limit: int = 1, holder: Holder = ME) -> Lease | Held:
    return store.acquire(LockRequest(KEY, new_owner(), ttl=ttl, holder=holder, limit=limit))


def taken(store: Store, *, ttl: float = TTL, limit: int = 1, holder: Holder = ME) -> Lease:
    lease = acquire(store, ttl=ttl, limit=limit, holder=holder)
    assert isinstance(lease, Lease)
    return lease


def is_answered(store: Store) -> bool:
    try:
        lease = acquire(store)
    except LockUnavailable:
        return False
    return isinstance(lease, Lease) and store.free(lease)


class TestLostReplies:
    def test_hung_server_costs_seconds_not_minutes(self, own_redis: RedisServer, store: Store) -> None:
        store.free(taken(store))
        own_redis.pause()
        started = clock.now()
        with pytest.raises(LockUnavailable):
            acquire(store)
        assert clock.now() - started < 15
        own_redis.resume()


class TestServer:
    def test_forgotten_scripts_are_sent_again(self, store: Store, client: Redis) -> None:
        lease = taken(store)
        client.script_flush()
        assert store.renew([lease], timeout=1) == [True]
        client.script_flush()
        assert store.free(lease)
        client.script_flush()
        taken(store)

    def test_fence_is_exact_beyond_the_digits_that_lua_prints(self, store: Store, client: Redis) -> None:
        client.set(inside.fence_counter(KEY), 2**53 - 10)
        assert taken(store).fence == 2**53 - 9

    @pytest.mark.parametrize("limit", [1, 2])
    def test_full_memory_refuses_an_acquire_and_lets_others_finish(
        self, store: Store, client: Redis, limit: int
    ) -> None:
        lease = taken(store, limit=limit)
        waiting = store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, waiting=True))
        assert isinstance(waiting, Held)
        client.config_set("maxmemory", 1)
        with pytest.raises(LockUnavailable, match=r"OOM|maxmemory"):
            store.acquire(LockRequest(f"{KEY}2", new_owner(), ttl=TTL, holder=ME))
        assert store.renew([lease], timeout=1) == [True]
        assert store.free(lease)

    def test_read_only_replica_is_reported(self, store: Store, client: Redis) -> None:
        client.replicaof("127.0.0.1", 1)
        with pytest.raises(LockUnavailable, match=r"ReadOnly|read only"):
            acquire(store)

    def test_minimal_acl_is_enough(self, own_redis: RedisServer, client: Redis) -> None:
        client.acl_setuser(
            "locks", enabled=True, passwords=["+secret"], keys=["probe:*"],
            categories=["+@read", "+@write", "+@scripting", "-@dangerous"],
            commands=["+time"],
        )  # fmt: skip
        store = open_url(f"redis://locks:secret@127.0.0.1:{own_redis.port}/0")
        lease = taken(store)
        assert isinstance(store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, waiting=True)), Held)
        assert store.renew([lease], timeout=1) == [True]
        assert dict(store.all_held("probe")).keys() == {KEY}
        with store.waiter(LockRequest(KEY, new_owner(), ttl=TTL, holder=ME)) as waiter:
            assert isinstance(waiter.wait(0.1), Held)
        assert store.free(lease, record=Record(ME.message, b"record", 60), reservation=Reservation(ME, 60))
        assert isinstance(store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, check_finished=True)), Record)
        with pytest.raises(LockUnavailable, match=r"NoPermission|permission"):
            store.acquire(LockRequest("elsewhere:{x}", new_owner(), ttl=TTL, holder=ME))
        store.close()

    def test_user_without_the_right_to_a_time_gets_an_error(self, store: Store, client: Redis) -> None:
        taken(store)
        client.acl_setuser("default", enabled=True, commands=["-pttl"])
        for look in (store.inspect, store.held):
            with pytest.raises(LockUnavailable, match="permission"):
                look(KEY)

    def test_wrong_password_is_reported_at_once_without_it(self, own_redis: RedisServer, client: Redis) -> None:
        client.config_set("requirepass", "right")
        store = open_url(f"redis://:wr0ng@127.0.0.1:{own_redis.port}/0")
        with pytest.raises(LockUnavailable, match="Authentication") as caught:
            acquire(store)
        assert "wr0ng" not in str(caught.value)
        client.config_set("requirepass", "")


class TestForeignValues:
    def test_value_of_another_type_is_a_clear_error(self, store: Store, client: Redis) -> None:
        client.rpush(f"{KEY}:run", "hello")
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            acquire(store)
        assert client.lrange(f"{KEY}:run", 0, -1) == ["hello"]

    def test_search_for_locks_passes_over_them(self, store: Store, client: Redis) -> None:
        taken(store)
        client.lpush("probe:other:run", "x")
        client.set("probe:text:run", "\x00" * 3)
        client.set("probe:{job:1}:fence", "1")
        found = dict(store.all_held("probe"))
        assert found.keys() == {KEY, "probe:text"}
        assert found["probe:text"].holder is None

    def test_record_of_another_type_does_not_count(self, store: Store, client: Redis) -> None:
        client.lpush(f"{KEY}:done:{ME.message}", "x")
        lease = store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, check_finished=True))
        assert isinstance(lease, Lease)
        assert store.free(lease, record=Record(ME.message, b"record", 60))

    @pytest.mark.parametrize("limit", [1, 3])
    def test_set_of_somebody_else_is_a_clear_error(self, store: Store, client: Redis, limit: int) -> None:
        theirs = {"a": 1.0, new_owner(): 2.0}
        client.zadd(f"{KEY}:run", theirs)
        with pytest.raises(LockUnavailable, match="did not write"):
            acquire(store, limit=limit)
        with pytest.raises(LockUnavailable, match="is not a lock"):
            store.held(KEY)
        hold = Hold(KEY, next(reversed(theirs)), ttl=TTL, limit=limit)
        assert store.renew([hold], timeout=1) == [False]
        assert not store.free(hold)
        assert client.zrange(f"{KEY}:run", 0, -1, withscores=True) == [*theirs.items()]
        assert client.ttl(f"{KEY}:run") == -1

    @pytest.mark.parametrize("theirs", ["hello", "0" * 32])
    def test_nobody_comes_beside_a_value_of_somebody_else(self, store: Store, client: Redis, theirs: str) -> None:
        client.set(f"{KEY}:run", theirs, px=60_000)
        found = acquire(store, limit=3)
        assert isinstance(found, Held)
        assert found.holder is None
        assert client.get(f"{KEY}:run") == theirs

    def test_nobody_comes_beside_a_hold_that_does_not_end(self, store: Store, client: Redis) -> None:
        taken(store)
        client.persist(f"{KEY}:run")
        assert isinstance(acquire(store, limit=3, holder=Holder("another")), Held)
        assert client.ttl(f"{KEY}:run") == -1

    def test_value_of_another_type_does_not_stop_the_renewal_of_others(self, store: Store, client: Redis) -> None:
        broken, good = taken(store), store.acquire(LockRequest(f"{KEY}2", new_owner(), ttl=TTL, holder=ME))
        assert isinstance(good, Lease)
        client.delete(f"{KEY}:run")
        client.rpush(f"{KEY}:run", "hello")
        assert store.renew([broken, good], timeout=1) == [False, True]

    def test_broken_fence_counter_counts_as_lost(self, store: Store, client: Redis) -> None:
        """Other locks share the counter: they must stay available."""
        counter, fences = inside.fence_counter(KEY), [0]
        for break_it in (lambda: client.set(counter, "hello"), lambda: client.lpush(counter, "x"), lambda: None):
            client.delete(counter)
            break_it()
            lease = taken(store)
            fences.append(lease.fence)
            assert client.get(counter) == str(lease.fence)
            again = store.acquire(LockRequest(KEY, lease.owner, ttl=TTL, holder=ME))
            assert isinstance(again, Lease)
            assert again.fence == lease.fence
            store.free(lease)
        assert fences == sorted(set(fences))


class TestConnections:
    @pytest.mark.parametrize(
        "url", ["redis://h:port", "redis://h/db/", "rediss://h?ssl_cert_reqs=maybe", "redis://h?socket_timeout=x"]
    )
    def test_url_that_cannot_be_read_is_refused(self, url: str) -> None:
        with pytest.raises(InvalidOption, match="singleton_lock_backend"):
            open_url(url)

    def test_unknown_transport_option_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match="sokcet_timeout"):
            open_url("redis://h", {"sokcet_timeout": 1})

    def test_database_of_the_url(self, own_redis: RedisServer) -> None:
        store = open_url(own_redis.url_of(7))
        taken(store)
        with own_redis.client(7) as client:
            assert client.exists(f"{KEY}:run")
        store.close()

    def test_spellings_of_kombu(self, own_redis: RedisServer) -> None:
        store = open_url(f"redis+socket://{own_redis.unix_socket}?virtual_host=/4")
        taken(store)
        with own_redis.client(4) as client:
            assert client.exists(f"{KEY}:run")
        store.close()

    def test_spelling_of_certificate_checks_in_kombu(self) -> None:
        store = open_url("rediss://h?ssl_cert_reqs=CERT_NONE")
        assert store._servers._options["ssl_cert_reqs"] == "none"

    def test_child_of_a_fork_does_not_use_the_connection_of_its_parent(self, store: Store) -> None:
        lease = taken(store)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if isinstance(acquire(store), Held) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert store.renew([lease], timeout=1) == [True]
        assert store.free(lease)

    def test_record_of_a_message_costs_no_round_trip(self, store: Store, client: Redis) -> None:
        store.free(taken(store))
        before = _calls(client)
        lease = store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, check_finished=True))
        assert isinstance(lease, Lease)
        store.free(lease, record=Record(ME.message, b"record", 60), reservation=Reservation(ME, 60))
        assert _calls(client) - before == 2


def _calls(client: Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
class TestTLS:
    @pytest.fixture
    def certificate(self, tmp_path: Path) -> Path:
        """A self-signed certificate for the loopback address, with its key."""
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "pem", "-out", tmp_path / "crt"],
            check=True, capture_output=True,
        )  # fmt: skip
        return tmp_path / "crt"

    @pytest.fixture
    def port(self, own_redis: RedisServer, certificate: Path) -> Iterator[int]:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, certificate.with_name("pem"))
        with LossyProxy(own_redis.port, tls=context) as proxy:
            yield proxy.port

    def test_certificate_is_checked(self, port: int, certificate: Path) -> None:
        url = f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=CERT_REQUIRED"
        store = open_url(url, {"ssl_ca_certs": str(certificate)})
        assert store.free(taken(store))
        store.close()

    def test_unknown_certificate_is_refused(self, port: int) -> None:
        store = open_url(f"rediss://127.0.0.1:{port}/0")
        with pytest.raises(LockUnavailable, match=r"(?i)certificate"):
            acquire(store)

    def test_client_certificate_is_shown(self, own_redis: RedisServer, certificate: Path) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificate))
        context.load_cert_chain(certificate, certificate.with_name("pem"))
        context.verify_mode = ssl.CERT_REQUIRED
        trust = {"ssl_ca_certs": str(certificate)}
        own = {"ssl_certfile": str(certificate), "ssl_keyfile": str(certificate.with_name("pem"))}
        with LossyProxy(own_redis.port, tls=context) as proxy:
            url = f"rediss://127.0.0.1:{proxy.port}/0"
            store = open_url(url, {**trust, **own})
            assert store.free(taken(store))
            store.close()
            with pytest.raises(LockUnavailable):
                acquire(open_url(url, trust))

    def test_redlock_on_tls(self, certificate: Path) -> None:
        """Its connections are non-blocking, for which TLS has its own errors."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, certificate.with_name("pem"))
        with ExitStack() as exits:
            servers = [exits.enter_context(RedisServer()) for _ in range(3)]
            proxies = [exits.enter_context(LossyProxy(server.port, tls=context)) for server in servers]
            url = ";".join(f"rediss://127.0.0.1:{proxy.port}/0" for proxy in proxies)
            store = open_url(url, {"ssl_ca_certs": str(certificate), "restart_delay": False})
            until(lambda: is_answered(store), "a majority has greeted with TLS")
            for _ in range(20):
                lease = taken(store)
                assert isinstance(acquire(store), Held)
                assert store.renew([lease], timeout=1.0) == [True]
                assert store.free(lease)
            store.close()
