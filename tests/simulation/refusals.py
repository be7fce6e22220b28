"""Messages that are refused, wait, or come late, and what must hold: a conflict is one with a message of the same lock,
there are no more of them than the task allows, a copy knows what its message has been through, and no message runs when
it has expired.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery import states

from tests.simulation import apps, inside
from tests.simulation.answers import number_of

#: Seconds between the look whether a message has expired and the next step, at most.
LOOKED = 0.1

#: A sender whose clock is fast sends this much earlier.
FAST = 0.99


class Refusals:
    """The checker of these messages."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, world.run
        self._messages = {message.number: message for message in world.plan.messages}
        world.broker.on_put.append(self._put)
        world.bodies.watched.append((self._begins, lambda *_: None))

    def note_end(self, task_id: str, state: str, result: Any) -> None:
        """A final state is stored."""
        if isinstance(result, dict) and result.get("exc_type") == "LockConflict":
            self._has_met(task_id)
        elif state == states.REVOKED and task_id not in self.world.revoked:
            self._has_met(task_id, may_expire=True)

    def _put(self, message: Mapping[str, Any], _: bool) -> None:
        headers, delivered = message["headers"], self.run.current.delivered
        put_back = inside.put_back_in(headers)
        if delivered is None or put_back is None:
            return
        may_have_begun = _may_have_begun(delivered)
        if may_have_begun:
            self.run.must(put_back.redelivered, "a copy of message {} does not know of earlier ones", headers["id"])
        if put_back.conflict:
            self._has_met(headers["id"])
        most = apps.TASKS.get(headers["task"], {}).get("lock_conflict_retries")
        if most is not None and not may_have_begun and not headers["retries"]:
            is_few = put_back.conflict <= most
            self.run.must(is_few, "message {} meets {} conflicts, of {}", headers["id"], put_back.conflict, most)

    def _has_met(self, task_id: str, *, may_expire: bool = False) -> None:
        """Check that a message that has met a conflict can have met one, unless it may also have expired."""
        own = self._messages.get(number_of(task_id))
        if own is None or (may_expire and "expires" in own.sent):
            return
        others = [it for it in self._messages.values() if it is not own and (it.task, it.key) == (own.task, own.key)]
        is_one = any(it.at * FAST <= self.run.now for it in others)
        self.run.must(is_one, "message {} meets a conflict, and no other one has its lock, {}", own.number, own.key)

    def _begins(self, body: Any, _: Any) -> None:
        delivered = self.run.current.delivered
        if delivered is None or delivered["expires"] is None:
            return
        # The process that runs it looks if it may have begun, and the main process otherwise.
        looked_at = body.asked_at if _may_have_begun(delivered) else delivered["given_at"] - LOOKED
        late = body.process.host.wall_clock(looked_at) - datetime.fromisoformat(delivered["expires"]).timestamp()
        self.run.must(late < 0, "message {} runs, and expired {:.3f} s before", body.number, late)


def _may_have_begun(delivered: Mapping[str, Any]) -> bool:
    """Whether the message was delivered before, or is a copy of one that was."""
    put_back = inside.put_back_in(delivered)
    return bool(delivered["delivery_info"]["redelivered"] or (put_back is not None and put_back.redelivered))
