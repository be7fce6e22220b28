"""Where a storm takes place: servers, two hosts, each with its own way to each server, their workers and beats."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
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
from tests.storm import app as tasks
from tests.storm import history
from tests.storm.places import AT, PLACES, Durable, Place
from tests.storm.schedulers import SCHEDULERS
from tests.storm.waiting import QUEUE_TTL

#: Seconds of each lock.
TTL = 4.0

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

#: What locks nothing, as named in `benchmarks/tasks.py`.
PLAIN = "plain `Task`"

#: Seconds that a process gets to shut down.
ENDING = 20.0


class Host:
    """A host's processes, and the proxies through which it reaches the servers."""

    def __init__(self, name: str, broker: RedisServer, place: Place, exits: ExitStack) -> None:
        self.name = name
        self.to_broker = exits.enter_context(LossyProxy(broker.port))
        self.to_locks = place.ways(exits)
        self.workers: dict[str, Worker] = {}
        #: Settings of a pool's workers that changed with their last deploy.
        self.deployed: dict[str, Mapping[str, Any]] = {}
        self.beat: Process | None = None
        #: The program that sends jobs that are locked when sent.
        self.sender: Sender | None = None


class Sender(Process):
    """A program that sends, which is killed now and then."""

    def __init__(self, name: str, *, directory: Path, environment: Mapping[str, str]) -> None:
        self.name, self._log = name, directory / f"{name}.log"
        self._log.touch()
        self.process = programs.start("tests.storm.clicks", [], environment=environment, output=self._log)


class Scene:
    """The whole scene; `exits` ends it.

    Args:
        directory: for the logs and the history.
        place: where the locks are, as named in `places.py`.
        package: which locks the tasks; ours by default.
        mutant: of our package, which the workers run.
        scheduler: of beats, as named in `schedulers.py`; with one, there are only beats, and no locks of tasks.
    """

    def __init__(
        self,
        directory: Path,
        exits: ExitStack,
        *,
        place: str,
        package: str = "",
        mutant: str = "",
        scheduler: str = "",
    ) -> None:
        self._directory = directory
        self._package, self._mutant = PLAIN if scheduler else package, mutant
        self._scheduler = SCHEDULERS[scheduler] if scheduler else None
        self.history = directory / "history"
        self.history.touch()
        self.broker = exits.enter_context(Durable())
        self._events = exits.enter_context(RedisServer())
        self.place = PLACES[place](exits)
        self.hosts = {name: Host(name, self.broker, self.place, exits) for name in WORKERS}
        self._starts, self._processes = 0, list[Process]()
        exits.callback(self._end_all)
        self._forgot_at, self._mutex = -math.inf, threading.Lock()
        self.app: Celery = tasks.make(self._conf(self.broker.port), self._package)

    def start(self) -> None:
        """Start all workers, and the beats of our package; or only the beats."""
        for host in self.hosts.values():
            if self._scheduler:
                host.beat = self.start_beat(host)
                continue
            for pool, _ in WORKERS[host.name]:
                host.workers[pool] = self.worker(host, pool)
            if not self._package:
                host.beat, host.sender = self.start_beat(host), self.start_sender(host)
        for host in self.hosts.values():
            for worker in host.workers.values():
                worker.wait_until_ready()

    def may_forget(self, apart: float) -> bool:
        """Whether no lock server forgot anything for this many seconds; if so, the caller may let one forget now."""
        with self._mutex:
            if clock.now() < self._forgot_at + apart:
                return False
            self._forgot_at = clock.now()
            return True

    def worker(self, host: Host, pool: str) -> Worker:
        """Start a worker with its last deployed settings; it is not ready yet."""
        concurrency = dict(WORKERS[host.name])[pool]
        self._starts += 1
        worker = Worker(
            f"{host.name}-{pool}-{self._starts}",
            directory=self._directory,
            environment=self._environment(host, host.deployed.get(pool, {})),
            pool=pool,
            concurrency=concurrency,
            app="tests.storm.app",
        )
        self._note(worker)
        return worker

    def revive(self, host: Host) -> list[tuple[str, list[int]]]:
        """Restart what has ended by itself on a host, like a supervisor; returns what that was, and its processes."""
        over = [(pool, worker) for pool, worker in host.workers.items() if worker.process.poll() is not None]
        ended = [(pool, [worker.process.pid, *group_of(worker.process.pid)]) for pool, worker in over]
        for pool, worker in over:
            worker.kill()
            host.workers[pool] = self.worker(host, pool)
        if host.beat and host.beat.process.poll() is not None:
            ended.append(("beat", [host.beat.process.pid]))
            host.beat = self.start_beat(host)
        if host.sender and host.sender.process.poll() is not None:
            ended.append(("sender", [host.sender.process.pid]))
            host.sender = self.start_sender(host)
        return ended

    def start_beat(self, host: Host) -> Process:
        self._starts += 1
        name = f"{host.name}-beat-{self._starts}"
        scheduler = self._scheduler.name if self._scheduler else "exclusive"
        command = ["beat", "-S", scheduler, "-s", str(self._directory / f"{name}.schedule")]
        environment = self._environment(host)
        beat = Process(name, "tests.storm.app", command, directory=self._directory, environment=environment)
        self._note(beat)
        return beat

    def start_sender(self, host: Host) -> Sender:
        self._starts += 1
        name = f"{host.name}-sender-{self._starts}"
        sender = Sender(name, directory=self._directory, environment=self._environment(host))
        self._note(sender)
        return sender

    def _note(self, process: Process) -> None:
        # Forget the processes that have ended: an hour later, their ids may belong to others.
        with self._mutex:
            left = [one for one in self._processes if one.process.poll() is None or group_of(one.process.pid)]
            self._processes = [*left, process]

    def _end_all(self) -> None:
        for process in self._processes:
            process.kill()

    def _environment(self, host: Host, deployed: Mapping[str, Any] = MappingProxyType({})) -> dict[str, str]:
        conf = {**self._conf(host.to_broker.port, host.to_locks), **deployed}
        return {
            "TEST_CONF": json.dumps(conf),
            "TEST_EVENTS": self._events.url,
            history.HISTORY: str(self.history),
            history.HOST: host.name,
            tasks.MUTANT: self._mutant,
            tasks.PACKAGE: self._package,
        }

    def _conf(self, broker: int, ways: Sequence[LossyProxy] = ()) -> Mapping[str, Any]:
        conf: dict[str, Any] = {
            "broker_url": AT.format(broker, 0),
            "result_backend": AT.format(broker, 1),
            "broker_transport_options": FORGETFUL,
            "beat_schedule": {"tick": {"task": "tick", "schedule": 1.0, "args": ["tick"]}},
        }
        at = self.place.conf(ways)
        if self._package:
            from benchmarks.tasks import settings

            url = at["singleton_lock_backend"]
            of_beat = self._scheduler.settings(url, TTL) if self._scheduler else {}
            return {**conf, **settings(url, round(TTL)), **of_beat}
        # A record outlives the storm.
        own = {"singleton_lock_ttl": TTL, "singleton_lock_beat_ttl": TTL, "singleton_lock_queue_ttl": QUEUE_TTL}
        return {**conf, **at, **own}


@contextmanager
def scene(directory: Path, **options: Any) -> Iterator[Scene]:
    with ExitStack() as exits:
        made = Scene(directory, exits, **options)
        made.start()
        yield made


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
