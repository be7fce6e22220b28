"""Locks outside of tasks, on a real server: what redis-py's lock does, and what it does not do."""

from __future__ import annotations

import functools
import inspect
import pickle
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import redis.lock
from redis import Redis
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError, LockError, LockNotOwnedError

from celery_singleton_lock import Lock, LockConflict, LockLost, LockUnavailable, Semaphore, clock
from celery_singleton_lock.lock import NotAcquired, NotHeld, NotOwned, Unavailable
from celery_singleton_lock.stores.redis import keyspace
from tests.integration.outside import NAME, RENEWED
from tests.patience import LIMIT
from tests.redis_server import RedisServer
from tests.servers import Cluster, until

ROOT = Path(__file__).parents[2]

#: Has the waiters of the lock.
WAITING = keyspace.PlainKey(NAME) + keyspace.WAITING


class TestDropIn:
    def test_constructor_takes_what_redis_pys_takes(self) -> None:
        theirs, ours = (inspect.signature(cls.__init__).parameters for cls in (redis.lock.Lock, Lock))
        assert [*theirs] == [*ours][: len(theirs)]
        assert {name: it.default for name, it in theirs.items()} == {name: ours[name].default for name in theirs}

    def test_methods_take_what_redis_pys_take(self) -> None:
        for name in ("acquire", "release", "extend", "reacquire", "owned", "locked"):
            theirs, ours = (inspect.signature(getattr(cls, name)).parameters for cls in (redis.lock.Lock, Lock))
            assert [(it.name, it.default) for it in theirs.values()] == [(it.name, it.default) for it in ours.values()]

    def test_client_makes_it(self, client: Redis) -> None:
        with client.lock(NAME, timeout=5, lock_class=Lock) as lock:
            assert isinstance(lock, Lock)
            assert lock.owned()

    def test_it_and_redis_pys_lock_exclude_each_other(self, client: Redis) -> None:
        """Both are in use during a rolling deploy."""
        ours, theirs = Lock(client, NAME), client.lock(NAME, timeout=5)
        assert ours.acquire()
        assert not theirs.acquire(blocking=False)
        ours.release()
        assert theirs.acquire()
        assert not ours.acquire(blocking=False)
        with pytest.raises(NotAcquired), Lock(client, NAME, blocking=False):
            pass
        theirs.release()

    def test_cluster_client_makes_it(self, cluster: Cluster) -> None:
        with cluster.client() as client:
            for number in range(10):
                with Lock(client, f"{NAME} {number}") as lock:
                    assert client.exists(lock.name)
                    assert not Lock(client, lock.name).acquire(blocking=False)

    def test_decoding_client_makes_it(self, own_redis: RedisServer) -> None:
        with own_redis.client() as client, Lock(client, NAME) as lock:
            assert lock.owned()

    def test_errors_are_redis_pys_too(self) -> None:
        assert issubclass(NotHeld, LockError)
        assert issubclass(NotAcquired, (LockConflict, LockError))
        assert issubclass(NotOwned, LockNotOwnedError)
        assert issubclass(NotOwned, LockLost)
        assert issubclass(Unavailable, ConnectionError)
        assert issubclass(Unavailable, LockUnavailable)

    @pytest.mark.parametrize("error", [NotHeld("x"), NotOwned("k", "r"), NotAcquired("k", "t", 1.0), Unavailable("s")])
    def test_errors_survive_pickle(self, error: Exception) -> None:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.args) == (type(error), str(error), error.args)


def test_code_of_the_documentation_runs(own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "Redis", functools.partial(Redis, port=own_redis.port))
    fences: list[int] = []
    for page in ("README.md", "docs/locks.md"):
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            if "Lock" in block:
                exec(block, {"write_report": lambda fence: fences.append(fence), "export": lambda: None})
    assert len(fences) == 2


class TestHolding:
    def test_only_one_holds_it(self, make: Callable[..., Lock]) -> None:
        one, other = make(), make()
        assert one.acquire()
        assert one.owned()
        assert one.locked()
        assert not other.owned()
        assert other.locked()
        assert not other.acquire(blocking=False)
        assert not other.acquire(blocking_timeout=0.1)
        one.release()
        assert not other.locked()
        assert other.acquire()
        other.release()

    def test_it_can_expire(self, make: Callable[..., Lock]) -> None:
        lock = make(timeout=1.5, renew=False)
        lock.acquire()
        with make() as other:
            assert lock.lost
            with pytest.raises(NotOwned):
                lock.check()
            with pytest.raises(LockNotOwnedError):
                lock.release()
            assert other.owned()

    def test_extend_and_reacquire(self, make: Callable[..., Lock]) -> None:
        lock = make(timeout=1.5, renew=False)
        lock.acquire()
        assert lock.extend(60)
        clock.sleep(1.6)
        assert lock.owned()
        assert lock.reacquire()
        assert make().acquire(blocking_timeout=LIMIT)
        for method in (lambda: lock.extend(1), lock.reacquire, lock.release):
            with pytest.raises(LockNotOwnedError):
                method()

    def test_unheld_lock_is_not_released(self, make: Callable[..., Lock]) -> None:
        lock = make()
        for method in (lock.release, lambda: lock.extend(1), lock.reacquire, lock.check):
            with pytest.raises(NotHeld, match="this thread does not hold it"):
                method()

    def test_another_thread_does_not_hold_it(self, make: Callable[..., Lock]) -> None:
        lock = make()
        lock.acquire()
        assert in_thread(lambda: (lock.owned(), lock.fence)) == (False, 0)
        assert in_thread(lambda: error_of(lock.release)) is NotHeld
        lock.release()

    def test_another_thread_may_release_it_where_that_is_wanted(self, make: Callable[..., Lock]) -> None:
        lock = make(thread_local=False)
        lock.acquire()
        assert in_thread(lambda: error_of(lock.release)) is None
        assert not lock.locked()

    def test_lock_that_was_there_until_its_release_was_not_lost(self, make: Callable[..., Lock], client: Redis) -> None:
        """A process that was frozen no longer trusts its lease; on the server the lease had some time left."""
        lock = make()
        lock.acquire()
        lock.local.lease.lose("the lease ended")
        assert lock.lost
        lock.release()
        assert not lock.locked()
        with pytest.raises(NotHeld):
            lock.release()

    def test_loss_is_reported_at_once(self, make: Callable[..., Lock], client: Redis) -> None:
        lost = threading.Event()
        lock = make(timeout=RENEWED, on_lost=lambda lock: lost.set())
        lock.acquire()
        client.flushall()
        assert lost.wait(LIMIT)
        assert lock.lost
        with pytest.raises(NotOwned, match="no longer has it"):
            lock.check()

    @pytest.mark.parametrize("timeout", [0, 0.0004, -1, float("nan")])
    def test_timeout_that_cannot_be_renewed_is_refused(self, make: Callable[..., Lock], timeout: float) -> None:
        with pytest.raises(ValueError, match=r"allowed: 0\.1 seconds or more"):
            make(timeout=timeout)

    @pytest.mark.parametrize("timeout", [0.5, 1.9, None])
    def test_timeout_is_kept_exactly(self, make: Callable[..., Lock], client: Redis, timeout: float | None) -> None:
        began = clock.now()
        with make(timeout=timeout, renew=False):
            left = client.pttl(NAME) / 1000
            assert (timeout or 30) - (clock.now() - began) - 0.01 <= left <= (timeout or 30)

    def test_seeded_random_numbers_make_no_equal_tokens(self, client: Redis) -> None:
        tokens = []
        for _ in range(2):
            random.seed(0)
            with Lock(client, NAME) as lock:
                tokens.append(lock.local.token)
        assert tokens[0] != tokens[1]


def in_thread(call: Callable[[], object]) -> object:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]


def error_of(call: Callable[[], object]) -> type[BaseException] | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return type(error)
    return None


class TestSemaphore:
    def test_lower_limit_counts_present_holders(self, client: Redis) -> None:
        """During a rolling deploy: holders that came under the higher limit count."""
        made = [Semaphore(client, NAME, 5, timeout=30) for _ in range(5)]
        assert all(one.acquire(blocking=False) for one in made)
        late = Semaphore(client, NAME, 2, timeout=30)
        for left in (4, 3, 2):
            made[4 - left].release()
            assert not late.acquire(blocking=False), f"{left} hold it"
        made[3].release()
        assert late.acquire(blocking=False)
        assert late.owned()
        assert made[4].owned()
        late.release()
        made[4].release()

    def test_limit_is_checked(self, client: Redis) -> None:
        with pytest.raises(ValueError, match="limit of semaphore"):
            Semaphore(client, NAME, 0)


class TestWaiting:
    def queue(self, make: Callable[..., Lock], count: int, client: Redis, got: list[int]) -> list[threading.Thread]:
        """Start waiters one by one."""
        threads = []
        for number in range(count):

            def wait(number: int = number) -> None:
                with make():
                    got.append(number)

            threads.append(threading.Thread(target=wait))
            threads[-1].start()
            until(lambda expected=number + 1: client.zcard(WAITING) == expected, "it waits")
            clock.sleep(0.005)  # Places are in the order of milliseconds.
        return threads

    def test_waiters_are_woken_in_their_order(self, make: Callable[..., Lock], client: Redis) -> None:
        got: list[int] = []
        lock = make()
        lock.acquire()
        threads = self.queue(make, 8, client, got)
        lock.release()
        for thread in threads:
            thread.join()
        assert got == [*range(8)]

    def one(self, client: Redis, number: int, got: list[int]) -> list[threading.Thread]:
        def wait() -> None:
            with Lock(client, NAME):
                got.append(number)

        thread = threading.Thread(target=wait)
        thread.start()
        return [thread]

    def test_waiting_outlasts_the_clients_socket_timeout(self, own_redis: RedisServer) -> None:
        client = Redis(port=own_redis.port, socket_timeout=0.5)
        lock, other = Lock(client, NAME), Lock(client, NAME)
        lock.acquire()
        assert not other.acquire(blocking_timeout=1.5)
        lock.release()


class TestWhatBreaksOtherLocks:
    def test_many_locks_take_two_threads_and_few_connections(self, client: Redis) -> None:
        threads, before = set(threading.enumerate()), client.info("clients")["connected_clients"]
        locks = [Lock(client, f"lock {number}", timeout=RENEWED) for number in range(1000)]
        assert all(lock.acquire() for lock in locks)
        clock.sleep(RENEWED + 0.5)
        assert all(not lock.lost for lock in locks)
        started = [thread.name for thread in set(threading.enumerate()) - threads]
        # One renews, and one watches; and there may be one of a lock that an earlier test has lost.
        assert len(started) <= 3, started
        assert client.info("clients")["connected_clients"] <= before + 2
        for lock in locks:
            lock.release()

    def test_lost_lock_does_not_hide_the_error_of_the_work(self, client: Redis) -> None:
        with pytest.raises(ZeroDivisionError), Lock(client, NAME):
            client.flushall()
            raise ZeroDivisionError

    def test_name_that_cannot_be_sent_is_refused(self) -> None:
        """Its calls, repeated in the background, kept those of other locks from being sent."""
        with pytest.raises(ValueError, match="surrogates not allowed"):
            Lock(Redis(), "\ud800")

    def test_login_that_is_not_there_is_no_answer(self, redis_server: RedisServer) -> None:
        """Redis-py asks the program for it, whose own errors may be anything."""

        class Away(CredentialProvider):
            def get_credentials(self) -> NoReturn:
                raise LookupError("the token service is away")

        lock = Lock(Redis(port=redis_server.port, credential_provider=Away()), "report")
        with pytest.raises(Unavailable, match="LookupError while connecting: the token service is away"):
            lock.acquire()
