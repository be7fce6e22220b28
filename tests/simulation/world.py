"""Hosts, servers, a broker, workers, and the checker's knowledge of running bodies: everything of one simulation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from celery import states

from tests.simulation import apps, inside, loading, trouble
from tests.simulation.broker import Broker
from tests.simulation.network import Network
from tests.simulation.parked import Parked
from tests.simulation.scheduler import Host, Process, Simulation
from tests.simulation.servers import Server

#: Seconds within which a process that was frozen has to react to what it finds.
NOTICES = 0.5

#: The share of the ttl that a step of a renewal may take, and the most seconds.
STEP_SHARE, MAX_STEP = 1 / 20, 1.0

#: Seconds within which a holder stops that is told to: on the threads pool nothing interrupts a step of a body.
STOPS = 0.3

#: Seconds within which a lock server that is back hears of ended bodies, and a copy that does not know of one ends; and
#: the number of network messages that this takes, if these are slow.
HEARD, SOME = 1.5, 20

#: Seconds before the end of a lease at which the simulator looks at its holder.
LAST_MOMENT = 0.0005


class World:
    """Everything of one simulation.

    Args:
        run: the simulation.
        settings: of the app, beyond the backend.
        nodes: number of lock servers: one, or those of a Redlock.
        latency: see `Plan`.
    """

    def __init__(
        self,
        run: Simulation,
        settings: dict[str, Any],
        *,
        nodes: int = 1,
        visibility: float = 60.0,
        latency: float = 0.0,
    ) -> None:
        self.run = run
        run.world = self  # type: ignore[attr-defined]
        self.network = run.network = Network(run, latency=latency)  # type: ignore[attr-defined]
        self.broker = run.broker = Broker(run, visibility=visibility)  # type: ignore[attr-defined]
        self.hosts: list[Host] = []
        #: For new hosts: the bounds of their clocks, and the identity that they share, if any.
        self.rates, self.walls, self.identity = (0.996, 1.004), (-2.0, 2.0), ""
        self.servers = [Server(run, self.network, self.host(f"redis{number}")) for number in range(nodes)]
        #: What faults strike: these servers, or the nodes of the cluster that stands for them.
        self.nodes = self.servers
        self.cluster: Any = None
        url = ";".join(f"redis://redis{number}:6379/0" for number in range(nodes))
        self.settings = {
            "singleton_lock_backend": url,
            "broker_transport_options": {"visibility_timeout": visibility},
            **settings,
        }
        self.revoked: set[str] = set()
        self.bodies = Bodies(self)
        #: Programs that send messages, and functions that are called when a worker's main process gets a message.
        self.senders: list[Any] = []
        #: The checker of their messages.
        self.senders_queue: Any = None
        self.at_received: list[Callable[[Process, Any], None]] = []
        self.parked = Parked(self)
        self.workers: list[Any] = []
        self.plan: Any = None
        #: Checkers of messages that end as another one, and of messages of which only the newest runs, if any.
        self.answers: Any = None
        self.newest: Any = None
        #: By number of the message: its id and the message itself.
        self.sent: dict[int, tuple[str, Any]] = {}
        #: By number: when the sender began to send it.
        self.asked_at: dict[int, float] = {}
        #: By id: the final states that were stored.
        self.ends: dict[str, list[str]] = defaultdict(list)
        #: By host: settings of its workers that differ.
        self.settings_of: dict[str, dict[str, Any]] = {}
        #: The ttls of locks outside of tasks, by the parity of the use.
        self.ttls: tuple[float, float] | None = None
        #: When links were cut at the end of a body, and for how many seconds.
        self.ways_cut_at: list[tuple[float, float]] = []
        self.results_slow_until = 0.0
        #: For beats that are to be killed during a send: seconds until each is restarted.
        self.doomed_beats: list[float] = []
        #: Faults that strike the process that gets a lock next.
        self.at_holds: list[Callable[[Process], None]] = []
        #: Called when the task after a message runs: with the message's return value and its number.
        self.on_followed: list[Callable[[Any, int], None]] = []
        self._pids = 100
        #: Whether a new process has the pid of the last one of its host that has died.
        self.pids_come_again = False

    def host(self, name: str) -> Host:
        """Make a machine."""
        rng = self.run.rng
        host = Host(name, rate=rng.uniform(*self.rates), steady=rng.uniform(100, 5000), wall=rng.uniform(*self.walls))
        host.identity = self.identity or name
        self.hosts.append(host)
        return host

    def process(self, host: Host, name: str) -> Process:
        """Make a process that has not started yet."""
        self._pids += 1
        living = {it.os_pid for it in self.run.processes if it.alive} if self.pids_come_again else set()
        dead = (it.os_pid for it in reversed(self.run.processes) if it.host is host and it.os_pid not in living)
        os_pid = next(dead, self._pids) if self.pids_come_again else self._pids
        return Process(host, self._pids, name, loading.take(), os_pid)

    def leases(self) -> list[tuple[Process, Any]]:
        """The leases of running bodies, with their processes."""
        return [(body.process, body.lease) for body in self.bodies.each()]

    def follows(self, task_id: str, args: Any) -> None:
        """The task after a message runs, with the message's return value and its number."""
        self.bodies.followed[task_id] += 1
        for on_followed in self.on_followed:
            on_followed(*args)
        self.run.note("follows", f"{task_id} {args}")


@dataclass(eq=False)
class Running:
    """A running body."""

    task: str
    key: str
    number: int | str
    attempt: int
    process: Process
    fence: int
    limit: int
    lease: Any
    began: float
    #: When it asked for its lock.
    asked_at: float


@dataclass(eq=False)
class Bodies:
    """The bodies that run or have run, and what must hold for them."""

    world: World
    running: dict[str, list[Running]] = field(default_factory=lambda: defaultdict(list))
    #: By key: the highest fence so far.
    fences: dict[str, int] = field(default_factory=dict)
    #: By key: the fences that were given out.
    given: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    #: By number of the message: how often its body began, and how often it ended well.
    begun: dict[int | str, int] = field(default_factory=lambda: defaultdict(int))
    succeeded: dict[int | str, int] = field(default_factory=lambda: defaultdict(int))
    #: Locks that are kept for a retry: the attempt before it, and until when at least.
    kept: dict[str, tuple[Running, float]] = field(default_factory=dict)
    #: Locks that must rest (`lock_at_least_for`): the message that had the lock last, and until when.
    rests: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: The processes in which bodies have ended, by the beginning of their leases' owners.
    owners_ended: dict[str, Process] = field(default_factory=dict)
    #: How many processes are to be killed when a body ends in them.
    doomed: int = 0
    #: Faults for the hosts on which the next bodies end, with their seconds.
    befalls: list[tuple[Callable[[Any], Callable[[], None]], float]] = field(default_factory=list)
    #: Messages and attempts whose process was gone before a lock server knew that they had ended.
    unknown: set[tuple[int | str, int]] = field(default_factory=set)
    #: Messages that ended in another way than their body, in another process, before a lock server knew of that.
    ended_elsewhere: set[int | str] = field(default_factory=set)
    #: Messages of which a body began after one had ended well, of which no lock server knew.
    run_again: set[int | str] = field(default_factory=set)
    #: By message and attempt: the body that ended last, and when.
    ended: dict[tuple[int | str, int], tuple[Running, float]] = field(default_factory=dict)
    #: By message and attempt: the states in which its bodies have ended, in this order.
    ended_as: dict[tuple[int | str, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    followed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    #: Called when a body begins, and when a body has reached its last line; with its request.
    watched: list[tuple[Callable[[Running, Any], None], Callable[[Running, Any], None]]] = field(default_factory=list)
    #: Whether a frozen holder is excused, since it could not know that its lease was over.
    excuses: bool = True

    def run(self, task: Any, name: str, key: str, number: int | str, plan: str) -> None:
        """Run a body: the words of `plan` say how long it takes, and how it ends."""
        run, lease = self.world.run, task.lock
        process = run.current.process  # type: ignore[union-attr]
        words = apps.words_of(plan)
        is_shared = apps.TASKS.get(name, {}).get("lock_scope") not in apps.OF_EACH_MESSAGE
        lock = f"{name}:{key}" if is_shared else f"{name}:{key}:{number}"
        mine = Running(
            name,
            lock,
            number,
            task.request.retries or 0,
            process,
            lease.fence,
            task.lock_limit or 1,
            lease,
            run.now,
            # By the clock of its host. Between the lock and the body, a record may be written, over a slow way.
            run.now - (lease.trusted_until - lease.remaining - lease.acquired_at),
        )
        self._begins(mine)
        for begins, _ in self.watched:
            begins(mine, task.request)
        leave = self._ends_with(mine)
        try:
            left = float(words.get("takes", "0.5"))
            while left > 0:
                step = min(left, 0.2)
                left -= step
                self._go_on(process, step, words)
                if words.get("checks"):
                    lease.check()
                    self._is_told_right(mine)
        finally:
            leave()
            self._ends(process, lease)
        for _, ends in self.watched:
            ends(mine, task.request)
        self.ended[number, mine.attempt] = mine, run.now
        ended_as = self.ended_as[number, mine.attempt]
        process.at_end.append(partial(self._is_known, mine))
        if int(words.get("retries", "0")) > mine.attempt:
            ended_as.append(states.RETRY)
            # If the next attempt was already carried out, since this attempt ran twice, nothing is kept.
            keeps = task.lock_retain_on_retry and lease.held and (number, mine.attempt + 1) not in self.ended
            # With this policy nothing is kept from newer messages: their own checker looks at that.
            if keeps and task.on_conflict != "replace":
                self.kept[lock] = mine, run.now + lease.ttl / 2
            raise task.retry(countdown=float(words.get("countdown", "0.5")))
        at_least_for = task.lock_options(task.request).at_least_for
        if at_least_for and lease.held:
            self.rests[lock] = mine.number, mine.asked_at + at_least_for
        if words.get("fails") or (words.get("fails_once") and self.begun[number] == 1):
            ended_as.append(states.FAILURE)
            raise ValueError(f"message {number} fails")
        ended_as.append(states.SUCCESS)
        self.succeeded[number] += 1
        run.note("body ends well", f"{lock} message={number}")

    def each(self) -> Iterator[Running]:
        """The bodies that run."""
        return chain.from_iterable(self.running.values())

    def _go_on(self, process: Process, step: float, words: dict[str, str]) -> None:
        """Go on for a step; a stubborn body ignores what interrupts it, that many times."""
        try:
            self.world.run.park(step)
        except inside.public(process.package, "Aborted"):
            words["stubborn"] = str(int(words.get("stubborn", "0")) - 1)
            if int(words["stubborn"]) < 0:
                raise

    def _begins(self, mine: Running) -> None:
        run = self.world.run
        run.note("body begins", f"{mine.key} message={mine.number} attempt={mine.attempt} fence={mine.fence}")
        self.begun[mine.number] += 1
        is_unknown = (mine.number, mine.attempt) in self.unknown or self._was_silent(mine)
        must, of, number = run.must, mine.key, mine.number
        if self.succeeded[number]:
            self.run_again.add(number)
        others = [other for other in self.running[of] if not self._is_excused(other)]
        if self.begun[number] > 1:
            if not is_unknown:
                must(not self.succeeded[number], "message {} runs again after its success", number)
            is_alone = not any(other.number == number for other in others)
            must(is_alone, "{}: message {} runs beside itself", of, number)
        self._takes_what_is_kept(mine)
        must(len(others) < mine.limit, "{}: message {} runs beside {}", of, number, [other.number for other in others])
        # Of several holders at once, the one that got the lock first may be the second to begin.
        if mine.limit == 1 and of in self.fences:
            must(mine.fence > self.fences[of], "{}: fence {} after {}", of, mine.fence, self.fences[of])
        must(mine.fence not in self.given[of], "{}: fence {} is given out twice", of, mine.fence)
        self.given[mine.key].add(mine.fence)
        self.fences[mine.key] = max(mine.fence, self.fences.get(mine.key, 0))
        self.running[mine.key].append(mine)

    def _takes_what_is_kept(self, mine: Running) -> None:
        if any("killed" in fault.kind for fault in self.world.plan.faults):
            return
        must, now, of, number = self.world.run.must, self.world.run.now, mine.key, mine.number
        if of in self.rests:
            last, rests_until = self.rests[of]
            must(now >= rests_until - NOTICES / 5, "{}: message {} runs too soon after message {}", of, number, last)
        before, until = self.kept.get(of, (mine, 0.0))
        is_next = number == before.number and mine.attempt > before.attempt
        is_revoked = f"m{before.number}" in self.world.revoked
        if not (before is mine or is_revoked or self._may_be_lost(before)):
            is_free, what = is_next or now >= until, (of, number, before.number)
            must(is_free, "{}: message {} takes what is kept for message {}", *what)
        if is_next or is_revoked:
            self.kept.pop(of, None)

    @trouble.excuse
    def _may_be_lost(self, before: Running) -> bool:
        """Whether the request to keep the lock may have come after the lease was over; or the next attempt may have got
        the lock without hearing of it, and so has freed it.
        """
        return trouble.was_there(self.world, since=self.ended[before.number, before.attempt][1])

    def _ends(self, process: Process, lease: Any) -> None:
        """A body ends in this process, which may now be killed."""
        run = self.world.run
        self.owners_ended[lease.owner] = process
        if self.befalls and process.alive:
            befall, seconds = self.befalls.pop(0)
            run.after(seconds, befall(process.host))
        if self.doomed and process.alive:
            self.doomed -= 1
            run.strikes("child killed at an end")
            worker = next(worker for worker in self.world.workers if worker.process in (process, process.parent))
            run.after(run.rng.uniform(0.0, 0.01), lambda: run.kill(process))
            if process.parent is None:
                run.after(0.3, worker.start)

    def _is_known(self, ended: Running) -> None:
        """The process of an ended body ends: nobody else knows of the body's end if it was not recorded yet."""
        if not self.has_record(ended):
            self.unknown.add((ended.number, ended.attempt))

    def note_end(self, task_id: str, state: str) -> None:
        """A final state is stored: maybe that of a copy in another process, which could not know how its message had
        ended.
        """
        task = self.world.run.current
        for (number, attempt), (ended, _) in self.ended.items():
            ended_as = self.ended_as[number, attempt]
            is_other = state not in ended_as and not states.READY_STATES.isdisjoint(ended_as)
            is_elsewhere = task is not None and task.process is not ended.process
            if f"m{number}" == task_id and is_other and is_elsewhere and self.is_heard_of_late(number, attempt):
                self.ended_elsewhere.add(number)

    @trouble.excuse
    def is_heard_of_late(self, number: int | str, attempt: int) -> bool:
        """Whether the lock servers could not hear of the end of this attempt until its lease was over, and hear of it
        about now.
        """
        if (number, attempt) not in self.ended:
            return False
        now, (ended, at) = self.world.run.now, self.ended[number, attempt]
        host, heard = ended.process.host, HEARD + SOME * self.world.plan.latency
        over = at + (ended.lease.trusted_until - host.clock(at)) / host.rate
        return any(over < min(until, now) and now < until + heard for until in self._silent_until(ended, at))

    def has_record(self, ended: Running) -> bool:
        """Whether most lock servers know of the end of this attempt."""
        servers, attempt = self.world.servers, (f"m{ended.number}", ended.attempt)
        known = [
            server for server in servers if any(inside.attempt_of(key) == attempt for key, _ in server.living_values())
        ]
        return len(known) * 2 > len(servers)

    @trouble.excuse
    def _was_silent(self, mine: Running) -> bool:
        """Whether no lock server could learn of the end of this attempt before its hold had expired."""
        now = self.world.run.now
        ended, at = self.ended.get((mine.number, mine.attempt), (mine, now))
        silent_until = self._silent_until(ended, at)
        # A record that has just come may have come after the grant.
        knows = self.has_record(ended) and not any(now - NOTICES < until for until in silent_until)
        if ended is mine or knows:
            return False
        return any(until > at + ended.lease.ttl / 2 for until in silent_until)

    def _silent_until(self, ended: Running, at: float) -> list[float]:
        """Until when something kept the process of a body that ended at that time from the lock servers."""
        ways = [self.world.network.link(ended.process.host.name, node.host.name) for node in self.world.nodes]
        stalls = [one for one in self.world.plan.faults if one.kind == "server stalled" and one.at <= at + NOTICES]
        silent_until = [*(way.troubled_until for way in ways), *(stall.at + stall.seconds for stall in stalls)]
        return silent_until + self._frozen_until(at)

    def _frozen_until(self, at: float) -> list[float]:
        """Until when processes are frozen that may have ended a body at that time, while no lock server was there, or
        the release was on a long way.
        """
        faults = self.world.plan.faults
        away = [fault for fault in faults if fault.kind in trouble.OF_SERVERS and fault.at <= at]
        back_at = max((fault.at + fault.seconds for fault in away), default=at)
        heard_at = back_at + NOTICES if back_at > at else at + SOME * self.world.plan.latency
        frozen = [fault for fault in faults if fault.kind in trouble.OF_WORKERS and at <= fault.at <= heard_at]
        return [fault.at + fault.seconds for fault in frozen]

    def _is_told_right(self, mine: Running) -> None:
        """Check: `check()` has just reported that the lease is held."""
        lease, now = mine.lease, mine.process.host.clock(self.world.run.now)
        is_held, what = lease.reason is None and lease.trusted_until > now, (mine.key, mine.number)
        self.world.run.must(is_held, "{}: message {} is told that its lease is held, which is over", *what)
        must_be_kept(self.world, mine.process, mine.lease, f"{mine.key}: message {mine.number}, which has asked,")

    def _ends_with(self, mine: Running) -> Any:
        def leave() -> None:
            if mine in self.running[mine.key]:
                self.running[mine.key].remove(mine)

        mine.process.at_end.append(leave)
        return leave

    @trouble.excuse
    def _is_excused(self, other: Running) -> bool:
        """Whether nothing could have notified it: it is or was just frozen, and nobody could renew for it."""
        process = other.process
        if not self.excuses or not self._is_frozen(process, other.lease):
            return False
        if process.parent is None or self._is_frozen(process.parent, other.lease):
            return True
        # Or its main process was frozen until the lease was over.
        return bool(process.host.clock(process.parent.frozen_until) > other.lease.trusted_until)

    def _is_frozen(self, process: Process, lease: Any) -> bool:
        now = self.world.run.now
        is_over = lease.trusted_until <= process.host.clock(now)
        reacts_at = process.frozen_until + (noticed_after(lease.ttl) if is_over else NOTICES)
        return not process.alive or not process.runs or now < reacts_at


def noticed_after(ttl: float) -> float:
    """Seconds within which the holder of a lease has stopped that was frozen until its end, from when it goes on: it
    asks the lock server, and counts the lease as lost if there is no answer after two steps.
    """
    return 2 * min(MAX_STEP, ttl * STEP_SHARE) + STOPS


def look_at_the_last(world: World, process: Process, lease: Any) -> None:
    """Make sure that everything is checked just before the holder stops trusting its lease, even if nothing happens."""
    left = lease.trusted_until - process.host.clock(world.run.now)
    world.run.after(left / process.host.rate - LAST_MOMENT, lambda: None)


def must_be_kept(world: World, process: Process, lease: Any, of: str) -> None:
    """Check that a trusted lease is kept: most servers could not give the lock to somebody else.

    This includes a stopped process: if it resumes now, it may write something before it learns of the loss.
    """
    left = lease.trusted_until - process.host.clock(world.run.now)
    if lease.reason is not None or left <= 0:
        return
    key, servers = _run_key(process.package, lease.key), world.servers
    owner = lease.owner.encode()
    others = [server for server in servers if not server.keeps(key, owner)]
    keeping, many = len(servers) - len(others), len(servers)
    if keeping * 2 <= many:
        others = [server for server in others if many == 1 or server.remembers(lease.ttl)]
    is_kept = len(others) * 2 < many
    world.run.must(is_kept, "{} trusts its lease for {:.3f} s, which {} of {} servers keep", of, left, keeping, many)


@lru_cache(maxsize=256)
def _run_key(package: Any, key: str) -> bytes:
    with loading.uninterrupted():
        return inside.run_key(package, key)
