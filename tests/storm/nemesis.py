"""What goes wrong in a storm, by kind: nothing that the guarantees exclude. Each fault undoes itself.

So no worker stands still for as long as a lease, no lock server forgets, and the broker is well. The simulator shows
what happens otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from celery_singleton_lock import clock
from tests import appended
from tests.programs import group_of
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.servers import Cluster, SentinelGroup
from tests.storm.scene import TTL, Host, Scene, children_of, end
from tests.storm.sender import LOADS

#: Seconds between two faults: of one host or one lock server, of the children of a host, and of those that last only a
#: moment. Most children get to do something first.
PAUSE, CHILD, MOMENT = (0.1, 1.5), (0.5, 3.0), (0.1, 0.9)

#: Seconds of silence of a server, or of a way to it.
SILENCE = 0.3, 1.5 * TTL

#: Seconds for which a worker stands still: less than remains of a lease when a run is stopped because of it.
FREEZE = 0.05, 0.1 * TTL

#: Nodes of a Redlock that may be struck at the same time: a minority of five.
AT_ONCE = 2

Strike = Callable[["Nemesis"], object]

#: Kinds of faults: of processes of a host, of children, of lock servers and the ways to them, and of a moment.
PROCESSES: dict[str, Strike] = {}
CHILDREN: dict[str, Strike] = {}
LOCKS: dict[str, Strike] = {}
MOMENTS: dict[str, Strike] = {}

#: Kinds of faults of servers that work together: one at a time, which is over when they are ready again.
SENTINEL: dict[str, Strike] = {}
CLUSTER: dict[str, Strike] = {}


def kind(of: dict[str, Strike], name: str) -> Callable[[Strike], Strike]:
    def decorate(strike: Strike) -> Strike:
        of[name] = strike
        return strike

    return decorate


class Nemesis:
    """Strikes at one part of a scene, one fault after another, until it is stopped.

    Args:
        scene: where it strikes.
        kinds: of faults.
        seed: decides which fault comes when; its effect is up to the machine.
        pause: range of seconds between two faults.
        host: whose processes it strikes, and restarts; any by default.
        servers: numbers of its lock servers; no two nemeses share one.
    """

    def __init__(
        self,
        scene: Scene,
        kinds: Mapping[str, Strike],
        seed: str,
        pause: tuple[float, float],
        *,
        host: Host | None = None,
        servers: Sequence[int] = (),
    ) -> None:
        self.scene, self.chance = scene, random.Random(seed)
        self._kinds, self._pause, self._host, self._servers = kinds, pause, host, servers
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nemesis {seed}", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask it to stop; `join` waits until the last fault is undone."""
        self._stopped.set()

    def join(self) -> None:
        self._thread.join()
        if self.error:
            raise self.error

    @property
    def host(self) -> Host:
        return self._host or self.scene.hosts[self.chance.choice(sorted(self.scene.hosts))]

    @property
    def number(self) -> int:
        """The number of one of its lock servers."""
        return self.chance.choice(self._servers)

    @property
    def server(self) -> RedisServer:
        """One of its lock servers that has locks."""
        group = self.scene.locks
        return group.master() if isinstance(group, SentinelGroup) else group.servers[self.number]

    @property
    def way(self) -> LossyProxy:
        return self.host.to_locks[self.number]

    def silence(self) -> None:
        """Seconds of a stall or a partition; most are short."""
        self.wait(self.chance.triangular(*SILENCE, SILENCE[0]))

    def wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _run(self) -> None:
        try:
            while self._kinds and not self._stopped.wait(self.chance.uniform(*self._pause)):
                if self._host:
                    self.scene.revive(self._host)
                self._strike(self.chance.choice(sorted(self._kinds)))
        except BaseException as error:  # noqa: BLE001 - the storm raises it
            self.error = error

    def _strike(self, name: str) -> None:
        begin = clock.now()
        self._kinds[name](self)
        line = {"event": "fault", "kind": name, "begin": begin, "at": clock.now()}
        appended.append(self.scene.history, line)


# Processes


def _worker(nemesis: Nemesis) -> tuple[Host, str]:
    host = nemesis.host
    return host, nemesis.chance.choice(sorted(host.workers))


def _restart(nemesis: Nemesis, host: Host, pool: str) -> None:
    host.workers[pool] = nemesis.scene.worker(host, pool)
    with suppress(AssertionError):  # It has ended: another fault struck it, and it is restarted.
        host.workers[pool].wait_until_ready()


def _signal_child(number: signal.Signals) -> Strike:
    def strike(nemesis: Nemesis) -> None:
        if children := children_of(nemesis.host.workers["prefork"].process.pid):
            _signal_all([nemesis.chance.choice(children)], number)

    return strike


for _number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
    CHILDREN[f"child: {_number.name}"] = _signal_child(_number)


@kind(PROCESSES, "worker: SIGKILL")
def kill_worker(nemesis: Nemesis) -> None:
    host, pool = _worker(nemesis)
    host.workers[pool].kill()
    _restart(nemesis, host, pool)


def _signal_main(number: signal.Signals) -> Strike:
    def strike(nemesis: Nemesis) -> None:
        """Its children go on for a while; a supervisor ends what is left."""
        host, pool = _worker(nemesis)
        end(host.workers[pool], number)
        _restart(nemesis, host, pool)

    return strike


for _number in (signal.SIGKILL, signal.SIGQUIT, signal.SIGTERM):
    PROCESSES[f"main process: {_number.name}"] = _signal_main(_number)


@kind(PROCESSES, "worker: frozen, shorter than a lease")
def freeze(nemesis: Nemesis) -> None:
    host, pool = _worker(nemesis)
    pids = group_of(host.workers[pool].process.pid)
    _signal_all(pids, signal.SIGSTOP)
    try:
        nemesis.wait(nemesis.chance.uniform(*FREEZE))
    finally:
        _signal_all(pids, signal.SIGCONT)


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@kind(PROCESSES, "rolling deploy, to other options")
def deploy(nemesis: Nemesis) -> None:
    """The new worker starts before the old one ends, and has another wait, policy and prefetch."""
    host, pool = _worker(nemesis)
    old, chance = host.workers[pool], nemesis.chance
    host.deployed[pool] = {
        "singleton_lock_wait": chance.choice([0.0, 1.0, 5.0]),
        "singleton_lock_on_conflict": chance.choice(["skip", "raise", "retry"]),
        "worker_prefetch_multiplier": chance.choice([1, 2, 4]),
    }
    _restart(nemesis, host, pool)
    end(old, signal.SIGTERM)


@kind(PROCESSES, "beat: SIGKILL")
def kill_beat(nemesis: Nemesis) -> None:
    host = nemesis.host
    if host.beat is not None:
        host.beat.kill()
        host.beat = nemesis.scene.start_beat(host)


@kind(PROCESSES, "sender: SIGKILL")
def kill_sender(nemesis: Nemesis) -> None:
    host = nemesis.host
    if host.sender is not None:
        host.sender.kill()
        host.sender = nemesis.scene.start_sender(host)


# Lock servers and the ways to them


@kind(LOCKS, "lock server: stalled")
@kind(SENTINEL, "lock server: stalled")
@kind(CLUSTER, "lock server: stalled")
def stall(nemesis: Nemesis) -> None:
    _stall(nemesis, nemesis.server)


def _stall(nemesis: Nemesis, server: RedisServer) -> None:
    server.pause()
    try:
        nemesis.silence()
    finally:
        server.resume()


@kind(LOCKS, "lock server: restarts with its data")
@kind(CLUSTER, "lock server: restarts with its data")
def restart(nemesis: Nemesis) -> None:
    server = nemesis.server
    server.kill()
    nemesis.wait(nemesis.chance.uniform(0.0, TTL))
    server.start()


def _partition(**held: bool) -> Strike:
    def strike(nemesis: Nemesis) -> None:
        way = nemesis.way
        way.hold(**held)
        try:
            nemesis.silence()
        finally:
            way.let_through()

    return strike


LOCKS["partition: commands held back"] = _partition(commands=True)
LOCKS["partition: replies held back"] = _partition(replies=True)
LOCKS["partition: both ways"] = _partition(commands=True, replies=True)


@kind(LOCKS, "network: slow")
def slow(nemesis: Nemesis) -> None:
    way = nemesis.way
    way.delay(nemesis.chance.uniform(0.01, TTL / 16))
    try:
        nemesis.silence()
    finally:
        way.delay(0.0)


@kind(LOCKS, "network: replies lost")
def lose(nemesis: Nemesis) -> None:
    nemesis.way.lose(nemesis.chance.randint(2, 8))
    nemesis.wait(0.5)


@kind(LOCKS, "network: connections half open")
def half_open(nemesis: Nemesis) -> None:
    nemesis.way.forsake()


# Servers that work together


@kind(SENTINEL, "lock server: a replica with all its data takes over")
def hand_over(nemesis: Nemesis) -> None:
    _sentinels(nemesis).hand_over()


@kind(SENTINEL, "Sentinel: stalled")
def stall_sentinel(nemesis: Nemesis) -> None:
    _stall(nemesis, nemesis.chance.choice(_sentinels(nemesis).sentinels))


def _sentinels(nemesis: Nemesis) -> SentinelGroup:
    group = nemesis.scene.locks
    assert isinstance(group, SentinelGroup)
    return group


@kind(CLUSTER, "cluster: a slot moves")
def move_slot(nemesis: Nemesis) -> None:
    """The slot of a job that is often sent. For a while, its new keys are on the new master, the others on the old."""
    scene, chance, load = nemesis.scene, nemesis.chance, LOADS[nemesis.scene.load]
    assert isinstance(scene.locks, Cluster)
    key = scene.app.tasks[chance.choice(load.tasks)].lock_key_of(chance.choice([*load.jobs]), 0.0)
    scene.locks.migrate_slot(key, lambda: nemesis.wait(chance.triangular(0.0, TTL, 0.0)))


def _until_ready(strike: Strike) -> Strike:
    def then(nemesis: Nemesis) -> None:
        strike(nemesis)
        nemesis.scene.locks.wait_until_ready()

    return then


# Moments


def _asks(*command: Any) -> Strike:
    def strike(nemesis: Nemesis) -> None:
        once = {"socket_timeout": TTL, "retry": Retry(NoBackoff(), 0)}
        with suppress(RedisError), Redis(port=nemesis.server.port, **once) as client:
            client.execute_command(*command)

    return strike


for _of in (MOMENTS, SENTINEL, CLUSTER):
    _of["moment: all clients cut off"] = _asks("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    _of["moment: SCRIPT FLUSH"] = _asks("SCRIPT", "FLUSH")
    _of["moment: CLIENT PAUSE"] = _asks("CLIENT", "PAUSE", 100)


@kind(MOMENTS, "moment: connections cut")
def cut(nemesis: Nemesis) -> None:
    nemesis.way.cut()


@kind(MOMENTS, "moment: a reply lost")
def lose_one(nemesis: Nemesis) -> None:
    nemesis.way.lose(1)


@contextmanager
def raging(angry: Sequence[Nemesis]) -> Iterator[None]:
    """Let them strike; at the end, all is as it was."""
    for nemesis in angry:
        nemesis.start()
    try:
        yield
    finally:
        for nemesis in angry:
            nemesis.stop()
        for nemesis in angry:
            nemesis.join()


def nemeses(scene: Scene, seed: int, kinds: str) -> list[Nemesis]:
    """Nemeses for the processes of each host, and for the lock servers (several for a Redlock's nodes).

    Args:
        scene: where they strike.
        seed: of all of them.
        kinds: what the names of the faults begin with.
    """

    def chosen(of: Mapping[str, Strike]) -> dict[str, Strike]:
        return {name: strike for name, strike in of.items() if name.startswith(tuple(kinds.split(",")))}

    made = []
    for name, host in scene.hosts.items():
        made.append(Nemesis(scene, chosen(PROCESSES), f"{seed} {name}", PAUSE, host=host))
        made.append(Nemesis(scene, chosen(CHILDREN), f"{seed} {name} children", CHILD, host=host))
    every = range(len(scene.locks.servers))
    if not scene.independent:
        together = chosen(SENTINEL if isinstance(scene.locks, SentinelGroup) else CLUSTER)
        ready = {name: _until_ready(strike) for name, strike in together.items()}
        return [*made, Nemesis(scene, ready, f"{seed} locks", MOMENT, servers=every)]
    for number in range(min(AT_ONCE, len(every))):
        made.append(Nemesis(scene, chosen(LOCKS), f"{seed} locks {number}", PAUSE, servers=every[number::AT_ONCE]))
    return [*made, Nemesis(scene, chosen(MOMENTS), f"{seed} moments", MOMENT, servers=every)]
