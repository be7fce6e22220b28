"""What must hold for the servers' data and the messages' ends, apart from overlaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery import states

from tests.simulation import apps, holds, inside, trouble
from tests.simulation.inside import SLICE
from tests.simulation.scheduler import Process, every

#: Seconds of the simulation between two looks at the servers' data.
OFTEN = 0.05

#: Seconds until a free lock must have reached its waiter, and the lock of a dead or ended process must be free.
AT_ONCE = {"free": 0.15, "dead": 0.5, "ended": 0.15, "idle": 1.5, "left": 1.6, "kept": 1.5}

#: Number of network messages to a lock server and back that this takes, if these are slow.
SOME = 10

#: Seconds within which it is recorded that everything after an ended message was sent: before a copy looks.
SETTLED = 5.0

#: Seconds after a fault for which a process may leave a node of a Redlock alone.
LEFT_ALONE = inside.PAUSE_OF_NODE + 1.0

#: Faults that do not delay the end of a hold.
NO_DELAY = (*trouble.BRIEF, "results slow")

#: States that must not last.
RULES = {
    "free": "for {:.1f} s: {} is free, and its waiter was not woken",
    "dead": "for {:.1f} s: {} is held by process {}, which is dead",
    "ended": "for {:.1f} s: {} is held by process {}, which has ended its body",
    "idle": "for {:.1f} s: {} is held by process {}, which runs no body under it",
    "kept": "for {:.1f} s: {} is held by process {}, which is a message that has ended",
    "left": "for {:.1f} s: {} is held by process {}, which is dead, while somebody waits on its host",
}


class Invariants:
    """Checked while a simulation runs, and at its end."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, world.run
        #: The additional time of several consecutive network messages.
        self._more = SOME * world.plan.latency
        self._tombstones = holds.Tombstones(world)
        #: When each state that must not last began.
        self._since: dict[Any, float] = {}
        #: Free locks that some node could not grant: nobody notices when a node can again. And those whose wake-up may
        #: have gone to a waiter that is dead.
        self._free_on_some: set[Any] = set()
        #: Records as last seen, by key: their text and their meaning.
        self._records: dict[str, bytes] = {}
        self._ended: dict[str, tuple[str, bool]] = {}
        self._looked_at: list[tuple[str, bytes]] | None = None
        #: Ends that came while a lock server may have been away: their records may be missing or late.
        self._unsure: set[tuple[str, str]] = set()
        world.broker.on_put.append(self._put)

    @every(OFTEN)
    def look(self) -> None:
        """Check, when time is about to advance."""
        if len(self.world.servers) == 1:
            self._look_at_records(self.world.servers[0].living_values())
        held = holds.on_most(self.world.servers)
        for server in self.world.servers if held else ():
            endless = server.without_end("run")
            self.run.must(endless is None, "the hold {} on {} has no time to live", endless, server.host.name)
        self._tombstones.look()
        now = {*self._of_holds(held), *(("free", *it) for it in self._missed(held))}
        self._since = {it: self._since.get(it, self.run.now) for it in now}
        self._free_on_some &= now
        for it, since in self._since.items():
            excuses = trouble.HARMLESS if it[0] == "free" else NO_DELAY
            if not trouble.is_there(self.world, but=excuses):
                longest = self._longest(it) + self._more + (2 * SLICE if self._looks_by_itself(it, since) else 0.0)
                lasts, (kind, *what) = self.run.now - since, it
                self.run.must(lasts <= longest, RULES[kind], lasts, *what)

    def _look_at_records(self, values: list[tuple[str, bytes]]) -> None:
        if values is self._looked_at:
            return
        self._looked_at = values
        for key, value in values:
            if (attempt := inside.attempt_of(key)) is None or self._records.get(key) == value:
                continue
            (task_id, _), end = attempt, inside.record_of(value)
            if end.is_settled and end.state in (states.SUCCESS, states.FAILURE):
                is_stored = self.world.ends.get(task_id)
                self.run.must(is_stored, "{}: everything after its end was sent, it says, and no end is stored", key)
            # Otherwise, Celery's verdict on a lost child comes last.
            if key in self._ended and not any("killed" in fault.kind for fault in self.world.plan.faults):
                self._must_not_change(key, end.state, end.is_settled)
            self._records[key], self._ended[key] = value, (end.state, end.is_settled)

    def _must_not_change(self, key: str, state: str, settled: bool) -> None:
        """Check that the recorded end of an attempt does not change, nor that everything after it was sent."""
        (known, was_settled), attempt = self._ended[key], _attempt_at(key)
        number, _ = attempt
        is_one = self.world.bodies.succeeded[number] < 2  # Otherwise another, excused run has ended as well.
        # A copy of an attempt whose end was unknown until its hold was over finds that a newer message has come.
        newest = self.world.newest
        is_one = is_one and not (newest is not None and number in newest.superseded and self._was_silent())
        # Or it is refused; whether its process could know of that end is looked at when its own end is stored.
        is_one = is_one and not self.world.bodies.is_heard_of_late(*attempt)
        if self._is_of_another_run(key, known, state, settled):
            known = state
        if is_one:
            is_same = (state, was_settled) == (known, was_settled and settled)
            self.run.must(is_same, "{}: its end was {}{}, and is {} now", key, known, ", settled" * was_settled, state)

    @trouble.excuse
    def _is_of_another_run(self, key: str, known: str, state: str, settled: bool) -> bool:
        """Whether a record may say how another run of the attempt has ended: the last run, which cannot know that an
        earlier one was late, or any run after which everything was sent.
        """
        ended_as = self.world.bodies.ended_as[_attempt_at(key)]
        return {known, state} <= {*ended_as} and (settled or state == ended_as[-1])

    @trouble.excuse
    def _was_silent(self) -> bool:
        """Whether a lock server may have been silent until now, for longer than a body takes to end."""
        return trouble.was_there(self.world, self.run.now - self.world.plan.ttl, but=trouble.BRIEF)

    def _put(self, message: dict[str, Any], is_taken: bool) -> None:
        """Check that a message is not put back while its lock is kept for it."""
        headers: Mapping[str, Any] = message.get("headers") or {}
        is_put_back = is_taken and inside.header_of(headers).put_back is not None
        if not is_put_back or trouble.is_there(self.world, but=trouble.BRIEF):
            return
        runs = [run for server in self.world.servers for run in holds.on(server)]
        kept = [inside.hold_of(value) for key, value in runs if "shop.keeps" in key]
        attempts = [(hold.task_id, hold.retries) for hold in kept if hold.is_kept]
        task_id = headers.get("id")
        is_other = attempts.count((task_id, headers.get("retries"))) * 2 <= len(self.world.servers)
        if attempts:
            self.run.must(is_other, "message {} is put back, while its lock is kept for it", task_id)

    def note_end(self, task_id: str, state: str) -> None:
        """A final state is stored."""
        excuses = (*trouble.BRIEF, *trouble.OF_WORKERS)
        if trouble.is_there(self.world, but=excuses):
            self._unsure.add((task_id, state))

    def look_at_the_end(self) -> None:
        """Check, when everything is over."""
        kinds, must = [fault.kind for fault in self.world.plan.faults], self.run.must
        for process in self.run.processes if len(self.world.servers) == 1 else ():
            if process.alive:
                must(not (calls := inside.repeated_by(process)), "{} still repeats {}", process.name, calls)
        for number, (task_id, message) in self.world.sent.items():
            ends = self.world.ends.get(task_id, [])
            # Celery ends a message acknowledged early whose process is dead, even after that had sent a retry.
            is_safe = apps.TASKS[message.task].get("acks_late") or not any("killed" in kind for kind in kinds)
            is_safe = is_safe and not any(of == number for of, _ in self.world.bodies.unknown)
            is_safe = is_safe and number not in self.world.bodies.ended_elsewhere
            if ends and is_safe and (task_id, states.FAILURE) not in self._unsure:
                must(len(set(ends)) == 1, "message {} has several ends: {}", number, ends)
            ended_as = self.world.answers.ended_as.get(number, number)
            if states.SUCCESS in ends:
                is_well = self.world.bodies.succeeded[ended_as]
                must(is_well, "message {} ends as {}, and no body has ended well", number, ends)
            if any("killed" in kind for kind in kinds):
                continue
            is_brief = all(fault.seconds < SETTLED for fault in self.world.plan.faults)
            # A body that runs again, since no lock server knew of its end, has it sent again.
            is_brief = is_brief and number not in self.world.bodies.run_again
            if is_brief and message.chained:
                is_once = self.world.broker.put_as[f"{task_id}-after"] <= 1
                must(is_once, "message {}: what follows on it was sent twice", number)
            # What a worker still has to report when it ends is lost if no lock server answers.
            is_unsaid = "worker ended" in kinds and not {*kinds}.isdisjoint(trouble.OF_SERVERS)
            is_unsaid = is_unsaid or "server restarted empty" in kinds or number in self.world.bodies.ended_elsewhere
            is_unsaid = is_unsaid or states.FAILURE in self.world.bodies.ended_as[number, 0]
            if states.SUCCESS in ends and ended_as == number and not is_unsaid:
                is_sure = (task_id, states.SUCCESS) not in self._unsure
                self._is_recorded(number, task_id, is_settled=is_sure)

    def _missed(self, held: dict[str, bytes]) -> set[Any]:
        """Free locks for which somebody waits to be woken."""
        found: set[Any] = set()
        if trouble.is_held_back(self.world):
            return found
        for server in self.world.servers:
            if server.model is None or not server.model._waiting:
                continue
            values = dict(server.living_values())
            inside.check_keys(key.decode() for key in server.model._waiting)
            for key, members, _ in server.living():
                if inside.part_of(key) != "waiting" or "shop.two" in key:
                    continue
                lock = inside.lock_of(key)
                waiters = [member for member in members if self._blocked(server, member)]
                grants = self._grant(run := inside.of_lock(lock))
                if waiters and run not in held and grants * 2 > len(self.world.servers):
                    # Including the fence: another holder may have come in between.
                    it = lock, waiters[0], values.get(inside.fence_key(lock))
                    found.add(it)
                    is_behind_dead = any(inside.mailbox_in(it) not in server.model._waiting for it in members)
                    if grants < len(self.world.servers) or is_behind_dead:
                        self._free_on_some.add(("free", *it))
        return found

    def _blocked(self, server: Any, member: bytes) -> list[Any]:
        """The connections on which a waiter in a slot, or outside of tasks, listens."""
        if member in self.world.parked.names or any(
            inside.has_left(process, member) for process in self.run.processes if process.alive
        ):
            return []
        return list(server.model._waiting.get(inside.mailbox_in(member), ()))

    def _longest(self, it: tuple[Any, ...]) -> float:
        """Seconds that a state may last."""
        kind, *what = it
        if kind == "kept" and not what[-1]:
            return float("inf")
        return AT_ONCE[kind]

    @trouble.excuse
    def _looks_by_itself(self, it: tuple[Any, ...], since: float) -> bool:
        """Whether the waiter for a lock that is free since then may have to find out by itself: no node wakes it, or
        its holder leaves its node alone; or the wake-up takes a longer way: a main process has no slot for its copy, or
        a copy gets it that first asks about another message.
        """
        if it in self._free_on_some:
            return True
        if it[0] == "free" and len(self.world.servers) > 1 and trouble.was_there(self.world, since - LEFT_ALONE):
            return True
        detour_at: float = self.world.parked.detour_at.get(it[1], -1.0)
        return it[0] == "free" and detour_at > since - SLICE

    def _grant(self, run: str) -> int:
        """How many servers would grant a lock: a node of a Redlock may still have an attempt that is to be undone, and
        has no vote for one ttl after it came back empty.
        """
        return sum(
            server.model is not None
            and not any(key == run for key, _, _ in server.living())
            and ((asked_for := server.asked_for()) is None or asked_for >= self.world.plan.ttl)
            for server in self.world.servers
        )

    def _of_holds(self, held: dict[str, bytes]) -> Iterator[tuple[Any, ...]]:
        """The states of holds that must not last."""
        processes, ended_in = {it.pid: it for it in self.run.processes}, self.world.bodies.owners_ended
        busy = {lease.owner for _, lease in self.world.leases()}
        ended = {inside.attempt_of(key) for key, _ in self.world.servers[0].living_values()}
        for key, value in held.items():
            hold, owner = inside.hold_of(value), holds.owner_of(value)
            holder, process = processes.get(hold.pid), ended_in.get(owner)
            if holder is not None and not holder.alive:
                # Its main process knows that it is dead.
                if holder.parent is not None and holder.parent.is_well:
                    yield "dead", key, hold.pid, owner
                if self._is_waited_for_beside(holder, key):
                    yield "left", key, hold.pid, owner
            if "shop.keeps" in key and hold.is_kept:
                # And whether the attempt for which it is kept has an end, so that it never comes.
                attempt = hold.task_id, hold.retries
                yield "kept", key, f"for {hold.task_id}.{hold.retries}", attempt in ended
            if process is not None and process.is_well:
                yield "ended", key, process.pid, owner
            if holder is not None and holder.is_well and owner not in busy:
                yield "idle", key, hold.pid, owner

    def _is_waited_for_beside(self, dead: Process, key: str) -> bool:
        """Whether a process on its host waits for the lock, and so looks every second."""
        waiting = inside.line_key(inside.lock_of(key))
        sessions = [
            session
            for server in self.world.servers
            if server.model is not None
            for name, members, _ in server.living()
            if name == waiting
            for member in members
            for session in self._blocked(server, member)
        ]
        return any(session.address.startswith(f"{dead.host.name}:") for session in sessions)

    def _is_recorded(self, number: int, task_id: str, *, is_settled: bool) -> None:
        """Check that most servers know its end and, if `is_settled`, that everything after it was sent."""
        servers, must = self.world.servers, self.run.must
        known = [_ends_on(server, task_id) for server in servers]

        def is_there(ends: list[inside.Record]) -> bool:
            succeeded = [end for end in ends if end.state == states.SUCCESS]
            return bool(succeeded) and (not is_settled or all(end.is_settled for end in succeeded))

        there = sum(map(is_there, known))
        failed = [ends for ends in known if any(end.state in (states.FAILURE, states.REVOKED) for end in ends)]
        is_right = there * 2 > len(servers) >= len(failed) * 2
        if is_settled:
            must(is_right, "message {} has ended well, and is settled on {} servers: {}", number, there, known)
        else:
            must(is_right, "message {} has ended well, and is known on {} servers: {}", number, there, known)


def _attempt_at(key: str) -> tuple[int, int]:
    """The number of the message, and of its attempt, whose record is under this key."""
    attempt = inside.attempt_of(key)
    assert attempt is not None
    return int(attempt[0][1:]), attempt[1]


def _ends_on(server: Any, task_id: str) -> list[inside.Record]:
    """A server's records of a message."""
    values = server.living_values()
    return [inside.record_of(value) for key, value in values if (inside.attempt_of(key) or "?")[0] == task_id]
