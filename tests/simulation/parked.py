"""Copies that main processes hold until they are due or their locks are free, and what must hold for them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.simulation import holds, inside, trouble
from tests.simulation.inside import MAX_PAUSE, REFRESH
from tests.simulation.scheduler import Process, every

#: Seconds of the simulation between two looks.
OFTEN = 0.05

#: Seconds within which a copy starts after its lock was freed, if its worker has room; and the same if nobody was
#: notified, as with the lock of a dead process.
AT_ONCE, FOUND = 0.3, REFRESH + 0.7

#: Seconds after a fault in which this may take longer: a process that could not ask pauses.
AFTERMATH = REFRESH + 2 * MAX_PAUSE

#: Number of consecutive network messages that it takes to get a lock, if these are slow.
SOME = 20

#: Most seconds for which a copy waits, whatever happens; and the difference of the clocks.
HELD, DIFFER = 60.0, 5.0

#: Faults that neither delay a message in line nor change its place; and those that delay none: in vain, all are woken.
IN_ORDER = (
    *(*trouble.HARMLESS, "worker ended"),
    *("child killed", "child killed at an end", "child killed by SIGTERM"),
)
HARMLESS = (*IN_ORDER, "woken in vain")


#: Faults that cause several copies of one message.
SEVERAL = ("delivered again", "acknowledgement lost", "broker cut", "worker killed", "worker killed at a start")


@dataclass(eq=False)
class Copy:
    """A copy in the timer of a process.

    Attributes:
        key: of the lock that it waits for; empty if it waits only for its time.
        least, since: its place in line is between these. They differ if it came from a clock that is ahead of this one:
            then its worker takes the time at which it came for its place.
        at: when it came.
        due: when it is started, on the steady clock of its host.
        is_in_line: whether it is to be woken.
    """

    worker: Any
    process: Process
    request: Any
    key: str
    least: float
    since: float
    limit: int
    at: float
    due: float
    is_in_line: bool

    def is_before(self, other: Copy) -> bool:
        """Whether its place is certainly the earlier one."""
        return self.since < other.least

    def may_be_before(self, other: Copy) -> bool:
        """Whether its place may be the earlier one."""
        return self.least < other.since


class Parked:
    """The checker of these copies."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, world.run
        self._copies: dict[int, Copy] = {}
        self._lines: dict[Process, Any] = {}
        #: By process: the time of its wall clock when the last message came.
        self._came_at: dict[Process, float] = {}
        #: By process and key: when the last wake-up came.
        self._woken_by: dict[tuple[Process, str], float] = {}
        #: Those wake-ups for which no copy has begun yet.
        self._unanswered: set[tuple[Process, str]] = set()
        #: Called when a copy begins, with its request.
        self.on_begin: list[Callable[[Any], None]] = []
        #: How often a copy was started, by key.
        self._begun: Counter[str] = Counter()
        #: By main process, and id of a message: the lock for which its copy waited in line there. If it does not come
        #: back to that line, it wakes the next one, whoever has the lock. And, by lock, when a message last left.
        self._called: dict[tuple[Process, str], str] = {}
        self._left_at: dict[str, float] = {}
        #: The same of what was received: it may go to a slot at once, or when it is due, and wait as it says.
        self._received_for: dict[tuple[Process, str], str] = {}
        #: Copies that have begun although nothing was freed: whoever has woken them must be about to leave their line.
        self._for_nothing: dict[Copy, float] = {}
        #: By id of a message: its copy that was woken last, and when, until it has ended or waits again.
        self._under_way: dict[str, tuple[Copy, float]] = {}
        #: By key: its holders and since when; when a hold ended without a notification; and when the hold expires.
        self._held: dict[str, tuple[frozenset[str], float]] = {}
        self._ended_at: dict[str, float] = {}
        self._ends: dict[str, float] = {}
        #: By key: when a wake-up last took a longer way: a process passed it on, or it went to a copy that looks
        #: whether another message has ended before it asks for the lock or passes it on.
        self.detour_at: dict[str, float] = {}
        #: By key: when a copy was started whose message had ended, or when the last wake-up went to a busy worker.
        self._in_vain_at: dict[str, float] = {}
        #: By key: when a main process died that was in line for it, or had been woken for it.
        self._died_at: dict[str, float] = {}
        #: By id of a message: the earliest place that a copy of it has had in any line.
        self.first_places: dict[str, float] = {}
        #: By message and attempt: the last place that a copy of it got at its first conflict.
        self._places: dict[tuple[str, int], float] = {}
        world.broker.on_put.append(self._is_put_back)
        world.bodies.watched.append((lambda body, request: self._leaves(body.process, request.id), lambda *_: None))
        world.at_received.append(self._received)
        self._free_since: dict[Any, float] = {}
        #: By process and key: the copies that have left its line, and when.
        self._gone: defaultdict[tuple[Process, str], list[tuple[float, Copy]]] = defaultdict(list)

    def watch(self, worker: Any) -> None:
        """Watch a worker's main process that has just started."""
        process, line = worker.process, worker.line
        worker.loop.timer.on_entry = lambda entry, due: self._comes(worker, entry, due)
        if line is None:
            return
        self._lines[process] = line
        process.at_end.append(lambda: self._dies(process, line))

        def comes(key: str) -> None:
            self._woken_by[process, key] = self.run.now
            self._unanswered.add((process, key))
            self.run.note("is woken", key)
            if not self._has_room(worker):
                self._in_vain_at[key] = self.run.now

        def leaves_place(key: str, is_passed_on: bool) -> None:
            self.detour_at[key] = self.run.now
            if is_passed_on:
                self._unanswered.discard((process, key))

        inside.watch_line(line, comes, leaves_place)

    def _received(self, process: Process, headers: Any) -> None:
        self._came_at[process] = process.host.wall_clock(self.run.now)
        put_back = inside.put_back_in(headers)
        if put_back is not None and put_back.waits is not None:
            self._received_for[process, headers["id"]] = put_back.waits.key

    def _comes(self, worker: Any, entry: Any, due: float) -> None:
        (request,) = entry.args
        key, since, limit = _place_of(request)
        since = min(since, worker.host.wall_clock(self.run.now))
        least = min(since, self._came_at[worker.process])
        is_held = inside.is_held(request)
        # A copy without a line may be held until it expires.
        is_in_line = bool(key) and (is_held or self._looks_in_line(worker, request, key))
        copy = Copy(worker, worker.process, request, key, least, since, limit, self.run.now, due, is_in_line)
        self._copies[id(request)] = copy
        self._under_way.pop(request.id, None)
        if copy.is_in_line and key:
            self.first_places[request.id] = min(least, self.first_places.get(request.id, least))
            self._is_held(key, limit)
        left = due - worker.host.clock(self.run.now)
        longest = min(HELD, self.world.broker.visibility / 2)
        clocks_are_set = any(fault.kind == "wall clock set" for fault in self.world.plan.faults)
        must = self.run.must
        if key and not clocks_are_set:
            must(left <= 1.5 * longest + DIFFER, "{}: message {} is to wait for {:.1f} s", key, request.id, left)
        if is_held and request.expires is None:
            waits = left >= 0.9 * longest
            must(waits, "{}: message {} is in line, and begins in {:.1f} s all the same", key, request.id, left)

    def _looks_in_line(self, worker: Any, request: Any, key: str) -> bool:
        """Whether it is woken, and also polls: how another message has ended, or whether a newer one has come."""
        put_back, line = inside.put_back_of(request.message.headers), worker.line
        looks = put_back.joins is not None or put_back.arrived is not None
        return bool(line is not None and key and looks and inside.is_listening(line))

    def _is_put_back(self, message: dict[str, Any], _: bool) -> None:
        """Check that a copy keeps its place."""
        headers = message.get("headers") or {}
        put_back = inside.put_back_of(headers)
        stays = put_back.waits.key if put_back.waits is not None else ""
        self._leaves(self.run.current.process, headers.get("id"), stays=stays)
        if not stays or put_back.retries != headers.get("retries"):
            return
        attempt, since = (headers["id"], headers["retries"]), put_back.since
        first, delivered = self._places.get(attempt, 0.0), self.run.current.delivered
        before = None if delivered is None else inside.put_back_in(delivered)
        # Of several copies of a message, each may come to have a place at another time.
        is_first = delivered is not None and (before is None or before.since is None)
        if is_first or attempt not in self._places:
            self._places[attempt] = max(first, since)
        elif not (put_back.follows and self._are_several):
            self.run.must(since <= first, "message {} loses its place in line as it is put back", headers["id"])

    @property
    def names(self) -> set[bytes]:
        """The names of the lines among those that wait for locks."""
        return {inside.name_of(line, key) for line in self._lines.values() for key in inside.keys_of(line)}

    def in_line(self) -> Iterator[Copy]:
        """The copies that are to be woken, of processes that are well."""
        return (copy for copy in self._copies.values() if copy.is_in_line and copy.process.alive and copy.process.runs)

    def has_room(self, copy: Copy) -> bool:
        """Whether it could be started now."""
        return not copy.worker.is_ending and self._has_room(copy.worker)

    def is_behind(self, copy: Copy, since: float) -> bool:
        """Whether a copy with an earlier place was woken since then in place of this one, and waits for a slot, looks,
        or runs: it wakes the next one when it has ended.
        """
        return any(
            other.key == copy.key and other.may_be_before(copy) and at >= since and other.process.alive
            for other, at in self._under_way.values()
        )

    @property
    def _are_several(self) -> bool:
        """Whether there may be several copies of one message, each with its own places in several lines."""
        return any(fault.kind in SEVERAL for fault in self.world.plan.faults)

    def begins(self, worker: Any, request: Any) -> None:
        """The timer has reached the copy, or it was taken out of the timer."""
        copy = self._copies.pop(id(request), None)
        is_there = copy is not None
        self.run.must(
            is_there, "a copy of message {} begins twice, or is that of a connection that is gone", request.id
        )
        if copy is None:
            return
        for on_begin in self.on_begin:
            on_begin(request)
        if not copy.key:
            return
        self._gone[copy.process, copy.key].append((self.run.now, copy))
        self._begun[copy.key] += 1
        if self._has_ended(request):
            self._in_vain_at[copy.key] = self.run.now
        self._called[copy.process, request.id] = copy.key  # Also at its own time: if it ends, it wakes the next one.
        if worker.host.clock(self.run.now) >= copy.due:
            return
        self._under_way[request.id] = copy, self.run.now
        if _looks_first(request):
            self.detour_at[copy.key] = self.run.now
        at = self._woken_by.get((copy.process, copy.key), 0.0)
        self.run.note("begins, woken", f"{copy.key} message={request.id}", by=copy.process.name)
        for other in self._of_line(copy.key):
            if other.process is copy.process and other.at < at:
                what = copy.key, request.id, other.request.id
                self.run.must(not other.is_before(copy), "{}: message {} begins before {}, which came first", *what)
        if (copy.process, copy.key) in self._unanswered:
            self._unanswered.discard((copy.process, copy.key))
            self._is_first(copy, at)
        self._is_of_use(copy)

    def _has_ended(self, request: Any) -> bool:
        """Whether the attempt that it asks for has ended: it finds that on record, and wakes the next one."""
        return (_number_of(request), request.context.retries or 0) in self.world.bodies.ended

    def note_end(self, task_id: str) -> None:
        """A final state is stored."""
        self._under_way.pop(task_id, None)
        if self.run.current is not None:
            self._leaves(self.run.current.process, task_id)

    def is_over(self, process: Process, task_id: str) -> None:
        """The pool of a main process has carried out a delivery of the message, and maybe stored nothing."""
        self._leaves(process, task_id)

    def is_lost(self, request: Any) -> None:
        """A main process has noticed that the child that carried out this delivery is gone. If the copy was woken, and
        may end without the lock, the process wakes the next one, whoever has the lock: maybe the copy had it by then.
        """
        key, _, _ = _place_of(request)
        if key and _is_one_of_many(request):
            self._left_at[key] = self.run.now

    def _leaves(self, process: Process, task_id: str, *, stays: str = "") -> None:
        """A message that was in line in this process, or in that of its parent, has ended, runs, or waits for another
        lock or for its time. It does not leave if it goes back to the line of the lock `stays`, unless it has found
        the end of its attempt on record.
        """
        it = process.parent or process, task_id
        received_for = self._received_for.pop(it, None)
        if (key := self._called.pop(it, received_for)) is None:
            return
        called, _ = self._under_way.get(task_id, (None, 0.0))
        if key == stays and (called is None or not self._has_ended(called.request)):
            return
        self._left_at[key] = self.run.now
        for copy in [it for it in self._for_nothing if it.key == key and it.request.id != task_id]:
            del self._for_nothing[copy]

    def are_gone(self, process: Process) -> None:
        """A process is gone: the broker gives its copies to others."""
        self._copies = {it: copy for it, copy in self._copies.items() if copy.process is not process}

    def _dies(self, process: Process, line: Any) -> None:
        """A main process dies, maybe with a wake-up, also if it has just left the line."""
        keys = {key for who, key in self._woken_by if who is process}
        self._died_at.update(dict.fromkeys(keys | inside.keys_of(line), self.run.now))

    def has_left(self, process: Process, line: Any) -> None:
        """Check that a worker that ends has left its lines."""
        mailbox = inside.mailbox_of(line)
        if trouble.was_there(self.world, self.run.now - AFTERMATH, but=HARMLESS):
            return
        for server in self.world.servers:
            for key, value, _ in server.living():
                if inside.part_of(key) in inside.OF_LINES:
                    is_there = any(inside.mailbox_in(member) == mailbox for member in value)
                    self.run.must(not is_there, "{} ends, and stays in line: {}", process.name, key)

    @every(OFTEN)
    def look(self) -> None:
        """Check, when time is about to advance."""
        self._copies = {it: copy for it, copy in self._copies.items() if copy.process.alive}
        keys = dict.fromkeys(copy.key for copy in self._copies.values() if copy.is_in_line and copy.key)
        free = {}
        for key in keys:
            copies = [copy for copy in self._of_line(key) if copy.process.runs and not copy.worker.is_ending]
            if not copies or self._is_held(key, copies[0].limit):
                continue
            for copy in copies:
                if self._has_room(copy.worker):
                    free[key, copy.process.name, self._begun[key], self._held[key]] = copy
        self._free_since = {it: self._free_since.get(it, self.run.now) for it in free}
        if not free:
            return
        trouble_ends = trouble.last_end(self.world, but=HARMLESS)
        for it, since in self._free_since.items():
            begins = max(since, free[it].at, trouble_ends)
            seconds = self.run.now - begins
            what = seconds, it[0], free[it].request.id, it[1]
            is_soon = seconds <= AT_ONCE or seconds <= self._bound(it[0])
            self.run.must(is_soon, "for {:.1f} s: {} is free, and message {} waits in {}, which has room", *what)

    def _bound(self, key: str) -> float:
        latency = SOME * self.world.plan.latency
        now = self.run.now
        if trouble.was_there(self.world, now - AFTERMATH, but=HARMLESS):
            return 2 * MAX_PAUSE + FOUND + latency
        if len(self.world.servers) > 1:
            return 2 * FOUND + latency  # A node may still have what most have freed.
        _, freed_at = self._held[key]
        if abs(freed_at - self._died_at.get(key, -HELD)) < AT_ONCE + latency:
            return FOUND + latency  # The wake-up may have come to a process that died just then.
        # The copy that it wakes may come before its start is known.
        if now - max(self._ended_at.get(key, -HELD), self._in_vain_at.get(key, -HELD)) < 2 * FOUND:
            return FOUND + latency
        # A copy that has joined looks before it asks. If its child dies meanwhile, nobody is notified.
        if "shop.joins" in key and any("child killed" in fault.kind for fault in self.world.plan.faults):
            return FOUND + latency
        # It goes round, for an older place whose process has left; one without room has no place until its next look.
        if now - self.detour_at.get(key, -HELD) < FOUND + latency:
            return FOUND + latency
        return AT_ONCE + latency

    def _is_held(self, key: str, limit: int) -> bool:
        """Whether nobody else could have the lock; notes changes."""
        now, values = self.run.now, holds.on_most(self.world.servers)
        held = inside.is_held_by(values, key)
        owners = frozenset(map(holds.owner_of, held.values()))
        last, _ = self._held.get(key, (None, 0.0))
        if last != owners:
            self._held[key] = owners, now
            if last is not None and last - owners and self._ends.get(key, 0.0) < now + 2 * OFTEN:
                self._ended_at[key] = now
        server = self.world.servers[0]
        ends = [end for name, _, end in server.living() if name in held and end is not None]
        self._ends[key] = min(ends, default=0.0) / 1000 - server.clock() + now
        return len(held) >= limit

    def _of_line(self, key: str) -> Iterator[Copy]:
        return (copy for copy in self._copies.values() if copy.key == key and copy.is_in_line and copy.process.alive)

    def _is_first(self, copy: Copy, woken_at: float) -> None:
        """Check that no other process that is well has an older copy."""
        if trouble.was_there(self.world, woken_at - AFTERMATH, but=IN_ORDER) or len(self.world.servers) > 1:
            return
        (server,) = self.world.servers
        waiting = inside.line_key(copy.key)
        places = next((value for key, value, _ in server.living() if key == waiting), {})
        says_so = AT_ONCE + SOME * self.world.plan.latency
        for other in self._of_line(copy.key):
            if other.process is copy.process or not other.process.runs or other.at > woken_at - says_so:
                continue
            if self._had_place_before(copy, other, woken_at - REFRESH - says_so):
                continue
            if (other.process, copy.key) in self._unanswered and not any(
                it.process is other.process and it.is_before(other) for it in self._of_line(copy.key)
            ):
                continue  # It is the one that an earlier wake-up is for, and is about to begin.
            score = places.get(inside.name_of(self._lines[other.process], copy.key), 0.0)
            is_known = 0 < score < int(inside.ms(copy.least))
            self.run.must(
                not (is_known and other.is_before(copy)),
                "{}: message {} is begun by {} before {}, which has waited for longer in {}",
                *(copy.key, copy.request.id, copy.process.name, other.request.id, other.process.name),
            )

    def _had_place_before(self, copy: Copy, other: Copy, since: float) -> bool:
        """Whether another copy gave the process of `copy` a place no later than that of `other`, and has left after
        `since`: a process tells its place at each look.
        """
        left = self._gone[copy.process, copy.key]
        return any(at >= since and gone is not copy and not other.is_before(gone) for at, gone in left)

    def _is_of_use(self, copy: Copy) -> None:
        """Check that a lock was freed, or may have been."""
        now = self.run.now
        is_held = self._is_held(copy.key, copy.limit)
        _, since = self._held[copy.key]
        long = FOUND + AT_ONCE + SOME * self.world.plan.latency
        newest, answers = self.world.newest, self.world.answers
        is_to_end = newest is not None and newest.has_come(copy.key, now - long)  # It is woken to end.
        is_to_end = is_to_end or (answers is not None and answers.is_behind_another(copy.request))
        queued = self.world.senders_queue
        is_to_end = is_to_end or (queued is not None and queued.went_on(copy.key, now - long))
        if is_to_end or trouble.was_there(self.world, now - AFTERMATH):
            return
        since = max(since, self._left_at.get(copy.key, 0.0))
        if not is_held or now - since <= long:
            self._is_explained(copy)
            return
        self._for_nothing[copy] = now - since
        self.run.after(AT_ONCE + SOME * self.world.plan.latency, lambda: self._is_explained(copy))

    def _is_explained(self, copy: Copy) -> None:
        """Check that something was freed, or that another message has left its line since it began."""
        seconds = self._for_nothing.pop(copy, None)
        what = copy.key, copy.request.id, seconds
        self.run.must(seconds is None, "{}: message {} begins, and nothing was freed for {:.1f} s", *what)

    def _has_room(self, worker: Any) -> bool:
        return inside.has_free_slot(worker.process.package, worker)


def _looks_first(request: Any) -> bool:
    """Whether the copy has joined or follows another message."""
    return inside.looks(inside.put_back_of(request.message.headers))


def _is_one_of_many(request: Any) -> bool:
    """Whether the copy is in line with others that end without the lock."""
    return _looks_first(request) or inside.put_back_of(request.message.headers).arrived is not None


def _number_of(request: Any) -> int | str:
    """The number of the message; a tick of beat has none."""
    number = request.id.removeprefix("m")
    return int(number) if number.isdigit() else str(request.id)


def _place_of(request: Any) -> tuple[str, float, int]:
    """The lock that a copy waits for, its place, and the limit of holders, according to its message."""
    headers = request.message.headers
    put_back = inside.put_back_of(headers)
    if put_back.retries != headers.get("retries") or put_back.waits is None:
        return "", 0.0, 1
    assert put_back.since is not None
    return put_back.waits.key, put_back.since, put_back.waits.limit
