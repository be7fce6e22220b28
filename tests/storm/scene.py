"""Where a storm takes place: servers, two hosts, each with its own way to each server, their workers and beats."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from celery import Celery

from celery_singleton_lock import clock
from tests import programs
from tests.integration.workers import Process, Worker
from tests.programs import group_of
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.servers import Cluster, Group, Nodes, SentinelGroup
from tests.storm import app as tasks
from tests.storm import history

#: Seconds of each lock; and for which a message that waits keeps others out.
TTL, QUEUE_TTL = 4.0, 15.0

#: Options of a broker that counts a message as lost if it is not acknowledged within eight seconds. The worker that
#: looks for such messages locks others out meanwhile: by default for five minutes if it is killed while it looks.
FORGETFUL = {
    "visibility_timeout": 8,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 4,
}

#: The workers of each host: pool, and number of bodies at once.
WORKERS = {
    "east": (("prefork", 3), ("threads", 3), ("eventlet", 2)),
    "west": (("prefork", 3), ("gevent", 4), ("solo", 1)),
}

#: What such a server is given is on disk before it answers: killed and restarted, it has all its data.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")

#: Where the locks are. No replica takes over by itself: it might have missed something.
PLACES: Mapping[str, Callable[[], Group]] = {
    "server": lambda: Nodes(1, arguments=DURABLE),
    "redlock": lambda: Nodes(5, arguments=DURABLE),
    "sentinel": lambda: SentinelGroup(down_after=120.0, failover_timeout=60.0),
    "cluster": lambda: Cluster(replicas=0, node_timeout=5.0, arguments=DURABLE),
}

#: Seconds that a process gets to shut down.
ENDING = 20.0


class Host:
    """A host's processes, and the proxies through which it reaches the servers that do not announce an address."""

    def __init__(self, name: str, broker: RedisServer, locks: Sequence[RedisServer], exits: ExitStack) -> None:
        self.name = name
        self.to_broker = exits.enter_context(LossyProxy(broker.port))
        self.to_locks = [exits.enter_context(LossyProxy(server.port)) for server in locks]
        self.workers: dict[str, Worker] = {}
        #: Settings of a pool's workers that changed with their last deploy.
        self.deployed: dict[str, Mapping[str, Any]] = {}
        self.beat: Process | None = None
        self.sender: Sender | None = None


class Sender(Process):
    """A program that sends."""

    def __init__(self, name: str, load: str, count: int, directory: Path, environment: Mapping[str, str]) -> None:
        self.name, self._log = name, directory / f"{name}.log"
        self._log.touch()
        self._log_begins, self._is_touched = 0, False
        arguments = [load, str(count)]
        self.process = programs.start("tests.storm.sender", arguments, environment=environment, output=self._log)


class Scene:
    """The whole scene; `exits` ends it.

    Args:
        directory: for the logs and the history.
        place: where the locks are, as named in `PLACES`.
        load: what is sent, as named in `sender.LOADS`.
        mutant: of the package, which the workers run.
        conf: settings beyond those of the scene.
    """

    def __init__(
        self,
        directory: Path,
        exits: ExitStack,
        *,
        place: str = "server",
        load: str = "mixed",
        mutant: str = "",
        conf: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._directory, self.load, self._mutant, self._settings = directory, load, mutant, conf
        self.history: Path | None = directory / "history"
        self.history.touch()
        self.broker = exits.enter_context(RedisServer(DURABLE))
        self._events = exits.enter_context(RedisServer())
        self.locks = exits.enter_context(PLACES[place]())
        self.independent = self.locks.servers if isinstance(self.locks, Nodes) else []
        for server in self.independent:
            # New nodes have no vote for a while: these are to count as old.
            server.client().set("singleton_lock:memory", 1, px=100_000_000_000)
        self.hosts = {name: Host(name, self.broker, self.independent, exits) for name in WORKERS}
        self._starts, self._processes = 0, list[Process]()
        self._mutex = threading.Lock()
        exits.callback(self._end_all)
        self.app: Celery = tasks.make(self._conf(self.broker.port))

    def start_workers(self) -> None:
        for host in self.hosts.values():
            host.workers = {pool: self.worker(host, pool) for pool, _ in WORKERS[host.name]}
            host.beat = self.start_beat(host)
        for host in self.hosts.values():
            for worker in host.workers.values():
                worker.wait_until_ready()

    def worker(self, host: Host, pool: str) -> Worker:
        """Start a worker with its last deployed settings; it is not ready yet."""
        worker = Worker(
            self._name(host, pool),
            directory=self._directory,
            environment=self._environment(host, host.deployed.get(pool, {})),
            pool=pool,
            concurrency=dict(WORKERS[host.name])[pool],
            app="tests.storm.app",
        )
        self._note(worker)
        return worker

    def start_beat(self, host: Host) -> Process:
        name = self._name(host, "beat")
        command = ["beat", "-S", "exclusive", "-s", str(self._directory / f"{name}.schedule")]
        environment = self._environment(host)
        beat = Process(name, "tests.storm.app", command, directory=self._directory, environment=environment)
        self._note(beat)
        return beat

    def start_sender(self, host: Host, count: int = 0) -> Sender:
        sender = Sender(self._name(host, "sender"), self.load, count, self._directory, self._environment(host))
        self._note(sender)
        return sender

    def revive(self, host: Host) -> None:
        """Restart what has ended by itself on a host, like a supervisor."""
        for pool, worker in host.workers.items():
            if worker.process.poll() is not None:
                worker.kill()
                host.workers[pool] = self.worker(host, pool)
        if host.beat and host.beat.process.poll() is not None:
            host.beat = self.start_beat(host)

    @contextmanager
    def sends(self) -> Iterator[None]:
        """Let this process write to the history what it sends."""
        os.environ[history.HISTORY] = str(self.history)
        try:
            yield
        finally:
            del os.environ[history.HISTORY]

    def _name(self, host: Host, what: str) -> str:
        with self._mutex:
            self._starts += 1
            return f"{host.name}-{what}-{self._starts}"

    def _note(self, process: Process) -> None:
        # Forget the processes that have ended: an hour later, their ids may belong to others.
        with self._mutex:
            left = [one for one in self._processes if one.process.poll() is None or group_of(one.process.pid)]
            self._processes = [*left, process]

    def _end_all(self) -> None:
        for process in self._processes:
            process.kill()

    def _environment(self, host: Host, deployed: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
        return {
            "TEST_CONF": json.dumps({**self._conf(host.to_broker.port, host.to_locks), **deployed}),
            "TEST_EVENTS": self._events.url,
            history.HISTORY: str(self.history or ""),
            history.HOST: host.name,
            tasks.MUTANT: self._mutant,
        }

    def _conf(self, broker: int, ways: Sequence[LossyProxy] = ()) -> Mapping[str, Any]:
        at = "redis://127.0.0.1:{}/{}".format
        return {
            "broker_url": at(broker, 0),
            "result_backend": at(broker, 1),
            "broker_transport_options": FORGETFUL,
            "beat_schedule": {"tick": {"task": "tick", "schedule": 1.0, "args": ["tick"]}},
            "singleton_lock_backend": ";".join(at(way.port, 0) for way in ways) or self.locks.url,
            "singleton_lock_transport_options": self.locks.options,
            "singleton_lock_ttl": TTL,
            "singleton_lock_beat_ttl": TTL,
            "singleton_lock_queue_ttl": QUEUE_TTL,
            **self._settings,
        }


@contextmanager
def scene(directory: Path, **options: Any) -> Iterator[Scene]:
    with ExitStack() as exits:
        yield Scene(directory, exits, **options)


def children_of(pid: int) -> list[int]:
    """Its child processes that run or wait to be reaped."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def end(process: Process, how: signal.Signals) -> None:
    """End a program by a signal to its main process; what is left afterwards is killed."""
    with suppress(ProcessLookupError):  # It ends just now.
        process.process.send_signal(how)
    deadline = clock.now() + ENDING
    while group_of(process.process.pid) and process.process.poll() is None and clock.now() < deadline:
        clock.sleep(0.05)
    process.kill()
