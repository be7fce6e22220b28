"""Messages of which only the newest is to run, and what must hold: which one runs, and that the others end.

Their order is the server's: the number that each got when it first asked for the lock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import states

from tests.simulation import apps, inside, trouble
from tests.simulation.answers import number_of
from tests.simulation.scheduler import every
from tests.simulation.world import Running

#: Seconds of the simulation between two looks.
OFTEN = 0.2

#: Seconds within which a message in line ends after a newer one has come; and more seconds for each further message.
AT_ONCE, EACH = 1.0, 0.3

#: Seconds within which a renewal says that a body is to stop; share of the ttl that it then has to end; seconds beyond.
RENEWED, ENDS, STOPPED = 1.0, 1 / 8, 1.0

#: Seconds within which a worker is known to have a copy in line.
IN_LINE = 0.1


@dataclass(eq=False)
class Newest:
    """The checker of these messages."""

    world: Any
    #: By task and key: the messages with the numbers that the server gave them first, and when.
    _order: dict[str, dict[int, tuple[float, float]]] = field(default_factory=lambda: defaultdict(dict))
    #: By superseded message: when the first end was stored that says so.
    superseded: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = self.world.run
        self.world.bodies.watched.append((self._body_begins, lambda *_: None))

    @property
    def _is_of_use(self) -> bool:
        return bool(self.world.plan.kind == "newest")

    def has_come(self, key: str, since: float) -> bool:
        """Whether a message for a lock has come since then, so that an older one is woken to end; or whether one has
        ended like that, maybe long after it was woken, since its worker was busy: it gives its wake-up back.
        """
        self._look_at_orders()
        jobs = {job for job, of in self._jobs_of_locks() if of == key}
        if any(at >= since and self._job_of(number) in jobs for number, at in self.superseded.items()):
            return True
        return any(at >= since for job in jobs for _, at in self._order[job].values())

    def order_of(self, number: int) -> dict[int, tuple[float, float]]:
        """The messages of the job of this one with their numbers, and when they came."""
        self._look_at_orders()
        return self._order[self._job_of(number) or ""]

    def note_end(self, task_id: str, state: str, result: Any) -> None:
        """A final state is stored."""
        number = number_of(task_id)
        if number is None or not (isinstance(result, Mapping) and result.get("exc_type") == "LockSuperseded"):
            return
        must = self.run.must
        must(state == states.REVOKED, "message {} is superseded, and ends as {}", number, state)
        self._look_at_orders()
        self.superseded.setdefault(number, self.run.now)
        job = self._job_of(number)
        if job is None:
            return
        order = self._order[job]
        must(number in order, "message {} is superseded, and has never come", number)
        own, _ = order.get(number, (0.0, 0.0))
        is_older = any(place > own for place, _ in order.values())
        must(is_older, "message {} is superseded, and none that is newer has come", number)
        bodies = self.world.bodies
        if not (any(of == number for of, _ in bodies.unknown) or number in bodies.ended_elsewhere):
            must(not bodies.succeeded[number], "message {} is superseded, and its body has ended well", number)

    def _body_begins(self, body: Running, _: Any) -> None:
        if not self._is_of_use or not isinstance(body.number, int):
            return
        must, number = self.run.must, body.number
        must(number not in self.superseded, "message {} runs, and was superseded before", number)
        self._look_at_orders()
        order = self._order[body.key]
        must(number in order, "message {} runs, and has no place in the order of its key", number)
        if number not in order or self._is_kept(body.task, body.attempt):
            return
        own, _ = order[number]
        newer = [other for other, (place, _) in order.items() if own < place < body.fence]
        must(not newer, "{}: message {} is given the lock after messages {} have come", body.key, number, newer)

    def look(self) -> None:
        """Check, whenever time is about to advance, that a message without a lock that is not the newest ends."""
        if not self._is_of_use:
            return
        self._look_at_line(trouble.last_end(self.world, but=trouble.BRIEF))
        self._look_at_the_rest()

    @every(OFTEN)
    def _look_at_the_rest(self) -> None:
        self._look_at_orders()
        trouble_ends = trouble.last_end(self.world, but=trouble.BRIEF)
        for body in self.world.bodies.each():
            self._is_stopped(body, trouble_ends)

    def _look_at_line(self, trouble_ends: float) -> None:
        """Each time: they leave it within milliseconds."""
        in_line = [*self.world.parked.in_line()]
        if in_line:
            self._look_at_orders()
        older = [copy for copy in in_line if self._newer_came_at(copy) is not None]
        for copy in older:
            if not self.world.parked.has_room(copy) or self._is_overtaken(copy):
                continue
            since = max(self._newer_came_at(copy) or 0.0, copy.at, trouble_ends)
            is_soon = self.run.now - since <= AT_ONCE + EACH * len(older) + 20 * self.world.plan.latency
            what = self.run.now - since, copy.request.id
            self.run.must(is_soon, "for {:.1f} s: message {} is in line, and a newer one has come", *what)

    def _is_stopped(self, body: Running, trouble_ends: float) -> None:
        """Check that a body that a newer message stops ends soon after its next renewal."""
        order = self._order[body.key]
        if apps.TASKS[body.task]["on_conflict"] != "replace" or body.number not in order:
            return
        own, _ = order[body.number]
        newer = [at for place, at in order.values() if place > own]
        if not newer or not body.process.is_well:
            return
        since = max(min(newer), body.began, trouble_ends, body.process.frozen_until)
        seconds, longest = (
            self.run.now - since,
            RENEWED + body.lease.ttl * ENDS + STOPPED + 20 * self.world.plan.latency,
        )
        what = seconds, body.number
        self.run.must(seconds <= longest, "for {:.1f} s: message {} runs, which a newer one stops", *what)

    def look_at_the_end(self) -> None:
        """Check that the newest message of each key was not superseded."""
        for order in self._order.values():
            newest = max(order, key=lambda number: order[number][0])
            is_there = newest not in self.superseded
            self.run.must(is_there, "message {} is the newest, and was superseded", newest)

    def _newer_came_at(self, copy: Any) -> float | None:
        """When a newer message came while this copy was in line, or None. A copy that is just put back is not woken."""
        number = number_of(copy.request.id)
        job = None if number is None else self._job_of(number)
        if job is None or number not in self._order[job]:
            return None
        own, _ = self._order[job][number]
        in_line = copy.at + IN_LINE + 20 * self.world.plan.latency
        newer = [at for place, at in self._order[job].values() if place > own and at > in_line]
        is_kept = self._is_kept(copy.request.task.name, copy.request.context.retries or 0)
        return min(newer) if newer and not is_kept else None

    @trouble.excuse
    def _is_overtaken(self, copy: Any) -> bool:
        """Whether a newer message has had an earlier place in line, since its host's clock is behind: that message is
        woken in place of this one, which ends at its own time.
        """
        number = number_of(copy.request.id)
        job = None if number is None else self._job_of(number)
        if number is None or job is None:
            return False
        own, _ = self._order[job][number]
        newer = (f"m{other}" for other, (place, _) in self._order[job].items() if place > own)
        return any(self.world.parked.first_places.get(task_id, copy.since) < copy.since for task_id in newer)

    @staticmethod
    @trouble.excuse
    def _is_kept(task: str, attempt: int) -> bool:
        """Whether an earlier attempt may have kept the lock for this one, even from newer messages."""
        options = apps.TASKS[task]
        return attempt > 0 and bool(options.get("lock_retain_on_retry")) and options["on_conflict"] != "replace"

    def _job_of(self, number: int) -> str | None:
        _, message = self.world.sent.get(number, ("", None))
        if message is None or message.task not in apps.NEWEST:
            return None
        return f"{message.task}:{message.key}"

    def _look_at_orders(self) -> None:
        """Note the messages that have come."""
        (server, *_) = self.world.servers
        late = self.run.now - server.clock()
        for _, order in self._orders():
            for name, place in order.items():
                number = _number_in(name)
                job = None if number is None else self._job_of(number)
                if number is not None and job is not None and number not in self._order[job]:
                    self._order[job][number] = place, place / 1e6 + late  # The place is the server's time.

    def _jobs_of_locks(self) -> Iterator[tuple[str, str]]:
        for key, order in self._orders():
            for name in order:
                number = _number_in(name)
                if number is not None and (job := self._job_of(number)) is not None:
                    yield job, inside.lock_of(key)

    def _orders(self) -> Iterator[tuple[str, dict[bytes, float]]]:
        if not self._is_of_use:
            return
        for server in self.world.servers:
            for key, value, _ in server.living():
                if inside.part_of(key) == "order":
                    yield key, value


def _number_in(name: bytes) -> int | None:
    """The number of a message from its name in an order, which is the beginning of its hold."""
    return number_of(inside.number_of_order(name))
