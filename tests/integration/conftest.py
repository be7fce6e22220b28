from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kombu import pools
from kombu.transport.redis import Channel

from celery_singleton_lock import clock
from tests.conftest import LASTING
from tests.integration.outside import client, make
from tests.integration.shops import Shop
from tests.integration.standing import Staff
from tests.patience import until
from tests.rabbitmq import RabbitMQ
from tests.recording import Record, Run
from tests.redis_server import RedisServer
from tests.servers import Cluster, Nodes, SentinelGroup

__all__ = ["Shop", "client", "make", "until"]


def quick_first(first: Any, *others: Any) -> list[Any]:
    """Parameters of a test: quick tests take the first value, slow tests all others. A tuple is several parameters."""
    each = [it if isinstance(it, tuple) else (it,) for it in others]
    return [first, *(pytest.param(*it, marks=pytest.mark.slow) for it in each)]


#: All pools; the first is the pool of processes, which most people use.
POOLS = quick_first("prefork", "gevent", "threads", "solo", "eventlet")


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes between opening and reading
        return False


def kill_child(run: Run) -> float:
    """Kill the process of a run; returns the time just before: its lock is freed as soon as the process is gone."""
    killed_at = clock.now()
    os.kill(run.pid, signal.SIGKILL)
    return killed_at


#: Seconds that a run takes if the test has to end it, see `Record.let_end`: longer than any test.
LONG = 300.0

#: Seconds of leases, unless a module or a test has others: a busy machine stops no process for a third of that.
TTL = 6.0

#: Options of a broker that counts a message as lost if it is not acknowledged within three seconds. Workers look for
#: such messages under a lock of kombu's: one that is killed meanwhile would keep the others away for five minutes.
FORGETFUL = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}


@contextmanager
def redelivering(shop: Shop) -> Iterator[None]:
    """Make the broker of a shop (see FORGETFUL) redeliver: before 5.7, kombu looked only every 100 s."""
    if hasattr(Channel, "unacked_restore_throttle"):
        yield
        return
    stopped = threading.Event()

    def restore() -> None:
        with shop.app.connection_for_write() as connection:
            while not stopped.wait(1):
                connection.default_channel.qos.restore_visible(num=10, interval=1)

    thread = threading.Thread(target=restore)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that the test's own thread starts, and not those of threads that earlier tests have left behind."""
    here, start, started = threading.current_thread(), threading.Thread.start, list[threading.Thread]()

    def noted(thread: threading.Thread) -> None:
        if threading.current_thread() is here:
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return started


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A server that tests share; each test has its own queues."""
    with RabbitMQ() as rabbitmq:
        yield rabbitmq


@pytest.fixture(scope="session")
def lasting_sentinels() -> Iterator[SentinelGroup]:
    """For `sentinels`."""
    with SentinelGroup() as group:
        yield group


@pytest.fixture(scope="session")
def lasting_cluster() -> Iterator[Cluster]:
    """For `cluster`."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def sentinels(lasting_sentinels: SentinelGroup) -> Iterator[SentinelGroup]:
    """A group that tests share; each test leaves it whole and empty."""
    yield lasting_sentinels
    lasting_sentinels.master().flush()


@pytest.fixture
def cluster(lasting_cluster: Cluster) -> Iterator[Cluster]:
    """As `sentinels`."""
    lasting_cluster.wait_until_ready()
    yield lasting_cluster
    lasting_cluster.flush()


@pytest.fixture(
    params=[
        "redlock",
        pytest.param("sentinels", marks=pytest.mark.xdist_group(LASTING["lasting_sentinels"])),
        pytest.param("cluster", marks=pytest.mark.xdist_group(LASTING["lasting_cluster"])),
    ]
)
def group(request: pytest.FixtureRequest) -> Iterator[Nodes | SentinelGroup | Cluster]:
    """Each kind of group; a test repairs what it breaks."""
    if request.param == "redlock":
        with Nodes() as nodes:
            yield nodes
    else:
        yield request.getfixturevalue(request.param)


@pytest.fixture
def shop_on(tmp_path: Path, request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Callable[..., Shop]]:
    """Make a shop on the given servers, with more settings. It must leave no eternal key on the shared server."""
    pools.reset()  # An earlier test may have cut the connections in them.
    with ExitStack() as exits:
        shops: list[Shop] = []

        def make(broker: RedisServer, *, locks: RedisServer | None = None, **conf: Any) -> Shop:
            full = {
                "broker_url": broker.url_of(0),
                "result_backend": broker.url_of(1),
                "singleton_lock_backend": (locks or broker).url_of(2),
                "singleton_lock_ttl": TTL,
                **conf,
            }
            shops.append(Shop(Record(tmp_path / "record"), tmp_path, full, broker.url_of(3), exits))
            return shops[-1]

        yield make
        if request.session.testsfailed:
            for worker in (worker for shop in shops for worker in shop.workers):
                print(f"---- {worker.name}\n{worker.log[-3000:]}")
    with redis_server.client(2) as locks:
        eternal = [key for key in locks.scan_iter() if locks.pttl(key) == -1]
    assert eternal == [], "keys without a time to live"


@pytest.fixture
def shop(request: pytest.FixtureRequest, redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop on the shared server. Its leases take as many seconds as the module's `TTL` says."""
    made: Shop = shop_on(redis_server, singleton_lock_ttl=getattr(request.module, "TTL", TTL))
    return made


@pytest.fixture(scope="module")
def staff(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staff]:
    """Workers that stay from one test to the next; another module has other settings, and idle workers cost time."""
    with RedisServer() as server:
        staff = Staff(request.session, server, tmp_path_factory.mktemp("staff"))
        yield staff
        staff.go()
