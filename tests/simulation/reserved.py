"""Locks that are kept for an older message, and what must hold: the newest one does not wait for them."""

from __future__ import annotations

from typing import Any

from tests.simulation import apps, holds, inside, trouble
from tests.simulation.answers import number_of
from tests.simulation.scheduler import every
from tests.simulation.world import Running

#: Seconds of the simulation between two looks; and within which the newest message begins.
OFTEN, AT_ONCE = 0.1, 0.5


class Reserved:
    """The checker of these messages, whose policy stops an older one."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, world.run
        #: By number of a message that waits in line: since when nothing but such a lock keeps it from running.
        self._since: dict[int | str, float] = {}
        world.bodies.watched.append((self._begins, lambda *_: None))

    @every(OFTEN)
    def look(self) -> None:
        """Check, when time is about to advance."""
        if self.world.plan.kind != "newest":
            return
        held = holds.on_most(self.world.servers)
        found = (self._waits_for_older(copy, held) for copy in self.world.parked.in_line())
        waiting = [number for number in found if number is not None]
        self._since = {number: self._since.get(number, self.run.now) for number in waiting}
        for number in waiting:
            self._is_at_once(number)

    def _begins(self, body: Running, _: Any) -> None:
        if self.world.plan.kind == "newest" and apps.TASKS[body.task]["on_conflict"] == "replace":
            self._is_at_once(body.number)
            self._since.pop(body.number, None)

    def _is_at_once(self, number: int | str) -> None:
        since = max(self._since.get(number, self.run.now), trouble.last_end(self.world, but=trouble.BRIEF))
        waits = self.run.now - since
        longest = AT_ONCE + 20 * self.world.plan.latency
        self.run.must(
            waits < longest, "for {:.1f} s: message {} is the newest, and its lock is kept for another", waits, number
        )

    def _waits_for_older(self, copy: Any, held: dict[str, bytes]) -> int | None:
        """The number of the message in line, if it is the newest, and its lock is kept for another one."""
        number, value = number_of(copy.request.id), held.get(inside.of_lock(copy.key))
        if number is None or value is None or inside.hold_of(value).pid or not self.world.parked.has_room(copy):
            return None
        if apps.TASKS[copy.request.task.name]["on_conflict"] != "replace":
            return None
        order = self.world.newest.order_of(number)
        is_newest = number in order and order[number] == max(order.values())
        return number if is_newest and number_of(inside.hold_of(value).task_id or "") not in (None, number) else None
