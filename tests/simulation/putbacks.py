"""Messages that are sent again, and what must hold: each copy carries what its message did, says that it was put back
once more, and is due later than the copy before.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from tests.simulation import holds, inside, trouble
from tests.simulation.answers import number_of
from tests.simulation.plan import Plan

#: Share of the plans whose messages carry what other people gave them, and what that is; they expire after everything.
CARRYING = 0.1
GIVEN: Mapping[str, Any] = {
    "priority": 7,
    "expires": 7200.0,
    "correlation_id": "c1",
    "message_id": "n1",
    "delivery_mode": 1,
    "compression": "zlib",
    "shadow": "alias",
    "headers": {"x-tenant": "t1", "headers": {"x-trace": "1"}},
}

#: What makes a message a part of a canvas, which is never a duplicate when it is sent.
OF_CANVAS = {"group_id": "g1", "root_id": "r1", "parent_id": "p1", "reply_to": "inbox"}

#: Headers and properties that differ from copy to copy.
OF_COPIES = ("eta", "expires", "expiration", inside.HEADER, "delivery_tag")

#: Reasons for which a message that has not begun is put back: such a copy may expire.
NOT_BEGUN = ("conflict", "unavailable", "follows")

#: Seconds before the first copy is due, at least and at most; doubled for each further one, up to these.
FIRST = (0.5, 1.0)
LONGEST = {"conflict": 60.0, "unavailable": 8.0, "follows": 60.0}

#: Seconds that a thread needs to send a copy; and after which one that was frozen has sent it.
SENT, FROZEN = 0.1, 1.0


def given_to_messages(plan: Plan) -> Mapping[str, Any]:
    """The options with which each message of a plan is sent."""
    if random.Random(f"carried in {plan.seed}").random() >= CARRYING:
        return {}
    return GIVEN if plan.kind in ("sent", "follows") else {**GIVEN, **OF_CANVAS}


class PutBacks:
    """The checker of these messages."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, world.run
        #: By id and retries: what messages carry that were sent, and not put back.
        self._sent: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        #: By id: when a copy was last put back.
        self._put_back_at: dict[str, float] = {}
        world.broker.on_put.append(self._put)

    def _put(self, message: dict[str, Any], _: bool) -> None:
        headers, delivered = message["headers"], self.run.current.delivered
        carried, attempt = dict(_carried_by(message)), (headers["id"], headers["retries"])
        put_back = inside.put_back_in(headers)
        if put_back is None or delivered is None:
            self._sent[attempt].append(carried)
            return
        others = [
            sorted(name for name in carried.keys() | it if carried.get(name) != it.get(name))
            for it in self._sent[attempt]
        ]
        self.run.must([] in others, "message {} is put back with another {}", headers["id"], others)
        before, counts = inside.counts_of(inside.put_back_in(delivered)), inside.counts_of(put_back)
        grown = [reason for reason, count in counts.items() if count != before[reason]]
        self._is_counted(headers["id"], grown, before, counts)
        self._put_back_at[headers["id"]] = self.run.now
        self._may_expire(headers, delivered, grown)
        for reason in grown:
            self._is_due(headers, reason, counts[reason], looks=inside.looks(put_back))

    def _is_counted(self, task_id: str, grown: list[str], before: dict[str, int], counts: dict[str, int]) -> None:
        if grown:
            is_one_more = [counts[reason] - before[reason] for reason in grown] == [1]
            self.run.must(is_one_more, "message {} is put back {} times, after {}", task_id, counts, before)
            return
        values = (value for server in self.world.servers for _, value in holds.on(server))
        is_known = self.world.bodies.begun[number_of(task_id)] or self.world.ends[task_id]
        is_known = is_known or any(inside.hold_of(value).task_id == task_id for value in values)
        is_known = is_known or any(inside.has_ended(server.living_values(), task_id) for server in self.world.servers)
        # The other copy may have given the lock back, and gone, since this one has looked.
        is_known = is_known or self.run.now - self._put_back_at.get(task_id, -SENT) < SENT
        self.run.must(is_known, "a copy of message {} waits for another copy, and there is none", task_id)

    def _may_expire(self, headers: Mapping[str, Any], delivered: Mapping[str, Any], grown: list[str]) -> None:
        task_id, expires = headers["id"], headers["expires"]
        if delivered["expires"] is None:
            return
        if grown and grown[0] in NOT_BEGUN:
            self.run.must(
                expires == delivered["expires"],
                "message {} has not begun, and its copy expires at {}",
                task_id,
                expires,
            )
        else:
            self.run.must(expires is None, "message {} may have begun, and its copy expires", task_id)

    def _is_due(self, headers: Mapping[str, Any], reason: str, count: int, *, looks: bool) -> None:
        """Check the delay of a copy; a copy that only looks for another end says itself when."""
        if self._clocks_have_gone_on():
            return
        due = 0.0 if headers["eta"] is None else datetime.fromisoformat(headers["eta"]).timestamp()
        delay = due - self.run.current.process.host.wall_clock(self.run.now)
        longest = min(LONGEST[reason], self.world.broker.visibility / 2)
        least, most = (min(seconds * 2.0 ** (count - 1), longest * seconds) for seconds in FIRST)
        if looks:
            least, most = min(FIRST), longest
        self.run.must(
            least - SENT < delay <= most + SENT, "message {} is put back for the {}. time ({}), and due in {:.3f} s",
            headers["id"], count, reason, delay,
        )  # fmt: skip

    @trouble.excuse
    def _clocks_have_gone_on(self) -> object:
        """Whether the clock of a process may show another time than when it put its message back."""
        is_set = any(fault.kind == "wall clock set" for fault in self.world.plan.faults)
        return is_set or self.run.current.process.frozen_until > self.run.now - FROZEN


def _carried_by(message: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What all copies of a message have in common, by name."""
    for part in ("headers", "properties"):
        yield from ((f"{part}: {name}", value) for name, value in message[part].items() if name not in OF_COPIES)
    yield from ((name, value) for name, value in message.items() if name not in ("headers", "properties"))
