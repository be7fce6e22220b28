"""Messages that take the place of one that waits, and what must hold: the older one never runs, and the newest does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import states

from tests.simulation import apps, trouble
from tests.simulation.answers import number_of
from tests.simulation.queued import Call, Queued
from tests.simulation.world import Running

#: Seconds from the release of a message's lock until its body begins; and as many messages on the network.
BEGINS, TRIPS = 0.1, 4


class Replacing:
    """The checker of these messages."""

    def __init__(self, world: Any, queued: Queued) -> None:
        self.world, self.run, self._queued = world, world.run, queued
        world.bodies.watched.append((self._body_begins, lambda *_: None))

    def note_end(self, task_id: str, state: str, result: Any) -> None:
        """A final state is stored."""
        call = self._queued.calls.get(task_id)
        if call is None or call.message.task not in apps.REPLACES:
            return
        if isinstance(result, Mapping) and result.get("exc_type") == "LockSuperseded":
            self.run.must(state == states.REVOKED, "message {} is replaced, and ends as {}", task_id, state)
            is_newer = any(self._may_be_newer(other, call) for other in self._others(call))
            self.run.must(is_newer, "message {} is replaced, and no newer one was sent", task_id)

    def _body_begins(self, body: Running, _: Any) -> None:
        call = self._queued.calls.get(f"m{body.number}")
        if call is None or body.task not in apps.REPLACES or call.returned_at is None or body.attempt:
            return
        began = body.began - BEGINS - TRIPS * self.world.plan.latency
        newer = [
            other.task_id
            for other in self._others(call)
            if other.returned_at is not None and call.returned_at < other.began and other.returned_at < began
            if self._replaced(other)
        ]
        if not self._may_have_begun(call):
            self.run.must(not newer, "message {} runs, and {} have come in its place", call.task_id, newer)

    def look_at_the_end(self) -> None:
        """Check that the newest message of each job has run."""
        for call in self._queued.calls.values():
            if call.message.task not in apps.REPLACES or call.returned_at is None:
                continue
            is_newest = not any(self._may_be_newer(other, call) for other in self._others(call))
            if is_newest:
                has_run = self.world.bodies.begun[call.message.number]
                self.run.must(has_run, "message {} is the newest, and has not run", call.task_id)

    def _others(self, call: Call) -> list[Call]:
        job = call.message.task, call.message.key
        others = self._queued.calls.values()
        return [it for it in others if it is not call and it.is_sent and (it.message.task, it.message.key) == job]

    @staticmethod
    def _may_be_newer(other: Call, call: Call) -> bool:
        """Whether a call may have come after another one: it ended later, or has no end, since its sender died."""
        return other.returned_at is None or other.returned_at >= call.began

    def _replaced(self, call: Call) -> bool:
        lock = self._queued.lock_of(call.task_id)
        return lock is not None and lock.replaces

    @trouble.excuse
    def _may_have_begun(self, call: Call) -> bool:
        """Whether it may have begun before, and lost its worker: nobody can tell."""
        return self.world.bodies.begun[number_of(call.task_id)] > 1
