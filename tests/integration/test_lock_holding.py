"""The promises of a lock outside of tasks that is used in odd ways: tokens, other ttls, lost answers, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable

import pytest
import redis.asyncio
from redis import Redis
from redis.exceptions import LockError
from redis.sentinel import Sentinel

from celery_singleton_lock import Lock, Redlock, clock
from celery_singleton_lock.lock import MAX_TIMEOUT, NotAcquired, NotHeld, NoTimeout, Unavailable
from tests.integration.outside import NAME, RENEWED
from tests.patience import LIMIT
from tests.redis_server import RedisServer
from tests.servers import Cluster, until


class TestToken:
    def test_hold_cannot_be_given_to_another_object(self, make: Callable[..., Lock]) -> None:
        lock, other = make(timeout=30), make(timeout=30)
        with pytest.raises(ValueError, match=r"the token of lock 'nightly report' is 'x'; allowed: None"):
            lock.acquire(token="x")
        lock.acquire()
        with pytest.raises(AttributeError):
            other.local.token = lock.local.token  # type: ignore[misc]
        assert not other.owned()
        with pytest.raises(NotHeld):
            other.release()
        assert lock.owned()
        lock.release()


class TestAnotherTtl:
    @pytest.mark.parametrize("how", ["extend", "reacquire"])
    def test_shorter_ttl_is_renewed_in_time(self, make: Callable[..., Lock], how: str) -> None:
        lost = threading.Event()
        lock = make(timeout=60, on_lost=lambda lock: lost.set())
        lock.acquire()
        if how == "extend":
            lock.extend(RENEWED, replace_ttl=True)
        else:
            lock.timeout = RENEWED
            lock.reacquire()
        assert not make().acquire(blocking_timeout=RENEWED + 1.0)
        lock.check()
        assert not lost.is_set()
        lock.release()

    @pytest.mark.parametrize("replace", [False, True])
    def test_nonsense_is_refused_and_harms_nobody(self, client: Redis, replace: bool) -> None:
        lost = threading.Event()
        others = [Lock(client, str(number), timeout=RENEWED, on_lost=lambda lock: lost.set()) for number in range(5)]
        assert all(other.acquire() for other in others)
        lock = Lock(client, NAME, timeout=60)
        lock.acquire()
        for seconds in (float("inf"), float("nan"), 10**400, -61, True, "1", None, MAX_TIMEOUT + 1):
            with pytest.raises(ValueError, match=r"allowed: a number after which it lasts for 0\.1 seconds or more"):
                lock.extend(seconds, replace_ttl=replace)
        clock.sleep(RENEWED + 0.2)
        assert lock.owned()
        assert not lost.is_set()
        for other in [*others, lock]:
            other.check()
            other.release()

    @pytest.mark.parametrize("timeout", [float("inf"), 10**400, True, "10", MAX_TIMEOUT + 1])
    def test_invalid_timeout_is_refused(self, client: Redis, timeout: float) -> None:
        with pytest.raises(ValueError, match="timeout of lock"):
            Lock(client, NAME, timeout=timeout)

    def test_zero_does_not_end_it(self, client: Redis) -> None:
        lock = Lock(client, NAME, timeout=60)
        lock.acquire()
        with pytest.raises(ValueError, match="to end it, release it"):
            lock.extend(0, replace_ttl=True)
        assert lock.extend(-1)
        lock.release()

    def test_lock_without_a_timeout_has_none_to_extend(self, make: Callable[..., Lock]) -> None:
        lock = make()
        for method in (lambda: lock.extend(1), lock.reacquire):
            with pytest.raises(NotHeld):
                method()
        lock.acquire()
        for method in (lambda: lock.extend(1), lock.reacquire):
            with pytest.raises(NoTimeout, match="without a timeout") as raised:
                method()
            assert isinstance(raised.value, LockError)
        assert lock.owned()
        lock.release()


class TestWithoutAnEnd:
    """Somebody has removed the key's time to live (PERSIST)."""

    def test_conflict_says_so(self, client: Redis) -> None:
        client.set(NAME, "a stranger's")
        with pytest.raises(NotAcquired, match="never expires"), Lock(client, NAME, blocking=False):
            pass


class TestClients:
    """What the locks of a client share goes with it."""

    def test_nothing_is_left_of_them(self, own_redis: RedisServer) -> None:
        others = heartbeats()
        with own_redis.client() as watching:
            before = watching.info("clients")["connected_clients"]
            pools = []
            for number in range(20):
                client = Redis(port=own_redis.port, client_name=f"another-{number}")
                pools.append(weakref.ref(client.connection_pool))
                with Lock(client, NAME):
                    pass
            del client
            until(lambda: gc.collect() is None or all(pool() is None for pool in pools), "the pools are gone")
            until(lambda: watching.info("clients")["connected_clients"] <= before, "their connections are closed")
            until(lambda: heartbeats() <= others, "the threads have ended")

    def test_locks_of_clients_that_connect_in_other_ways_are_others(self, own_redis: RedisServer) -> None:
        one, other = (Redis(port=own_redis.port, db=number) for number in (0, 1))
        with Lock(one, NAME):
            assert not Lock(one, NAME).acquire(blocking=False)
            with Lock(other, NAME):
                pass

    def test_options_that_are_changed_in_place_count_from_the_next_connection(
        self, client: Redis, own_redis: RedisServer
    ) -> None:
        """A password that expires, say."""
        with Lock(client, NAME):
            client.connection_pool.connection_kwargs["client_name"] = "another"
        with own_redis.client() as other:
            other.client_kill_filter(_type="normal", skipme=True)
            with Lock(client, NAME):
                assert "another" in [it["name"] for it in other.client_list()]

    def test_error_names_the_master_that_sentinels_know(self) -> None:
        lock = Lock(Sentinel([("127.0.0.1", 1), ("127.0.0.1", 2)]).master_for("mymaster"), NAME)
        with pytest.raises(Unavailable, match=r"^lock server mymaster of 127\.0\.0\.1:1,127\.0\.0\.1:2: "):
            lock.acquire()

    def test_lock_outlives_its_client(self, own_redis: RedisServer) -> None:
        # Longer than garbage collection takes in a process that has run all other tests: it stops the heartbeat, too.
        lock = Redis(port=own_redis.port).lock(NAME, timeout=RENEWED, lock_class=Lock)
        lock.acquire()
        gc.collect()
        clock.sleep(RENEWED + 1.0)
        lock.check()
        lock.release()

    @pytest.mark.parametrize("kind", ["Redis", "RedisCluster"])
    def test_asynchronous_one_is_refused(self, kind: str) -> None:
        cls = {"Redis": redis.asyncio.Redis, "RedisCluster": redis.asyncio.RedisCluster}[kind]
        client = cls(host="127.0.0.1", port=1)
        with pytest.raises(TypeError, match=rf"redis\.asyncio\..*{kind}; allowed: redis\.Redis or redis\.RedisCluster"):
            Lock(client, NAME)

    def test_coroutine_calls_it_in_threads(self, client: Redis) -> None:
        """Each call may be in another one."""

        async def work() -> None:
            await asyncio.gather(*(asyncio.to_thread(clock.sleep, 0.05) for _ in range(4)))
            for _ in range(10):
                lock = Lock(client, NAME, thread_local=False)
                assert await asyncio.to_thread(lock.acquire)
                await asyncio.to_thread(lock.release)

        asyncio.run(work())

    def test_other_things_are_refused(self) -> None:
        with pytest.raises(TypeError, match=r"a lock's client is builtins\.str"):
            Lock("redis://localhost", NAME)


@pytest.mark.parametrize("thread_local", [True, False])
def test_hold_ends_with_its_object(make: Callable[..., Lock], thread_local: bool) -> None:
    """At once: the garbage may never be collected."""
    lock = make(timeout=60, thread_local=thread_local)
    lock.acquire()
    watched = lock._heartbeat.watched
    (lease,) = (it.lease for it in watched.values())
    gc.disable()
    try:
        del lock
        assert lease() is None
        assert watched == {}, "its threads may end"
    finally:
        gc.enable()


def heartbeats() -> set[threading.Thread]:
    names = ("singleton-lock-heartbeat", "singleton-lock-watchdog")
    return {it for it in threading.enumerate() if it.name in names}


class TestRedlock:
    def test_same_server_is_refused(self, own_redis: RedisServer) -> None:
        clients = [*(Redis(port=own_redis.port, db=number) for number in (0, 1)), Redis(port=1)]
        with pytest.raises(ValueError, match="2 clients of localhost"):
            Redlock(clients, NAME)

    def test_client_of_a_cluster_is_refused(self, cluster: Cluster) -> None:
        with cluster.client() as client, pytest.raises(TypeError, match=r"RedisCluster; allowed: redis\.Redis$"):
            Redlock([client, client, client], NAME)

    def test_same_master_of_sentinels_is_refused(self) -> None:
        clients = [Sentinel([("127.0.0.1", 1)]).master_for("mymaster") for _ in range(3)]
        with pytest.raises(ValueError, match=r"3 clients of mymaster of 127\.0\.0\.1:1"):
            Redlock(clients, NAME)


class TestBesideTheLockOfRedisPy:
    """Neither starves: redis-py's release wakes nobody, so our waiter looks as often as redis-py's does."""

    @pytest.mark.parametrize("pause", [0.1])
    def test_it_is_acquired_soon_after_redis_pys_lock_was_freed(self, client: Redis, pause: float) -> None:
        theirs, ours = client.lock(NAME, timeout=600), Lock(client, NAME)
        assert theirs.acquire()
        got = threading.Event()

        def take() -> None:
            assert ours.acquire(sleep=pause)
            got.set()
            ours.release()

        thread = threading.Thread(target=take)
        thread.start()
        # Otherwise it would look every four seconds, and at the end of the lease.
        until(lambda: client.info("clients")["blocked_clients"], "it waits")
        clock.sleep(0.3)
        before = client.info("commandstats")["cmdstat_pttl"]["calls"]
        clock.sleep(1.0)
        assert client.info("commandstats")["cmdstat_pttl"]["calls"] > before + 2, "it looks who has it"
        theirs.release()
        assert got.wait(LIMIT)
        thread.join()


class TestFork:
    def test_child_holds_no_lock_of_its_parent(self, make: Callable[..., Lock]) -> None:
        lock = make(timeout=30)
        lock.acquire()

        def in_child() -> bool:
            refused = 0
            for method in (lock.release, lock.reacquire, lambda: lock.extend(1), lock.check):
                try:
                    method()
                except NotHeld as error:
                    refused += "the parent process" in str(error)
            told = (lock.owned(), lock.locked(), lock.fence, lock.lost, lock.local.token)
            return refused == 4 and told == (False, True, 0, False, None) and not lock.acquire(blocking=False)

        assert forked(in_child)
        assert lock.owned()
        lock.release()


def forked(work: Callable[[], bool]) -> bool:
    """Whether a forked child that does this ends, and successfully."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(60)  # A child that hangs is killed.
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
