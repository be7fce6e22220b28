from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import closing

import hypothesis  # Else its plugin does at the very end, when results are being torn down (gh-106905).
import pytest
from celery import _state
from celery.result import AsyncResult

from celery_singleton_lock import clock, runtime
from celery_singleton_lock.runtime import write_all
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.memory import MemoryStore
from tests.redis_server import RedisServer

# It unsubscribes from within the garbage collector: it tries for long to reach a server that ended with its test, and
# waits, before Celery 5.7, for a lock that its own thread holds.
del AsyncResult.__del__

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In a shell's background; every program that a test starts and interrupts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Servers that take seconds to start, and the tests' group (see `xdist_group`) in which they are started once.
LASTING = {
    "lasting_cluster": "cluster",
    "lasting_sentinels": "sentinels",
    "migrated": "django",
    "rabbitmq": "rabbitmq",
}

#: Folders of tests that wait for servers and workers; the others have short tests.
WAITING = ("contrib", "integration")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        for server in LASTING.keys() & {*getattr(item, "fixturenames", ())}:
            item.add_marker(pytest.mark.xdist_group(LASTING[server]))
        groups = sorted({mark.args[0] for mark in item.iter_markers("xdist_group")})
        # pytest-xdist 3.8 notes the group where pytest 9.2 does not look for it any more (pytest-xdist's issue 1386).
        if groups and getattr(config.option, "loadgroup", False) and hasattr(item, "_id"):
            item._id = type(item._id).parse(f"{item.nodeid}@{'_'.join(groups)}")
    yield
    if hasattr(config, "workerinput"):
        # With a long test at the very end, one process would run alone. Those before keep their mixed order: while long
        # tests wait, short ones use the processor.
        last = len(items) * 3 // 5
        items[last:] = sorted(items[last:], key=lambda item: item.path.parent.name not in WAITING)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Hardly anything becomes garbage while modules are imported and tests are collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was collected stays: without looking at it, a full collection of garbage does not take half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """The interpreter ends: otherwise it looks through all that is left for garbage, several times."""
    gc.disable()
    gc.freeze()


def pytest_report_header() -> str:
    with RedisServer() as server, server.client() as client:
        info = client.info("server")
    return f"lock server: {info.get('server_name', 'redis')} {info.get('valkey_version', info['redis_version'])}"


# How long an example takes says how busy the machine is. A test repeats its examples; `make fuzz` searches for others.
hypothesis.settings.register_profile("search", hypothesis.settings.default, deadline=None)
hypothesis.settings.register_profile("repeat", hypothesis.settings.get_profile("search"), derandomize=True)
hypothesis.settings.load_profile("repeat")


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of a test are its own: else each would be one of every app that is made later."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))


_REAL = (clock.now, clock.wall, clock.sleep)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """The time of one test is not that of the next."""
    yield
    runtime._mute_until.clear()
    left, (clock.now, clock.wall, clock.sleep) = (clock.now, clock.wall, clock.sleep), _REAL  # type: ignore[misc]
    assert left == _REAL, "the test has left its clock behind"


@pytest.fixture(scope="session")
def lasting_redis() -> Iterator[RedisServer]:
    """For `redis_server`."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_server(lasting_redis: RedisServer) -> Iterator[RedisServer]:
    """A server that tests share, one after the other; each finds it empty."""
    yield lasting_redis
    write_all()  # Else the journal's thread of this process does, seconds later, in the next test.
    lasting_redis.flush()


@pytest.fixture
def books(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """Stores in memory, which have neither, keep what beat has sent and the journal on this server."""
    with closing(open_url(redis_server.url_of(0))) as store:
        monkeypatch.setattr(MemoryStore, "ledger", store.ledger)
        monkeypatch.setattr(MemoryStore, "journal", store.journal)
        yield redis_server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test, which may stop, pause or break it."""
    with RedisServer() as server:
        yield server
