"""One node of a cluster in a redis:// URL: it answers for a part of the keys, and says so, which is no silence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from redis import Redis

from celery_singleton_lock import Lock, LockUnavailable, WrongLockServer
from tests.integration.conftest import Shop, until
from tests.integration.operators import environment_of
from tests.integration.queued_tasks import define
from tests.integration.workers import Process
from tests.patience import LIMIT
from tests.redis_server import RedisServer
from tests.servers import Cluster

#: The rights that the locks need, and those to choose a database.
RIGHTS = ("+@read", "+@write", "+@scripting", "+time", "+select")

#: Enough that some are on each node.
JOBS = [f"job-{number}" for number in range(12)]


@pytest.fixture
def nodes() -> Cluster:
    with Cluster(masters=2, replicas=0) as cluster:
        yield cluster


@pytest.fixture
def split(redis_server: RedisServer, nodes: Cluster, shop_on: Callable[..., Shop]) -> Shop:
    """A shop that knows one of two nodes, as a user with few rights."""
    node, *_ = nodes.servers
    node.client().execute_command("ACL", "SETUSER", "locks", "on", ">secret", "~*", "&*", *RIGHTS)
    url = f"redis://locks:secret@127.0.0.1:{node.port}"
    return shop_on(redis_server, singleton_lock_backend=url, singleton_lock_on_unavailable="run")


@pytest.mark.parametrize("database", ["", "/2"])
@pytest.mark.parametrize("command", [("worker", "-c", "1"), ("beat", "-S", "exclusive")])
def test_worker_and_beat_do_not_start(split: Shop, command: tuple[str, ...], database: str) -> None:
    split.conf["singleton_lock_backend"] += database
    arguments = (*command, "-s", str(split.directory / "schedule")) if command[0] == "beat" else command
    env = environment_of(split)
    with Process("one", "tests.integration.app", arguments, directory=split.directory, environment=env) as process:
        assert process.process.wait(LIMIT) != 0
        assert "write redis+cluster://" in process.log
        assert "secret" not in process.log


def test_worker_that_was_there_before_runs_nothing_without_a_lock(split: Shop, nodes: Cluster) -> None:
    """Not even what may run if the server is silent. It waits, until somebody reads the log."""
    node, *_ = nodes.servers
    split.conf["singleton_lock_backend"] = f"redis://127.0.0.1:{node.port}"  # It forgets its users.
    node.kill()
    (worker,) = split.start("one")
    node.start()
    nodes.wait_until_ready()
    results = {job: split.send("exclusive", job) for job in JOBS}
    until(lambda: split.record.runs() and "write redis+cluster://" in worker.log)
    worker.terminate()
    assert all(run.fence for run in split.record.runs())
    assert all(split.state_of(result) in ("SUCCESS", "PENDING") for result in results.values())
    split.conf["singleton_lock_backend"] = f"redis+cluster://127.0.0.1:{node.port}"
    split.start("two")
    assert {job: result.get(timeout=LIMIT) for job, result in results.items()} == {job: job for job in JOBS}
    assert len(split.record.runs()) == len(JOBS)


def test_sender_sends_nothing_without_a_lock(split: Shop) -> None:
    tasks: SimpleNamespace = define(split.app)
    sent = 0
    for job in JOBS:
        try:
            tasks.until_executed.delay(job)
            sent += 1
        except WrongLockServer as error:
            assert "write redis+cluster://" in str(error)  # noqa: PT017 - others are sent
    with Redis.from_url(split.conf["broker_url"]) as broker:
        assert broker.llen("celery") == sent
    assert 0 < sent < len(JOBS)


def test_lock_of_a_client_says_it(nodes: Cluster) -> None:
    node, *_ = nodes.servers
    refused = 0
    for job in JOBS:
        try:
            with Lock(node.client(), job, timeout=5.0):
                pass
        except LockUnavailable as error:
            refused += 1
            assert "a Lock takes a redis.cluster.RedisCluster" in str(error)  # noqa: PT017
    assert 0 < refused < len(JOBS)
