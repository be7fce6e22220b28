"""The promises of a lock outside of tasks that is used in odd ways: tokens, other ttls, lost answers, forks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import LockError
from redis.sentinel import Sentinel

from celery_singleton_lock import Lock, Redlock, clock
from celery_singleton_lock.lock import MAX_TIMEOUT, NotAcquired, NotHeld, NoTimeout, NotOwned, Unavailable
from tests.integration.conftest import quick_first
from tests.integration.outside import NAME, RENEWED
from tests.patience import LIMIT
from tests.proxy import LossyProxy
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

    def test_shorter_ttl_counts_without_an_answer(self, own_redis: RedisServer, client: Redis) -> None:
        lock = Lock(client, NAME, timeout=60)
        lock.acquire()
        own_redis.pause()
        for seconds in (600, 10):
            with pytest.raises(Unavailable):
                lock.extend(seconds, replace_ttl=True)
        held = lock.local.held
        assert held is not None
        assert held.lease.ttl == 10
        assert held.lease.remaining < 10, "the server may carry it out yet"
        own_redis.resume()
        assert lock.reacquire()
        assert held.lease.ttl == 10, "the earlier one may still arrive"
        lock.release()

    def test_shorter_ttl_without_an_answer_is_renewed_in_time(self, own_redis: RedisServer, client: Redis) -> None:
        with LossyProxy(own_redis.port) as proxy:
            lock = Lock(Redis(port=proxy.port), NAME, timeout=60)
            with lock:
                lock.reacquire()  # The server knows the scripts from now on.
            lock.acquire()
            proxy.lose(1000)
            with pytest.raises(Unavailable):
                lock.extend(RENEWED, replace_ttl=True)
            assert 0 < client.pttl(NAME) <= RENEWED * 1000
            proxy.lose(0)
            assert not Lock(client, NAME).acquire(blocking_timeout=2 * RENEWED)
            lock.check()
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


def test_release_does_not_forget_what_another_thread_has_acquired_meanwhile(
    make: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = make(timeout=60, thread_local=False)
    lock.acquire()
    store = lock._heartbeat.store
    release = store.free

    def released(*arguments: object, **options: object) -> bool:
        answer = release(*arguments, **options)  # type: ignore[arg-type]
        monkeypatch.undo()
        other = threading.Thread(target=lock.acquire)
        other.start()
        other.join(LIMIT)
        return answer

    monkeypatch.setattr(store, "free", released)
    lock.release()
    assert not lock.lost
    lock.check()
    lock.release()


@pytest.mark.parametrize("thread_local", [True, False])
def test_acquire_that_raises_leaves_no_lock(
    make: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch, thread_local: bool
) -> None:
    """A signal's handler raises between noting the hold and returning: nobody would release it."""
    lock = make(timeout=60, thread_local=thread_local)
    hold = lock._hold

    def interrupted(*noted: Any) -> None:
        hold(*noted)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupts:
        interrupts.setattr(lock, "_hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    assert not lock.locked()
    assert lock.local.token is None
    with lock:
        assert lock.owned()


class TestReleaseWithoutAnAnswer:
    def test_repeating_it_is_a_success(self, own_redis: RedisServer, client: Redis) -> None:
        with LossyProxy(own_redis.port) as proxy:
            lock = Lock(Redis(port=proxy.port), NAME, timeout=60)
            with lock:
                lock.reacquire()  # The server knows the scripts from now on.
            lock.acquire()
            proxy.lose(1000)
            with pytest.raises(Unavailable):
                lock.release()
            assert not client.exists(NAME)
            proxy.lose(0)
            lock.release()
            with pytest.raises(NotHeld):
                lock.release()

    def test_lock_counts_as_lost_meanwhile(self, own_redis: RedisServer, make: Callable[..., Lock]) -> None:
        """The lock is freed as soon as the server answers: extending it would be in vain."""
        lock = make(timeout=60)
        lock.acquire()
        own_redis.pause()
        with pytest.raises(Unavailable):
            lock.release()
        assert lock.lost
        own_redis.resume()
        for use in (lock.reacquire, lambda: lock.extend(60), lock.check):
            with pytest.raises(NotOwned):
                use()
        lock.release()

    def test_it_fails_if_the_lock_was_lost_before(self, own_redis: RedisServer, client: Redis) -> None:
        lost = threading.Event()
        lock = Lock(client, NAME, timeout=RENEWED, on_lost=lambda lock: lost.set())
        lock.acquire()
        client.delete(NAME)
        assert lost.wait(LIMIT)
        own_redis.pause()
        with pytest.raises(Unavailable):
            lock.release()
        own_redis.resume()
        with pytest.raises(NotOwned):
            lock.release()

    def test_it_fails_if_the_lock_and_the_first_answer_were_lost(self, own_redis: RedisServer, client: Redis) -> None:
        """The store repeats the release by itself, and finds the lock gone."""
        lost = threading.Event()
        with LossyProxy(own_redis.port) as proxy:
            lock = Lock(Redis(port=proxy.port), NAME, timeout=RENEWED, on_lost=lambda lock: lost.set())
            with lock:
                lock.reacquire()  # The server knows the scripts from now on.
            lock.acquire()
            client.delete(NAME)
            assert lost.wait(LIMIT)
            proxy.lose(1)
            with pytest.raises(NotOwned):
                lock.release()


class TestWithoutAnEnd:
    """Somebody has removed the key's time to live (PERSIST)."""

    def test_conflict_says_so(self, client: Redis) -> None:
        client.set(NAME, "a stranger's")
        with pytest.raises(NotAcquired, match="never expires"), Lock(client, NAME, blocking=False):
            pass


class TestNotGot:
    """Nothing is left of an acquire that failed."""

    def test_acquire_without_an_answer_is_given_up_by_the_store_alone(
        self, own_redis: RedisServer, make: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sending it once more would take as long again."""
        lock = make(timeout=10)
        with lock:
            pass
        abandoned: list[object] = []
        store: object = lock._heartbeat.store
        monkeypatch.setattr(store, "abandon", abandoned.append)
        own_redis.pause()
        with pytest.raises(Unavailable):
            lock.acquire(blocking=False)
        own_redis.resume()
        assert abandoned == []
        until(lambda: not lock.locked(), "nothing is left of it")
        assert lock.acquire(blocking_timeout=LIMIT)
        lock.release()

    def test_lock_that_nobody_would_renew_is_free(
        self, make: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def start(*_: object, **__: object) -> None:
            raise RuntimeError("can't start new thread")

        lock = make(timeout=60)
        with monkeypatch.context() as patch:
            patch.setattr(lock._heartbeat, "start", start)
            with pytest.raises(RuntimeError, match="new thread"):
                lock.acquire()
        assert lock.local.token is None
        assert not lock.locked()
        with lock:
            pass


class TestClients:
    """What the locks of a client share goes with it."""

    def test_locks_of_one_client_share_threads_and_connections(
        self, own_redis: RedisServer, client: Redis, started: list[threading.Thread]
    ) -> None:
        with own_redis.client() as watching:
            before = watching.info("clients")["connected_clients"]
            locks = [Lock(client, str(number), timeout=30) for number in range(300)]
            assert all(lock.acquire() for lock in locks)
            assert len(started) <= 2, "one renews, and one watches"
            assert watching.info("clients")["connected_clients"] <= before + 2
            for lock in locks:
                lock.release()

    def test_nothing_is_left_of_them(self, own_redis: RedisServer) -> None:
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
            until(lambda: heartbeats() == 0, "the thread has ended")

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

    def test_nothing_is_left_of_that_of_a_cluster(self, cluster: Cluster) -> None:
        logged_in: list[object] = []
        gone: list[Callable[[], object]] = []
        for _ in range(3):
            client = RedisCluster("127.0.0.1", cluster.servers[0].port, redis_connect_func=logged_in.append)
            opened = len(logged_in)
            with Lock(client, NAME) as lock:
                assert len(logged_in) > opened, "our own connections do as the client's"
            gone += [weakref.ref(client), weakref.ref(lock._heartbeat)]
        logged_in.clear()
        del client, lock
        until(lambda: gc.collect() is None or not any(it() for it in gone), "they are gone")

    def test_of_a_redlock_are_not_kept_alive_by_each_other(self) -> None:
        clients = [Redis(port=port) for port in (1, 2, 3)]
        Redlock(clients, NAME)
        pools = [weakref.ref(client.connection_pool) for client in clients]
        del clients[1:]
        gc.collect()
        assert [pool() for pool in pools] == [clients[0].connection_pool, None, None]

    def test_handler_of_a_signal_takes_a_lock_while_the_first_one_is_made(self, own_redis: RedisServer) -> None:
        taken, is_inside = [0], [False]

        class Interrupted(dict[str, Any]):
            """The handler comes whenever somebody looks at it."""

            def items(self) -> Any:
                if not is_inside[0]:
                    is_inside[0] = True
                    with Lock(Redis(port=own_redis.port, client_name=f"{taken}"), "of the handler"):
                        taken[0] += 1
                    is_inside[0] = False
                return super().items()

        client = Redis(port=own_redis.port, client_name="interrupted")
        client.connection_pool.connection_kwargs = Interrupted(client.connection_pool.connection_kwargs)
        with Lock(client, NAME):
            assert taken[0] > 0

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

    def test_asynchronous_one_cannot_make_it(self) -> None:
        with pytest.raises(TypeError, match=r"thread_local=False.*asyncio\.to_thread"):
            redis.asyncio.Redis().lock(NAME, lock_class=Lock)  # type: ignore[arg-type]

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


def heartbeats() -> int:
    return sum(it.name in ("singleton-lock-heartbeat", "singleton-lock-watchdog") for it in threading.enumerate())


class TestRedlock:
    def test_same_client_is_refused(self, client: Redis) -> None:
        with pytest.raises(ValueError, match=r"3 clients of 127\.0\.0\.1:|3 clients of localhost:"):
            Redlock([client, client, client], NAME)

    def test_same_server_is_refused(self, own_redis: RedisServer) -> None:
        clients = [*(Redis(port=own_redis.port, db=number) for number in (0, 1)), Redis(port=1)]
        with pytest.raises(ValueError, match="2 clients of localhost"):
            Redlock(clients, NAME)

    def test_servers_with_sockets_in_one_directory_are_not_the_same(self, tmp_path: Path) -> None:
        clients = [Redis(unix_socket_path=str(tmp_path / name)) for name in "abc"]
        Redlock(clients, NAME)
        with pytest.raises(ValueError, match=rf"2 clients of {tmp_path / 'a'};"):
            Redlock([*clients[:2], clients[0]], NAME)

    def test_client_of_a_cluster_is_refused(self, cluster: Cluster) -> None:
        with cluster.client() as client, pytest.raises(TypeError, match=r"RedisCluster; allowed: redis\.Redis$"):
            Redlock([client, client, client], NAME)

    def test_same_master_of_sentinels_is_refused(self) -> None:
        clients = [Sentinel([("127.0.0.1", 1)]).master_for("mymaster") for _ in range(3)]
        with pytest.raises(ValueError, match=r"3 clients of mymaster of 127\.0\.0\.1:1"):
            Redlock(clients, NAME)


class TestBesideTheLockOfRedisPy:
    """Neither starves: redis-py's release wakes nobody, so our waiter looks as often as redis-py's does."""

    @pytest.mark.parametrize("pause", [0.1, 0.02])
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

    def test_both_kinds_of_waiters_get_it(self, client: Redis) -> None:
        """There are as many waiters of each kind; the time between two holds is left to chance, as in a program."""
        grants = {"ours": 0, "theirs": 0}
        over, mutex = threading.Event(), threading.Lock()

        def work(kind: str) -> None:
            lock = Lock(client, NAME, timeout=30) if kind == "ours" else client.lock(NAME, timeout=30)
            while not over.is_set():
                if lock.acquire(blocking_timeout=1.0):
                    with mutex:
                        grants[kind] += 1
                    lock.release()
                over.wait(0.02)

        threads = [threading.Thread(target=work, args=(kind,)) for kind in grants for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: min(grants.values()) >= 20, f"both got it: {grants}")
        over.set()
        for thread in threads:
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

    def test_child_may_take_it_with_the_same_object(self, make: Callable[..., Lock]) -> None:
        lock = make(timeout=30)
        lock.acquire()
        lock.release()

        def in_child() -> bool:
            with lock:
                return lock.owned()

        assert forked(in_child)
        with lock:
            pass

    @pytest.mark.parametrize("what", quick_first("hold", "make", "write"))
    def test_no_child_hangs_whatever_other_threads_do(self, own_redis: RedisServer, what: str) -> None:
        over = threading.Event()
        work = {"make": self.make_locks, "hold": self.hold_locks, "write": self.write_the_journal}[what]
        threads = [threading.Thread(target=work, args=(own_redis.port, over, number)) for number in range(3)]
        for thread in threads:
            thread.start()

        def in_child() -> bool:
            with Lock(Redis("127.0.0.1", own_redis.port), f"of the child {os.getpid()}", timeout=5) as lock:
                lock.extend(10)
                return lock.owned()

        try:
            for _ in range(40):
                assert forked(in_child)
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def make_locks(self, port: int, over: threading.Event, number: int) -> None:
        while not over.is_set():
            Lock(Redis(port=port, client_name=f"{number}-{clock.now()}"), NAME)

    def hold_locks(self, port: int, over: threading.Event, number: int) -> None:
        while not over.is_set():
            # So short that renewals are under way, and that the lease may end on a slow machine.
            lock = Lock(Redis(port=port), f"{number}", timeout=0.1)
            with suppress(NotOwned, Unavailable), lock:
                lock.reacquire()

    def write_the_journal(self, port: int, over: threading.Event, number: int) -> None:
        from celery import Celery

        from celery_singleton_lock import SingletonTask
        from celery_singleton_lock.runtime import write_all

        app = Celery(set_as_current=False)
        app.conf.update(singleton_lock_backend=f"redis://127.0.0.1:{port}/1")

        @app.task(base=SingletonTask, name=f"task {number}")
        def nothing() -> None: ...

        while not over.is_set():
            nothing.apply()
            write_all()


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
