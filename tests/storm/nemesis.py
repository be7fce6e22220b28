"""What goes wrong in a storm, by kind; each fault undoes itself, and reports what it struck."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from celery_singleton_lock import clock
from tests import appended
from tests.programs import group_of
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.servers import SentinelGroup, until
from tests.storm.load import HOT
from tests.storm.places import Sentinels, Servers
from tests.storm.scene import TTL, Host, Scene, children_of, end

#: Seconds between two faults of one nemesis; and of a nemesis whose faults last only a moment.
PAUSE, MOMENT = (0.1, 1.5), (0.1, 0.9)

#: Seconds after which it looks what has ended by itself on its host.
LOOK = 1.0

#: The same for the nemesis that kills children: most children get to do something first.
CHILD = 0.5, 3.0

#: Seconds of silence of a server, or of a way to it.
SILENCE = 0.3, 2.5 * TTL

#: Seconds between two faults that make a lock server forget: by then, all held locks are on all nodes again.
APART = 3 * TTL


#: Seconds for which a client waits for an answer: a twentieth of the ttl, less the time that it and the server need.
PATIENCE = TTL / 40

#: Nodes of a Redlock that may be struck at the same time: a majority of five.
AT_ONCE = 3


@dataclass
class Struck:
    """What is recorded of a fault.

    Attributes:
        pids: of the processes that it struck; empty if it struck all.
        fate: what happened to them: "killed", "frozen" (a whole worker), "stopped" (one process of a worker).
        forgot: the lock server that forgot something.
        latest: it forgot only what was written since the fault began.
        but_ends: it did not forget how messages ended: those writes waited for replicas.
        silent: ways on which no lock server answered: "east/0", or "*/0" for those of all hosts.
    """

    pids: list[int] = field(default_factory=list)
    fate: str = ""
    forgot: str = ""
    latest: bool = False
    but_ends: bool = False
    silent: list[str] = field(default_factory=list)


Strike = Callable[["Nemesis"], Struck | None]

#: Kinds of faults: of processes of a host, of the lock servers and the ways to them, and of the broker.
PROCESSES: dict[str, Strike] = {}
LOCKS: dict[str, Strike] = {}
BROKER: dict[str, Strike] = {}

#: Faults of lock servers that replace a lost server themselves.
SENTINELS: dict[str, Strike] = {}
CLUSTER: dict[str, Strike] = {}

#: Faults that are over in a moment, and come several times a second.
CHILDREN: dict[str, Strike] = {}
MOMENTS: dict[str, Strike] = {}


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
        host: whose processes it strikes; None if it strikes no processes.
        servers: numbers of its lock servers; no two nemeses share one.
        pause: range of seconds between two faults.
        revives: whether it restarts what has ended by itself on its host.
    """

    def __init__(
        self,
        scene: Scene,
        kinds: Mapping[str, Strike],
        seed: str,
        *,
        host: Host | None = None,
        servers: Sequence[int] = (),
        pause: tuple[float, float] = PAUSE,
        revives: bool = False,
    ) -> None:
        self.scene, self.chance = scene, random.Random(seed)
        self._host = host
        self._servers, self._pause, self._revives = servers, pause, revives
        self._kinds = kinds
        self._seen_at = clock.now()
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
    def server(self) -> RedisServer | None:
        """A server that has locks, if there is one."""
        primaries = list(self.scene.place.primaries)
        return self.chance.choice(primaries) if primaries else None

    def silence(self) -> None:
        """Seconds of a stall or a partition; most are short."""
        self._stopped.wait(self.chance.triangular(*SILENCE, SILENCE[0]))

    def wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _run(self) -> None:
        try:
            while not self._rest(self.chance.uniform(*self._pause)):
                if self._kinds:
                    self._strike(self.chance.choice(sorted(self._kinds)))
        except BaseException as error:  # noqa: BLE001 - the storm raises it
            self.error = error

    def _rest(self, seconds: float) -> bool:
        """Wait between two faults, and meanwhile restart what has ended; whether it is to stop."""
        deadline = clock.now() + seconds
        while not self._stopped.wait(max(min(deadline - clock.now(), LOOK), 0.0)):
            if self._revives and self._host:
                self._revive(self._host)
            if clock.now() >= deadline:
                return False
        return True

    def _revive(self, host: Host) -> None:
        seen_at, self._seen_at = self._seen_at, clock.now()
        for what, pids in self.scene.revive(host):
            self._note(f"{what}: ended by itself", seen_at, Struck(pids, "killed"))

    def _strike(self, name: str) -> None:
        begin = clock.now()
        struck = self._kinds[name](self)
        if struck is not None:
            self._note(name, begin, struck)

    def _note(self, name: str, begin: float, struck: Struck) -> None:
        line = {"event": "fault", "kind": name, "begin": begin, "at": clock.now(), **asdict(struck)}
        appended.append(self.scene.history, line)


# Processes


def _worker(nemesis: Nemesis) -> tuple[Host, str, list[int]]:
    """A worker of the host, by its pool, and all its processes."""
    host = nemesis.host
    pool = nemesis.chance.choice(sorted(host.workers))
    return host, pool, group_of(host.workers[pool].process.pid)


def _restart(nemesis: Nemesis, host: Host, pool: str) -> None:
    host.workers[pool] = nemesis.scene.worker(host, pool)
    with suppress(AssertionError):  # It has ended: another fault struck it, and it is restarted.
        host.workers[pool].wait_until_ready()


def _child(nemesis: Nemesis) -> int | None:
    children = children_of(nemesis.host.workers["prefork"].process.pid)
    return nemesis.chance.choice(children) if children else None


def _signal_child(name: str, number: signal.Signals) -> None:
    @kind(CHILDREN, name)
    def strike(nemesis: Nemesis) -> Struck | None:
        child = _child(nemesis)
        if child is None:
            return None
        try:
            os.kill(child, number)
        except ProcessLookupError:
            return None
        return Struck([child], "killed")


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
    return Struck([child], "stopped")


@kind(PROCESSES, "worker: SIGKILL")
def kill_worker(nemesis: Nemesis) -> Struck:
    host, pool, pids = _worker(nemesis)
    host.workers[pool].kill()
    _restart(nemesis, host, pool)
    return Struck(pids, "killed")


@kind(PROCESSES, "main process: SIGKILL")
def kill_main(nemesis: Nemesis) -> Struck:
    """Its children go on for a while; a supervisor ends what is left."""
    host, pool, pids = _worker(nemesis)
    end(host.workers[pool], signal.SIGKILL)
    _restart(nemesis, host, pool)
    return Struck(pids, "killed")


@kind(PROCESSES, "main process: stopped")
def stop_main(nemesis: Nemesis) -> Struck:
    """Its children go on."""
    main = nemesis.host.workers["prefork"].process.pid
    with _stopped([main]):
        nemesis.wait(nemesis.chance.uniform(0.2, 2 * TTL))
    return Struck([main], "stopped")


@kind(PROCESSES, "worker: frozen, shorter than a lease")
def freeze_shortly(nemesis: Nemesis) -> Struck:
    _, _, pids = _worker(nemesis)
    with _stopped(pids):
        nemesis.wait(nemesis.chance.uniform(0.05, TTL / 4))
    return Struck(pids, "frozen")


@kind(PROCESSES, "worker: frozen, longer than a lease")
def freeze_long(nemesis: Nemesis) -> Struck:
    _, _, pids = _worker(nemesis)
    with _stopped(pids):
        nemesis.wait(nemesis.chance.uniform(1.1, 2) * TTL)
    return Struck(pids, "frozen")


@kind(PROCESSES, "worker: SIGQUIT")
def quit_worker(nemesis: Nemesis) -> Struck:
    host, pool, pids = _worker(nemesis)
    end(host.workers[pool], signal.SIGQUIT)
    _restart(nemesis, host, pool)
    return Struck(pids, "killed")


@kind(PROCESSES, "worker: SIGTERM")
def terminate_worker(nemesis: Nemesis) -> Struck:
    host, pool, pids = _worker(nemesis)
    end(host.workers[pool], signal.SIGTERM)
    _restart(nemesis, host, pool)
    return Struck(pids, "killed")


@kind(PROCESSES, "rolling deploy, to other options")
def deploy(nemesis: Nemesis) -> Struck:
    """The new worker starts before the old one ends, and has another ttl, wait, policy and prefetch.

    All locks of a Redlock have the same ttl.
    """
    host, pool, pids = _worker(nemesis)
    old, chance = host.workers[pool], nemesis.chance
    host.deployed[pool] = {
        "singleton_lock_ttl": TTL if len(nemesis.scene.place.servers) > 1 else chance.choice([0.6 * TTL, TTL]),
        "singleton_lock_wait": chance.choice([0.0, 1.0, 5.0]),
        "singleton_lock_on_conflict": chance.choice(["skip", "raise", "retry"]),
        "worker_prefetch_multiplier": chance.choice([1, 2, 4]),
    }
    _restart(nemesis, host, pool)
    end(old, signal.SIGTERM)
    return Struck(pids, "killed")


@kind(PROCESSES, "GIL held")
def hog(nemesis: Nemesis) -> Struck | None:
    """A task holds it, on whichever worker: shorter than a lease, since only prefork tolerates more."""
    if "hogging" not in nemesis.scene.app.tasks:
        return None
    try:
        nemesis.scene.app.tasks["hogging"].apply_async((f"hog-{nemesis.chance.random()}", 1))
    except OperationalError:  # The broker is away.
        return None
    return Struck()


@kind(PROCESSES, "beat: SIGKILL")
def kill_beat(nemesis: Nemesis) -> Struck | None:
    host = nemesis.host
    if host.beat is None:
        return None
    pids = group_of(host.beat.process.pid)
    host.beat.kill()
    host.beat = nemesis.scene.start_beat(host)
    return Struck(pids, "killed")


@kind(PROCESSES, "beat: stopped")
def stop_beat(nemesis: Nemesis) -> Struck | None:
    beat = nemesis.host.beat
    if beat is None:
        return None
    pids = group_of(beat.process.pid)
    with _stopped(pids):
        nemesis.wait(nemesis.chance.uniform(0.2, 2 * TTL))
    return Struck(pids, "frozen")


@kind(PROCESSES, "sender: SIGKILL")
def kill_sender(nemesis: Nemesis) -> Struck | None:
    host = nemesis.host
    if host.sender is None:
        return None
    pids = group_of(host.sender.process.pid)
    host.sender.kill()
    host.sender = nemesis.scene.start_sender(host)
    return Struck(pids, "killed")


# Lock servers and the ways to them


def _server_and_way(nemesis: Nemesis) -> tuple[Any, list[str]]:
    number = nemesis.number
    return nemesis.scene.place.servers[number], [f"*/{number}"]


def _host_and_way(nemesis: Nemesis) -> tuple[LossyProxy, list[str]]:
    host, number = nemesis.host, nemesis.number
    return host.to_locks[number], [f"{host.name}/{number}"]


@kind(LOCKS, "lock server: stalled")
def stall(nemesis: Nemesis) -> Struck:
    server, ways = _server_and_way(nemesis)
    server.pause()
    try:
        nemesis.silence()
    finally:
        server.resume()
    return Struck(silent=ways)


@kind(LOCKS, "lock server: DEBUG SLEEP")
def debug_sleep(nemesis: Nemesis) -> Struck | None:
    server, ways = _server_and_way(nemesis)
    return _asked(server, "DEBUG", "SLEEP", nemesis.chance.uniform(0.2, TTL / 2), silent=ways)


@kind(LOCKS, "lock server: restarts with its data")
def restart(nemesis: Nemesis) -> Struck:
    server, ways = _server_and_way(nemesis)
    server.kill()
    nemesis.wait(nemesis.chance.uniform(0.0, TTL))
    server.start()
    return Struck(silent=ways)


@kind(LOCKS, "lock server: dies, and returns empty")
def forget(nemesis: Nemesis) -> Struck | None:
    if not nemesis.scene.may_forget(APART):
        return None
    server, ways = _server_and_way(nemesis)
    server.kill()
    nemesis.wait(nemesis.chance.choice([0.0, nemesis.chance.uniform(0.0, 2 * TTL)]))
    server.forget()
    return Struck(forgot=str(server.port), silent=ways)


@kind(LOCKS, "lock server: restarts with older data")
def go_back(nemesis: Nemesis) -> Struck | None:
    if not nemesis.scene.may_forget(APART):
        return None
    server, ways = _server_and_way(nemesis)
    server.go_back(nemesis.chance.uniform(0.2, TTL / 2))
    return Struck(forgot=str(server.port), latest=True, silent=ways)


@kind(LOCKS, "lock server: CLIENT PAUSE")
def client_pause(nemesis: Nemesis) -> Struck | None:
    server, ways = _server_and_way(nemesis)
    seconds = nemesis.chance.uniform(0.1, TTL)
    struck = _asked(server, "CLIENT", "PAUSE", round(seconds * 1000), silent=ways)
    nemesis.wait(seconds)
    return struck


def _asked(server: RedisServer | None, *command: Any, silent: Sequence[str] = ()) -> Struck | None:
    """Send a command; no fault if the server does not answer."""
    if server is None:
        return None
    try:
        with Redis(port=server.port, socket_timeout=TTL, retry=Retry(NoBackoff(), 0)) as client:
            client.execute_command(*command)
    except RedisError:
        return None
    return Struck(silent=[*silent])


def _partition(name: str, **held: bool) -> None:
    @kind(LOCKS, name)
    def strike(nemesis: Nemesis) -> Struck:
        way, ways = _host_and_way(nemesis)
        way.hold(**held)
        try:
            nemesis.silence()
        finally:
            way.let_through()
        return Struck(silent=ways)


for _name, _held in (
    ("partition: commands held back", {"commands": True}),
    ("partition: replies held back", {"replies": True}),
    ("partition: both ways", {"commands": True, "replies": True}),
):
    _partition(_name, **_held)


@kind(LOCKS, "network: slow")
def slow(nemesis: Nemesis) -> Struck:
    way, ways = _host_and_way(nemesis)
    seconds = nemesis.chance.uniform(0.01, TTL / 16)
    way.delay(seconds)
    try:
        nemesis.wait(nemesis.chance.uniform(0.5, 2 * TTL))
    finally:
        way.delay(0.0)
    return Struck(silent=ways if seconds > PATIENCE else [])


@kind(LOCKS, "network: replies lost")
def lose(nemesis: Nemesis) -> Struck:
    way, ways = _host_and_way(nemesis)
    way.lose(nemesis.chance.randint(2, 8))
    nemesis.wait(0.5)
    return Struck(silent=ways)


@kind(LOCKS, "network: connections half open")
def half_open(nemesis: Nemesis) -> Struck:
    way, ways = _host_and_way(nemesis)
    way.forsake()
    return Struck(silent=ways)


# Lock servers that get replaced


@kind(SENTINELS, "primary: SIGKILL, a replica is promoted")
def promote(nemesis: Nemesis) -> Struck:
    group = nemesis.scene.place.group
    group.bring_back(group.fail_over())
    return Struck(silent=["*/0"])


@kind(SENTINELS, "primary: silent, a replica is promoted; it comes back")
def depose(nemesis: Nemesis) -> Struck:
    """Processes that are still connected to the old primary free and renew there, and the new one does not notice."""
    group = nemesis.scene.place.group
    old = group.master()
    old.pause()
    try:
        until(lambda: _is_deposed(group, old), "another server is primary")
    finally:
        old.resume()
    nemesis.wait(nemesis.chance.uniform(0.0, 1.0))
    group.demote(old)
    return Struck(forgot=str(old.port), latest=True, but_ends=True, silent=["*/0"])


def _is_deposed(group: SentinelGroup, old: RedisServer) -> bool:
    with suppress(RedisError):
        return group.master() is not old
    return False


@kind(SENTINELS, "primary: stalled, and not replaced")
@kind(CLUSTER, "primary: stalled, and not replaced")
def stall_primary(nemesis: Nemesis) -> Struck | None:
    server = nemesis.server
    if server is None:
        return None
    server.pause()
    try:
        nemesis.wait(nemesis.chance.uniform(0.1, 0.6))
    finally:
        server.resume()
    return Struck(silent=["*/0"])


@kind(SENTINELS, "replica: SIGKILL")
def kill_replica(nemesis: Nemesis) -> Struck:
    group = nemesis.scene.place.group
    replica = nemesis.chance.choice(group.replicas())
    replica.kill()
    nemesis.wait(nemesis.chance.uniform(0.0, 1.0))
    group.bring_back(replica)
    return Struck()


@kind(CLUSTER, "cluster: a slot moves")
def move_slot(nemesis: Nemesis) -> Struck:
    nemesis.scene.place.group.migrate_slot(_key(nemesis))
    return Struck()


@kind(CLUSTER, "cluster: a slot moves, and takes its time")
def move_slot_slowly(nemesis: Nemesis) -> Struck:
    """Meanwhile, new keys are on the new primary, old keys on the old one."""
    nemesis.scene.place.group.migrate_slot(_key(nemesis), lambda: nemesis.wait(nemesis.chance.uniform(0.2, TTL)))
    return Struck()


@kind(CLUSTER, "primary: SIGKILL, its replica is promoted")
def promote_in_cluster(nemesis: Nemesis) -> Struck:
    group = nemesis.scene.place.group
    dead = group.fail_over(_key(nemesis))
    dead.start()
    group.wait_until_ready()
    return Struck(silent=["*/0"])


def _key(nemesis: Nemesis) -> str:
    """The key of a lock that many want."""
    return nemesis.scene.app.tasks["work"].lock_key_of(nemesis.chance.choice([*HOT]), 0.0)


# Moments


@kind(MOMENTS, "moment: all clients cut off (CLIENT KILL)")
def client_kill(nemesis: Nemesis) -> Struck | None:
    return _asked(nemesis.server, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@kind(MOMENTS, "moment: one client cut off")
def client_kill_one(nemesis: Nemesis) -> Struck | None:
    server = nemesis.server
    if server is None:
        return None
    with suppress(RedisError), server.client() as client:
        others = [one["addr"] for one in client.client_list(_type="normal") if int(one["id"]) != client.client_id()]
        if others and client.client_kill_filter(addr=nemesis.chance.choice(others)):
            return Struck()
    return None


@kind(MOMENTS, "moment: SCRIPT FLUSH")
def script_flush(nemesis: Nemesis) -> Struck | None:
    return _asked(nemesis.server, "SCRIPT", "FLUSH")


@kind(MOMENTS, "moment: CLIENT PAUSE")
def pause_shortly(nemesis: Nemesis) -> Struck | None:
    return _asked(nemesis.server, "CLIENT", "PAUSE", nemesis.chance.randint(10, 150))


def _way(nemesis: Nemesis) -> LossyProxy | None:
    ways = nemesis.host.to_locks
    return nemesis.chance.choice(ways) if ways else None


@kind(MOMENTS, "moment: connections cut")
def cut(nemesis: Nemesis) -> Struck | None:
    if way := _way(nemesis):
        way.cut()
        return Struck()
    return None


@kind(MOMENTS, "moment: a reply lost")
def lose_one(nemesis: Nemesis) -> Struck | None:
    if way := _way(nemesis):
        way.lose(1)
        return Struck()
    return None


@kind(MOMENTS, "moment: slow")
def slow_shortly(nemesis: Nemesis) -> Struck | None:
    way = _way(nemesis)
    if way is None or way.is_slow:
        return None
    way.delay(nemesis.chance.uniform(0.01, PATIENCE))
    try:
        nemesis.wait(nemesis.chance.uniform(0.05, 0.3))
    finally:
        way.delay(0.0)
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


def nemeses(
    scene: Scene, seed: int, kinds: Callable[[str], bool], *, pause: tuple[float, float] = PAUSE
) -> list[Nemesis]:
    """Nemeses for the processes of each host, for the lock server (several for a Redlock's nodes), for the broker.

    Args:
        scene: where they strike.
        seed: of all of them.
        kinds: selects the faults.
        pause: range of seconds between two faults of processes or of a lock server.
    """

    def chosen(of: Mapping[str, Strike]) -> dict[str, Strike]:
        return {name: strike for name, strike in of.items() if kinds(name)}

    made = []
    for name, host in scene.hosts.items():
        made.append(Nemesis(scene, chosen(PROCESSES), f"{seed} {name}", host=host, pause=pause, revives=True))
        made.append(Nemesis(scene, chosen(CHILDREN), f"{seed} {name} children", host=host, pause=CHILD))
    servers = scene.place.servers
    for number in range(min(AT_ONCE, len(servers))):
        own = range(len(servers))[number::AT_ONCE]
        made.append(Nemesis(scene, chosen(_of_place(scene)), f"{seed} locks {number}", servers=own, pause=pause))
    made.append(Nemesis(scene, chosen(MOMENTS), f"{seed} moments", pause=MOMENT))
    return [*made, Nemesis(scene, chosen(BROKER), f"{seed} broker")]


def _of_place(scene: Scene) -> Mapping[str, Strike]:
    if isinstance(scene.place, Servers):
        return LOCKS
    return SENTINELS if isinstance(scene.place, Sentinels) else CLUSTER
