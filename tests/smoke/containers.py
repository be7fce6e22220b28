"""Two worker containers with a Redis broker and a Redis backend, and a third Redis on another network for the record.

Each worker has its own queue, so that a test knows which worker gets a message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from docker.models.networks import Network
from pytest_celery import (
    CeleryBackendCluster,
    CeleryBrokerCluster,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
    RedisContainer,
    RedisTestBackend,
    RedisTestBroker,
)
from pytest_docker_tools import build, container, fxtr, network
from redis import Redis

from celery_singleton_lock import clock
from docker import DockerClient
from examples.containers.record import Run, read
from tests.patience import LIMIT
from tests.smoke import tasks
from tests.smoke.engine import IMAGE, ROOT

#: Seconds of a lease by default.
TTL = 3.0

#: Where the tests' tasks are in a worker's container, beside the image's examples.
TASKS = "/tests"


class Server(RedisContainer):
    """A Redis that the tests reach through its published port."""

    def get_addr(self, port: str) -> tuple[str, int]:
        # The original considers any machine with a /.dockerenv a neighbour of the container.
        return "127.0.0.1", self.ports[port][0]


class Worker(CeleryWorkerContainer):
    """A worker from this project's image."""

    @classmethod
    def tasks_modules(cls) -> set[ModuleType]:
        return {tasks}

    @classmethod
    def initial_env(cls, celery_worker_cluster_config: dict[str, Any], initial: dict[str, str] | None = None) -> Any:
        env = super().initial_env(celery_worker_cluster_config, initial)
        return {**env, "PYTHONPATH": f"{TASKS}:/app", "RECORD_URL": f"redis://{RECORD}:6379/0"}


class Setup(CeleryTestSetup):
    """An app that accepts short leases, also from messages."""

    @classmethod
    def update_app_config(cls, app: Celery) -> None:
        app.conf.update(
            singleton_lock_ttl=TTL,
            # A test sends work without a lock, for comparison.
            singleton_lock_accept="all",
            worker_prefetch_multiplier=1,
            broker_connection_retry_on_startup=True,
            task_track_started=True,
        )


#: The record's host name on its network.
RECORD = "record"

# Redis keeps its files in the container: the image's volume would outlive it.
_SERVER: dict[str, Any] = {
    "image": "redis:7",
    "ports": {"6379/tcp": ("127.0.0.1", None)},
    "tmpfs": {"/data": "size=1m"},
    "wrapper_class": Server,
    "timeout": 60,
}
_INSIDE = "{default_pytest_celery_network.name}"

record_network = network(scope="session")
record_server = container(**_SERVER, network="{record_network.name}", hostname=RECORD, command=Server.command())
broker_server = container(**_SERVER, network=_INSIDE, command=Server.command())
backend_server = container(**_SERVER, network=_INSIDE, command=Server.command())

worker_image = build(
    path=str(ROOT),
    dockerfile="docker/Dockerfile",
    tag=IMAGE,
    buildargs={name: os.environ[name] for name in ("PIP_INDEX_URL",) if name in os.environ},
)


def _worker(name: str) -> Any:
    return container(
        image="{worker_image.id}",
        environment=fxtr("default_worker_env"),
        network=_INSIDE,
        volumes={"{default_worker_volume.name}": {"bind": TASKS, "mode": "ro"}},
        wrapper_class=Worker,
        timeout=LIMIT,
        init=True,
        hostname=fxtr("worker_hostname"),
        command=["celery", "-A", "app", "worker", "-l", "INFO", "-n", f"{name}@%h", "-Q", name, "-c", "2"],
    )


worker_one, worker_two = _worker("one"), _worker("two")


@pytest.fixture
def worker_hostname() -> str | None:
    """The host name of both workers; None for the names that Docker gives."""
    return None


@pytest.fixture
def default_worker_container_cls() -> type[Worker]:
    return Worker


@pytest.fixture
def celery_setup_cls() -> type[Setup]:
    return Setup


@pytest.fixture
def celery_broker_cluster(broker_server: Server) -> CeleryBrokerCluster:
    return CeleryBrokerCluster(RedisTestBroker(broker_server))


@pytest.fixture
def celery_backend_cluster(backend_server: Server) -> Iterator[CeleryBackendCluster]:
    backend = RedisTestBackend(backend_server)
    yield CeleryBackendCluster(backend)
    backend.teardown()


@pytest.fixture
def celery_worker_cluster(
    worker_one: Worker, worker_two: Worker, default_worker_app: Celery, record_network: Network
) -> CeleryWorkerCluster:
    for worker in (worker_one, worker_two):
        record_network.connect(worker.id)
    return CeleryWorkerCluster(
        *(CeleryTestWorker(worker, app=default_worker_app) for worker in (worker_one, worker_two))
    )


class Shop:
    """Two workers that get work and suffer faults, and their record."""

    def __init__(self, setup: CeleryTestSetup, record: Redis, engine: DockerClient) -> None:
        self.one, self.two = setup.worker_cluster
        self._setup = setup
        self._record = record
        self._engine = engine
        self._app: Celery | None = None

    def send(
        self, queue: str, job: str, seconds: float, *, lock: dict[str, Any] | bool = True, step: float = 0.05
    ) -> AsyncResult[Any]:
        """Send `work`, with lock options for this call, to the worker with that name."""
        if self._app is None:
            self._app = self._setup.create_setup_app(self._config(), self._setup.name())
        headers = {} if lock is True else {"singleton_lock": lock}
        return self._app.send_task("work", (job, seconds, step), queue=queue, headers=headers)

    def runs(self, job: str) -> list[Run]:
        return [run for run in read(self._record) if run.job == job]

    def wait_for(self, job: str, *, starts: int = 0, ends: int = 0) -> list[Run]:
        """The runs of a job, once that many have started and ended."""
        deadline = clock.now() + LIMIT
        while True:
            runs = self.runs(job)
            if len(runs) >= starts and sum(run.outcome != "open" for run in runs) >= ends:
                return runs
            assert clock.now() < deadline, f"waited {LIMIT:g} s for {starts} starts and {ends} ends; saw {runs}"
            clock.sleep(0.05)

    def pause(self, worker: CeleryTestWorker) -> None:
        self._engine.containers.get(worker.container.id).pause()

    def unpause(self, worker: CeleryTestWorker) -> None:
        self._engine.containers.get(worker.container.id).unpause()

    def _config(self) -> dict[str, Any]:
        urls = {"celery_broker_cluster_config": self._setup.broker_cluster.config()}
        return self._setup.config(urls | {"celery_backend_cluster_config": self._setup.backend_cluster.config()})


@pytest.fixture
def shop(
    celery_setup: CeleryTestSetup,
    record_server: Server,
    docker_client: DockerClient,
    worker_hostname: str | None,
) -> Iterator[Shop]:
    # The containers request the last one; it is named here so that a test can be parametrized with it.
    with record_server.client as record:
        yield Shop(celery_setup, record, docker_client)


def nodes(runs: Sequence[Run]) -> set[str]:
    """Names of the workers, without the host names."""
    return {run.worker.partition("@")[0] for run in runs}
