"""Locks outside of tasks: programs whose threads take `Lock`, `Semaphore` and `Redlock`, and what must hold for them.

A holder goes on as long as it likes: nothing stops it when its lock is lost. So its knowledge counts: while `lost` is
not true, nobody else has the lock; and it is notified when that is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from redis import Redis

from tests.simulation import fakes, holds, inside, trouble
from tests.simulation.plan import FIRST, Use
from tests.simulation.program import Program
from tests.simulation.scheduler import Process
from tests.simulation.servers import Server
from tests.simulation.world import World, look_at_the_last, must_be_kept, noticed_after

#: Seconds of a holder's step; and steps after which `on_lost` must have notified it.
STEP, TOLD_AFTER = 0.2, 10

#: Seconds between two tries of a release without an answer, and the number of tries.
AGAIN, TRIES = 0.5, 40

#: Seconds after which a waiter must have a lock that was given back, if nothing goes wrong.
HANDED_OVER = 0.3

#: Seconds between two looks at the servers' data; and for which an unused lock may be held.
OFTEN, UNUSED = 0.05, 1.5

#: The same if nothing goes wrong.
UNUSED_IN_CALM = 0.3

#: Seconds for which the way to a node of a Redlock must have been well before that counts: a client that could not
#: reach a node avoids it for four seconds, and then sends it what is pending.
WELL = 8.0

#: Least shares of a lease that are left when it was just granted; and when its loss is known, with two steps of a
#: renewal under way.
GOOD_FOR, KNOWN_BEFORE = 0.6, 0.2

#: Seconds by which a waiter that is served earlier may have waited less than another.
OUT_OF_ORDER = 0.1

#: Seconds by which a wait may exceed its bound if nothing goes wrong.
LATE = 0.5

#: Number of network messages to a lock server and back that each of these takes, if these are slow.
SOME = 10

#: Seconds by which a wait may exceed its bound otherwise: three tries of three steps of a second each, and as much
#: again to give up.
OVERDUE = 20.0


@dataclass(eq=False)
class Turn:
    """A use that is under way: it waits for the lock, and then holds it."""

    use: Use
    process: Process
    since: float
    lock: Any = None
    lease: Any = None
    lost: list[Any] = field(default_factory=list)
    is_overlapped: bool = False
    #: Whether the lock was free when it asked, and nobody else has asked for it since.
    is_alone: bool = False


def begin(world: World) -> LocksChecker:
    """Start the programs; returns the checker."""
    checker = LocksChecker(world)
    for number in range(world.plan.workers):
        host = world.host(f"host{number % 2}")
        program = Program(world, host, f"p{number}", checker.live)
        world.workers.append(program)
        program.start()
    return checker


class LocksChecker:
    """What the programs do, and what must hold for them."""

    def __init__(self, world: World) -> None:
        self.world, self.run, self.plan = world, world.run, world.plan
        self.limits = dict(world.plan.limits)
        self._tombstones = holds.Tombstones(world, frozenset(self.limits))
        self.waiting: dict[str, list[Turn]] = defaultdict(list)
        self.holding: dict[str, list[Turn]] = defaultdict(list)
        self._fences: dict[str, int] = defaultdict(int)
        self._fences_grow = True
        self._left = {use.number for use in world.plan.uses}
        self._began: set[int] = set()
        self._under_way: list[Turn] = []
        #: Locks that somebody has asked for without an answer.
        self._unanswered: set[str] = set()
        self._nothing_left_since: float | None = None
        self._next_look = 0.0
        #: Seconds for which it goes on when nothing is left.
        self._settles = 2 * world.plan.ttl + 2
        self.run.at(self.plan.calm_at + self._settles + OFTEN, lambda: None)  # By then, late requests hold nothing.
        self._unused_since: dict[Any, float] = {}
        #: By process: the nodes of its Redlocks.
        self._nodes_of: dict[Process, Callable[[], Any]] = {}
        longest = sum(use.takes + (use.patience or 0.0) for use in world.plan.uses)
        self._more = SOME * self.plan.latency
        self._must_end = self.plan.calm_at + longest + (len(world.plan.uses) + 1) * (self.plan.ttl + OVERDUE)

    # What the programs do

    def live(self, program: Program) -> None:
        """The life of a program's process."""
        number = self.world.workers.index(program)
        clients = [Redis(host=server.host.name) for server in self.world.servers]
        mine = [use for use in self.plan.uses if use.program == number and use.number not in self._began]
        for thread in sorted({use.thread for use in mine}):
            uses = sorted((use for use in mine if use.thread == thread), key=lambda use: use.at)
            fakes.Thread(target=self._use_all, args=(program, clients, uses), name=f"t{thread}").start()

    def _use_all(self, program: Program, clients: list[Redis], uses: list[Use]) -> None:
        for use in uses:
            self.run.park(max(use.at - self.run.now, 0.0))
            # A use that its process has begun ends with the process.
            self._began.add(use.number)
            turn = Turn(use, program.process, self.run.now)
            self._under_way.append(turn)
            program.process.at_end.append(lambda turn=turn: self._is_over(turn))  # type: ignore[misc]
            self._use(turn, clients)
            self._is_over(turn)

    def _use(self, turn: Turn, clients: list[Redis]) -> None:
        use, package = turn.use, turn.process.package
        lock = turn.lock = self._lock(turn, clients)
        others = [other for other in self._under_way if other is not turn and other.use.name == use.name]
        held = any(holds.on(server, frozenset((use.name,))) for server in self.world.servers)
        # Copies of messages, which ask as well, occur only in plans of nodes.
        turn.is_alone = not (others or held or self.plan.kind == "nodes" or self._may_come_late(use.name))
        for other in others:
            other.is_alone = False
        self.waiting[use.name].append(turn)
        self.run.note("asks", f"{use.name} use={use.number} patience={use.patience}")
        try:
            if not self._acquired(lock, use, package):
                self._refused(turn)
                return
        except inside.locks(package).Unavailable as error:
            self._unavailable(turn, error)
            return
        turn.lease = inside.lease_of(lock)
        self._holds(turn)
        self._keep(turn)
        if not turn.lock.lost and "shared" in use.ways:
            thread = fakes.Thread(target=self._release, args=(turn,), name="releases")
            thread.start()
            thread.join()
        else:
            self._release(turn)

    def _lock(self, turn: Turn, clients: list[Redis]) -> Any:
        use, package = turn.use, inside.locks(turn.process.package)
        options: dict[str, Any] = {
            "timeout": self.world.ttls[use.number % 2] if self.world.ttls else self.plan.ttl,
            "blocking": use.patience != 0,
            "blocking_timeout": use.patience or None,
            "renew": "fixed" not in use.ways,
            "thread_local": "shared" not in use.ways,
            "on_lost": turn.lost.append,
        }
        if len(clients) > 1:
            lock = package.Redlock(clients, use.name, **options)
            # Weak: its thread keeps them as long as something is pending.
            self._nodes_of[turn.process] = ref(inside.nodes_of(lock))
            return lock
        if self.limits[use.name] > 1:
            return package.Semaphore(clients[0], use.name, self.limits[use.name], **options)
        return package.Lock(clients[0], use.name, **options)

    def _acquired(self, lock: Any, use: Use, package: Any) -> bool:
        if "with" in use.ways:
            try:
                lock.__enter__()
            except inside.locks(package).NotAcquired:
                return False
            return True
        return bool(lock.acquire())

    def _keep(self, turn: Turn) -> None:
        """Hold the lock for its time; in the middle, ask something of the lock."""
        use, errors = turn.use, inside.locks(turn.process.package)
        left, seen_lost = use.takes, 0
        verbs = [verb for verb in ("reacquire", "extend", "shorten", "checks") if verb in use.ways]
        try:
            while left > 0:
                self.run.park(min(left, STEP))
                left -= STEP
                if verbs and left < use.takes / 2:
                    self._ask(turn, verbs.pop(), errors)
                seen_lost = seen_lost + 1 if turn.lock.lost and "fixed" not in use.ways else 0
                if seen_lost > TOLD_AFTER:
                    self.run.must(turn.lost, "{}: use {} has lost its lock, and was not told", use.name, use.number)
        except errors.NotOwned as error:
            self.run.note("is told", f"{use.name} use={use.number} {error}")
            what = use.name, use.number, error
            self.run.must(not turn.lease.held, "{}: use {} is told that it lost a lock that it trusts: {}", *what)

    def _ask(self, turn: Turn, verb: str, errors: Any) -> None:
        use = turn.use
        self.run.note(verb, f"{use.name} use={use.number}")
        try:
            if verb == "checks":
                turn.lock.check()
            elif verb == "reacquire":
                turn.lock.reacquire()
            else:
                is_less = verb == "shorten"
                turn.lock.extend(self.plan.ttl / (4 if is_less else 2), replace_ttl=is_less)
        except errors.Unavailable as error:
            self._no_answer(use, error)

    def _release(self, turn: Turn) -> None:
        use, errors, must = turn.use, inside.locks(turn.process.package), self.run.must
        if turn in self.holding[use.name]:
            self.holding[use.name].remove(turn)
        overlapped = turn.is_overlapped
        began, count = self.run.now, sum(self.world.bodies.begun.values())
        for _ in range(TRIES):
            try:
                if "with" in use.ways:
                    turn.lock.__exit__(None, None, None)
                else:
                    turn.lock.release()
            except errors.Unavailable as error:
                self._no_answer(use, error)
                self.run.park(AGAIN)
            except errors.NotOwned as error:
                self.run.note("gave back what it had lost", f"{use.name} use={use.number} {error}")
                self._told_gone(turn)
                may_be = bool(self.plan.faults) or ("fixed" in use.ways and use.takes >= self.plan.ttl / 2)
                must(may_be, "{}: use {} lost its lock, and nothing went wrong: {}", use.name, use.number, error)
                return
            else:
                self.run.note("gives back", f"{use.name} use={use.number}")
                what = use.name, use.number
                must(not overlapped, "{}: use {} is not told that another one had the lock meanwhile", *what)
                self._given_back(use.name, began, count)
                return
        self.run.note("gives up the release", f"{use.name} use={use.number}")

    # What must hold

    def _told_gone(self, turn: Turn) -> None:
        """Called when a release finds that the lock was gone."""

    def _holds(self, turn: Turn) -> None:
        use, name, must = turn.use, turn.use.name, self.run.must
        self.world.bodies.begun[use.number] += 1
        self.run.note("holds", f"{name} use={use.number} fence={turn.lease.fence}")
        longer = [
            other.use.number
            for other in self.waiting[name]
            if other is not turn and other.since < turn.since - OUT_OF_ORDER - self._more
        ]
        self.waiting[name].remove(turn)
        if not self._trusts(turn):
            return  # It was stopped just now; what it does does not matter.
        self._must_last(turn)
        # An answer that takes a third of the ttl does not count: the waiter asks again, behind the others.
        is_fast = self.plan.latency < self.plan.ttl / 20
        # A lock that expires wakes nobody.
        is_freed = not any("fixed" in other.ways and other.takes > self.plan.ttl / 2 for other in self.plan.uses)
        if not self.plan.faults and self.plan.nodes == 1 and is_fast and is_freed:
            must(not longer, "{}: use {} is served before {}", name, use.number, longer)
        others = [other.use.number for other in self.holding[name] if self._trusts(other)]
        must(len(others) < self.limits[name], "{}: use {} has the lock beside {}", name, use.number, others)
        if self.limits[name] == 1:
            for other in self.holding[name]:
                other.is_overlapped = True
            if self._fences_grow:
                fence, last = turn.lease.fence, self._fences[name]
                must(fence > last, "{}: fence {} after {}", name, fence, last)
        self._fences[name] = max(turn.lease.fence, self._fences[name])
        self.holding[name].append(turn)

    def _must_last(self, turn: Turn) -> None:
        """Check that a lease that was just granted lasts, unless its process was frozen meanwhile."""
        left, ttl = turn.lease.trusted_until - turn.process.host.clock(self.run.now), turn.lease.ttl
        # A waiter has to leave the queue, which takes its time.
        least = GOOD_FOR if turn.is_alone else GOOD_FOR / 2
        if turn.process.frozen_until < turn.since:
            what = turn.use.name, turn.use.number, left
            self.run.must(left >= least * ttl, "{}: use {} has a lock that ends in {:.3f} s", *what)
        if "fixed" in turn.use.ways:
            look_at_the_last(self.world, turn.process, turn.lease)

    def _trusts(self, turn: Turn) -> bool:
        """Whether, as far as it can know, its lock is not lost."""
        lease = turn.lease
        return lease.reason is None and lease.trusted_until > turn.process.host.clock(self.run.now)

    def _refused(self, turn: Turn) -> None:
        use, waited, must = turn.use, self.run.now - turn.since, self.run.must
        what = use.name, use.number
        if not any("killed" in fault.kind for fault in self.plan.faults):
            must(not turn.is_alone, "{}: use {} is refused, and nobody else has asked for the lock", *what)
        self.waiting[use.name].remove(turn)
        self.run.note("is refused", f"{use.name} use={use.number}")
        must(use.patience is not None, "{}: use {} waits forever, and is refused after {:.3f} s", *what, waited)
        is_late = waited >= (use.patience or 0.0) * 0.99
        must(is_late, "{}: use {} is refused after {:.3f} s of {}", *what, waited, use.patience)

    def _unavailable(self, turn: Turn, error: Exception) -> None:
        self.waiting[turn.use.name].remove(turn)
        self._no_answer(turn.use, error)

    def _no_answer(self, use: Use, error: Exception) -> None:
        self.run.note("has no answer", f"{use.name} use={use.number} {error}")
        self._unanswered.add(use.name)
        may_be = bool(self.plan.faults) or use.number == FIRST
        self.run.must(may_be, "{}: use {} has no answer, and nothing went wrong: {}", use.name, use.number, error)

    @trouble.excuse
    def _may_come_late(self, name: str) -> bool:
        """Whether a server may still grant the lock to an acquire that was given up, until that is undone."""
        return name in self._unanswered and trouble.is_there(self.world)

    def _given_back(self, name: str, began: float, count: int) -> None:
        """Check, if nothing goes wrong, that a waiter gets the lock at once; `count` locks were granted before."""
        waiters = [turn for turn in self.waiting[name] if turn.since < began - OUT_OF_ORDER - self._more]
        if self.plan.faults or not waiters:
            return

        def look() -> None:
            still = [turn.use.number for turn in waiters if turn in self.waiting[name]]
            goes_on = len(still) < len(waiters) or sum(self.world.bodies.begun.values()) != count
            what = name, HANDED_OVER + self._more, still
            self.run.must(goes_on, "{}: it was given back {:g} s ago, and {} still wait for it", *what)

        self.run.after(HANDED_OVER + self._more, look)

    def _is_over(self, turn: Turn) -> None:
        name = turn.use.name
        for turns in (self.waiting[name], self.holding[name], self._under_way):
            if turn in turns:
                turns.remove(turn)
        self._left.discard(turn.use.number)
        self.run.after(3 * self.plan.ttl + 2, lambda: None)  # The simulation must not end before the lease.

    def look(self) -> None:
        """Check, whenever time is about to advance."""
        for name, turns in self.holding.items():
            for turn in turns:
                must_be_kept(self.world, turn.process, turn.lease, f"{name}: use {turn.use.number}")
                self._must_know(turn)
        for turns in self.waiting.values():
            for turn in turns:
                self._must_not_wait_longer(turn)
        now = self.run.now
        if now >= self._next_look:
            self._next_look = now + OFTEN
            self._must_be_used()
        if self._left or now < self.plan.calm_at:
            self._nothing_left_since = None
            self.run.must(now <= self._must_end, "stuck: uses {}", self._left)
        elif self._nothing_left_since is None:
            self._nothing_left_since = now
        elif now > self._nothing_left_since + self._settles:
            self.run.is_finished = True

    def _must_know(self, turn: Turn) -> None:
        """Check that the loss of a lock that could not be renewed is known well before its end."""
        process, lease, now = turn.process, turn.lease, self.run.now
        if "fixed" in turn.use.ways or lease.reason is not None or not (process.alive and process.runs):
            return
        left = lease.trusted_until - process.host.clock(now)
        is_far = left >= KNOWN_BEFORE * lease.ttl
        may_know = is_far or now > process.frozen_until + noticed_after(lease.ttl)
        if may_know and len(self.world.servers) == 1:
            what = turn.use.name, turn.use.number, left
            self.run.must(is_far, "{}: use {} trusts its lock, {:.3f} s before the end", *what)

    def _must_be_used(self) -> None:
        """Check that a lock held without a lease, by a process that is well, is free soon."""
        living = {it.pid for it in self.run.processes if it.alive and it.runs and not self._reaches_no_majority(it)}
        used = {turn.lease.owner for turn in self._under_way if turn.lease is not None}
        held = holds.on_most(self.world.servers, frozenset(self.limits))
        self._tombstones.look()
        unused = {
            (key, owner)
            for key, value in held.items()
            if inside.hold_of(value).pid in living and (owner := holds.owner_of(value)) not in used
        }
        self._unused_since = {it: self._unused_since.get(it, self.run.now) for it in unused}
        if not self._unused_since or trouble.is_there(self.world):
            return
        longest = UNUSED if self.plan.faults else UNUSED_IN_CALM + self._more
        for (key, _), since in self._unused_since.items():
            seconds = self.run.now - since
            self.run.must(seconds <= longest, "for {:.1f} s: {} is held, and nobody uses it", seconds, key)

    @trouble.excuse
    def _reaches_no_majority(self, process: Process) -> bool:
        """Whether it has no connections to most nodes of its Redlock, and avoids these nodes, since it could not
        connect to them a moment ago: what is pending is sent after that.
        """
        nodes = self._nodes_of.get(process, lambda: None)()
        if nodes is None or not trouble.was_there(self.world, self.run.now - WELL):
            return False
        return inside.reaches_no_majority(nodes, process.host.clock(self.run.now))

    @trouble.excuse
    def _may_lack_a_majority(self) -> bool:
        """Whether a node of a Redlock has no vote yet, while another one may be silent.

        A node does not know for how long it has been empty: it has a vote one ttl after it was first asked for a lock.
        """
        if len(self.world.servers) == 1 or not trouble.is_held_back(self.world):
            return False
        asked_for = [server.asked_for() for server in self.world.servers]
        return any(it is None or it < self.plan.ttl + trouble.AFTERMATH for it in asked_for)

    def _must_not_wait_longer(self, turn: Turn) -> None:
        use = turn.use
        if use.patience is None:
            return
        frozen = not turn.process.runs or turn.process.frozen_until > turn.since
        is_excused = trouble.was_there(self.world, turn.since) or self._may_lack_a_majority()
        late = OVERDUE if is_excused else LATE + self._more
        if not frozen:
            waits, what = self.run.now <= turn.since + use.patience * 1.01 + late, (use.name, use.number, use.patience)
            self.run.must(waits, "{}: use {} was to wait for {} s, and still waits", *what)

    def look_at_the_end(self) -> None:
        """Check, when everything should be over."""
        must = self.run.must
        must(not self._left, "stuck: uses {}", self._left)
        for server in self.world.servers if not self._left else ():
            stays, held = server.without_end(), self._held_by_nobody(server)
            must(stays is None, "{} on {} has no time to live", stays, server.host.name)
            must(held is None, "{} on {} is held by nobody", held, server.host.name)

    def _held_by_nobody(self, server: Server) -> str | None:
        """A lock that a server holds although everything is over."""
        return server.held(frozenset(self.limits))
