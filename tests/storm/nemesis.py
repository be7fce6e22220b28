"""What goes wrong in a storm, by kind; each fault undoes itself, and says what it struck."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from celery_singleton_lock import clock
from tests.proxy import LossyProxy
from tests.storm import history
from tests.storm.scene import TTL, Durable, Host, Scene, children_of, end, group_of

#: Seconds from one fault to the next of one nemesis.
PAUSE = 0.1, 1.5

#: Seconds for which a server or a way to it is silent.
SILENCE = 0.3, 2.5 * TTL

#: Seconds between two faults by which a lock server forgets: what is held now is on all nodes again by then.
APART = 3 * TTL


#: Nodes of a Redlock that may be struck at the same time: a majority of five.
AT_ONCE = 3


@dataclass
class Struck:
    """What a fault is written down with.

    Attributes:
        pids: of processes that were concerned; none where all are.
        forgot: the server that has forgotten something.
        silent: lock servers did not answer.
    """

    pids: list[int] = field(default_factory=list)
    forgot: str = ""
    silent: bool = False


Strike = Callable[["Nemesis"], Struck | None]

#: Kinds of faults: to processes of a host, to the lock servers and the ways there, and to the broker.
PROCESSES: dict[str, Strike] = {}
LOCKS: dict[str, Strike] = {}
BROKER: dict[str, Strike] = {}


def kind(of: dict[str, Strike], name: str) -> Callable[[Strike], Strike]:
    def decorate(strike: Strike) -> Strike:
        of[name] = strike
        return strike

    return decorate


class Nemesis:
    """Strikes at one part of a scene, one fault after another, until it is stopped.

    Args:
        scene: what it strikes at.
        kinds: of faults.
        seed: says which comes when; what comes of it is up to the machine.
        host: whose processes; None where no processes are concerned.
        servers: which of the lock servers, by their numbers; no two nemeses have the same.
    """

    def __init__(
        self,
        scene: Scene,
        kinds: Mapping[str, Strike],
        seed: str,
        *,
        host: Host | None = None,
        servers: Sequence[int] = (),
    ) -> None:
        self.scene, self.chance = scene, random.Random(seed)
        self._host = host
        self._servers = servers
        self._kinds = kinds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nemesis {seed}", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask for it; `join` waits until the last fault is undone."""
        self._stopped.set()

    def join(self) -> None:
        self._thread.join()
        if self.error:
            raise self.error

    @property
    def host(self) -> Host:
        return self._host or self.scene.hosts[self.chance.choice(sorted(self.scene.hosts))]

    @property
    def server(self) -> Durable:
        return self.scene.locks[self.chance.choice(self._servers)]

    @property
    def way(self) -> LossyProxy:
        """From a host to a lock server."""
        return self.host.to_locks[self.chance.choice(self._servers)]

    def silence(self) -> None:
        """For as long as a server is stalled, or a partition lasts; most are short."""
        self._stopped.wait(self.chance.triangular(*SILENCE, SILENCE[0]))

    def wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.chance.uniform(*PAUSE)):
                if self._host:
                    self._revive(self._host)
                if self._kinds:
                    self._strike(self.chance.choice(sorted(self._kinds)))
        except BaseException as error:  # noqa: BLE001 - the storm raises it
            self.error = error

    def _revive(self, host: Host) -> None:
        for what in self.scene.revive(host):
            self._note(f"{what}: ended by itself", clock.now(), Struck())

    def _strike(self, name: str) -> None:
        begin = clock.now()
        struck = self._kinds[name](self)
        if struck is not None:
            self._note(name, begin, struck)

    def _note(self, name: str, begin: float, struck: Struck) -> None:
        line = {"event": "fault", "kind": name, "begin": begin, "at": clock.now(), **asdict(struck)}
        history.append(self.scene.history, line)


# Processes


def _worker(nemesis: Nemesis) -> tuple[Host, str, list[int]]:
    """One of the host's, by its pool, and all its processes."""
    host = nemesis.host
    pool = nemesis.chance.choice(sorted(host.workers))
    return host, pool, group_of(host.workers[pool].process.pid)


def _restart(nemesis: Nemesis, host: Host, pool: str, *arguments: str) -> None:
    host.workers[pool] = nemesis.scene.worker(host, pool, *arguments)
    with suppress(AssertionError):  # It has ended: something else struck, and it is started again.
        host.workers[pool].wait_until_ready()


def _child(nemesis: Nemesis) -> int | None:
    children = children_of(nemesis.host.workers["prefork"].process.pid)
    return nemesis.chance.choice(children) if children else None


def _signal_child(name: str, number: signal.Signals) -> None:
    @kind(PROCESSES, name)
    def strike(nemesis: Nemesis) -> Struck | None:
        child = _child(nemesis)
        if child is None:
            return None
        with suppress(ProcessLookupError):
            os.kill(child, number)
        return Struck([child])


for _name, _number in (
    ("child: SIGKILL", signal.SIGKILL),
    ("child: SIGTERM", signal.SIGTERM),
    ("child: SIGSEGV", signal.SIGSEGV),
):
    _signal_child(_name, _number)


@contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@kind(PROCESSES, "child: stopped")
def stop_child(nemesis: Nemesis) -> Struck | None:
    child = _child(nemesis)
    if child is None:
        return None
    with _stopped([child]):
        nemesis.wait(nemesis.chance.uniform(0.2, 2 * TTL))
    return Struck([child])


@kind(PROCESSES, "worker: SIGKILL")
def kill_worker(nemesis: Nemesis) -> Struck:
    host, pool, pids = _worker(nemesis)
    host.workers[pool].kill()
    _restart(nemesis, host, pool)
    return Struck(pids)


@kind(PROCESSES, "main process: SIGKILL")
def kill_main(nemesis: Nemesis) -> Struck:
    """Its children go on for a while; a supervisor ends what is left."""
    host, pool, pids = _worker(nemesis)
    end(host.workers[pool], signal.SIGKILL)
    _restart(nemesis, host, pool)
    return Struck(pids)


@kind(PROCESSES, "main process: stopped")
def stop_main(nemesis: Nemesis) -> Struck:
    """Its children go on."""
    main = nemesis.host.workers["prefork"].process.pid
    with _stopped([main]):
        nemesis.wait(nemesis.chance.uniform(0.2, 2 * TTL))
    return Struck([main])


@kind(PROCESSES, "worker: frozen, shorter than a lease")
def freeze_shortly(nemesis: Nemesis) -> Struck:
    _, _, pids = _worker(nemesis)
    with _stopped(pids):
        nemesis.wait(nemesis.chance.uniform(0.05, TTL / 4))
    return Struck(pids)


@kind(PROCESSES, "worker: frozen, longer than a lease")
def freeze_long(nemesis: Nemesis) -> Struck:
    _, _, pids = _worker(nemesis)
    with _stopped(pids):
        nemesis.wait(nemesis.chance.uniform(1.1, 2) * TTL)
    return Struck(pids)


@kind(PROCESSES, "worker: SIGQUIT")
def quit_worker(nemesis: Nemesis) -> Struck:
    host, pool, pids = _worker(nemesis)
    end(host.workers[pool], signal.SIGQUIT)
    _restart(nemesis, host, pool)
    return Struck(pids)


@kind(PROCESSES, "worker: SIGTERM")
def terminate_worker(nemesis: Nemesis) -> Struck:
    host, pool, pids = _worker(nemesis)
    end(host.workers[pool], signal.SIGTERM)
    _restart(nemesis, host, pool)
    return Struck(pids)


@kind(PROCESSES, "rolling deploy, to other options")
def deploy(nemesis: Nemesis) -> Struck:
    """The new one starts before the old one has ended, and locks for longer."""
    host, pool, pids = _worker(nemesis)
    old = host.workers[pool]
    options = ("--prefetch-multiplier", str(nemesis.chance.choice([1, 2, 4])))
    _restart(nemesis, host, pool, *options)
    end(old, signal.SIGTERM)
    return Struck(pids)


@kind(PROCESSES, "GIL held")
def hog(nemesis: Nemesis) -> Struck | None:
    """By a task, wherever it comes: shorter than a lease, since only prefork bears more."""
    if "hogging" not in nemesis.scene.app.tasks:
        return None
    nemesis.scene.app.tasks["hogging"].apply_async((f"hog-{nemesis.chance.random()}", 1))
    return Struck()


@kind(PROCESSES, "beat: SIGKILL")
def kill_beat(nemesis: Nemesis) -> Struck | None:
    host = nemesis.host
    if host.beat is None:
        return None
    pids = group_of(host.beat.process.pid)
    host.beat.kill()
    host.beat = nemesis.scene.start_beat(host)
    return Struck(pids)


@kind(PROCESSES, "beat: stopped")
def stop_beat(nemesis: Nemesis) -> Struck | None:
    beat = nemesis.host.beat
    if beat is None:
        return None
    pids = group_of(beat.process.pid)
    with _stopped(pids):
        nemesis.wait(nemesis.chance.uniform(0.2, 2 * TTL))
    return Struck(pids)


# Lock servers, and the ways to them


@kind(LOCKS, "lock server: stalled")
def stall(nemesis: Nemesis) -> Struck:
    server = nemesis.server
    server.pause()
    try:
        nemesis.silence()
    finally:
        server.resume()
    return Struck(silent=True)


@kind(LOCKS, "lock server: DEBUG SLEEP")
def debug_sleep(nemesis: Nemesis) -> Struck:
    _ask(nemesis.server, "DEBUG", "SLEEP", nemesis.chance.uniform(0.2, TTL / 2))
    return Struck(silent=True)


@kind(LOCKS, "lock server: restarts with its data")
def restart(nemesis: Nemesis) -> Struck:
    server = nemesis.server
    server.kill()
    nemesis.wait(nemesis.chance.uniform(0.0, TTL))
    server.start()
    return Struck(silent=True)


@kind(LOCKS, "lock server: restarts empty")
def forget(nemesis: Nemesis) -> Struck | None:
    if not nemesis.scene.may_forget(APART):
        return None
    server = nemesis.server
    server.forget()
    return Struck(forgot=str(server.port))


@kind(LOCKS, "lock server: restarts with older data")
def go_back(nemesis: Nemesis) -> Struck | None:
    if not nemesis.scene.may_forget(APART):
        return None
    server = nemesis.server
    server.go_back(nemesis.chance.uniform(0.2, TTL / 2))
    return Struck(forgot=str(server.port))


@kind(LOCKS, "lock server: CLIENT KILL")
def client_kill(nemesis: Nemesis) -> Struck:
    _ask(nemesis.server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    return Struck()


@kind(LOCKS, "lock server: CLIENT PAUSE")
def client_pause(nemesis: Nemesis) -> Struck:
    seconds = nemesis.chance.uniform(0.1, TTL)
    _ask(nemesis.server, "CLIENT", "PAUSE", round(seconds * 1000))
    nemesis.wait(seconds)
    return Struck(silent=True)


@kind(LOCKS, "lock server: SCRIPT FLUSH")
def script_flush(nemesis: Nemesis) -> Struck:
    _ask(nemesis.server, "SCRIPT", "FLUSH")
    return Struck()


def _ask(server: Durable, *command: Any) -> None:
    with suppress(RedisError), Redis(port=server.port) as client:
        client.execute_command(*command)


def _partition(name: str, **held: bool) -> None:
    @kind(LOCKS, name)
    def strike(nemesis: Nemesis) -> Struck:
        way = nemesis.way
        way.hold(**held)
        try:
            nemesis.silence()
        finally:
            way.let_through()
        return Struck(silent=True)


for _name, _held in (
    ("partition: commands held back", {"commands": True}),
    ("partition: replies held back", {"replies": True}),
    ("partition: both ways", {"commands": True, "replies": True}),
):
    _partition(_name, **_held)


@kind(LOCKS, "network: slow")
def slow(nemesis: Nemesis) -> Struck:
    way = nemesis.way
    way.delay(nemesis.chance.uniform(0.01, TTL / 16))
    try:
        nemesis.wait(nemesis.chance.uniform(0.5, 2 * TTL))
    finally:
        way.delay(0.0)
    return Struck(silent=True)


@kind(LOCKS, "network: replies lost")
def lose(nemesis: Nemesis) -> Struck:
    nemesis.way.lose(nemesis.chance.randint(1, 8))
    nemesis.wait(0.5)
    return Struck(silent=True)


@kind(LOCKS, "network: connections half open")
def half_open(nemesis: Nemesis) -> Struck:
    nemesis.way.forsake()
    return Struck(silent=True)


@kind(LOCKS, "network: connections cut")
def cut(nemesis: Nemesis) -> Struck:
    nemesis.way.cut()
    return Struck()


# The broker


@kind(BROKER, "broker: connections cut")
def cut_broker(nemesis: Nemesis) -> Struck:
    nemesis.host.to_broker.cut()
    return Struck()


@kind(BROKER, "broker: stalled")
def stall_broker(nemesis: Nemesis) -> Struck:
    nemesis.scene.broker.pause()
    try:
        nemesis.silence()
    finally:
        nemesis.scene.broker.resume()
    return Struck()


@kind(BROKER, "broker: restarts with its data")
def restart_broker(nemesis: Nemesis) -> Struck:
    nemesis.scene.broker.kill()
    nemesis.wait(nemesis.chance.uniform(0.0, 1.0))
    nemesis.scene.broker.start()
    return Struck()


@kind(BROKER, "broker: partition of a host")
def part_broker(nemesis: Nemesis) -> Struck:
    way = nemesis.host.to_broker
    way.hold(commands=True, replies=True)
    try:
        nemesis.silence()
    finally:
        way.let_through()
    return Struck()


def nemeses(scene: Scene, seed: int, kinds: Callable[[str], bool]) -> list[Nemesis]:
    """One for the processes of each host, one for the lock server or some for the nodes, one for the broker."""

    def chosen(of: Mapping[str, Strike]) -> dict[str, Strike]:
        return {name: strike for name, strike in of.items() if kinds(name)}

    made = [Nemesis(scene, chosen(PROCESSES), f"{seed} {name}", host=host) for name, host in scene.hosts.items()]
    for number in range(min(AT_ONCE, len(scene.locks))):
        servers = range(len(scene.locks))[number::AT_ONCE]
        made.append(Nemesis(scene, chosen(LOCKS), f"{seed} locks {number}", servers=servers))
    return [*made, Nemesis(scene, chosen(BROKER), f"{seed} broker")]
