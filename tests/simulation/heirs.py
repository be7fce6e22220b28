"""Messages that have joined one that died in a retry: one of them runs in its place, whichever attempt each has joined,
and the others end as that one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.simulation import inside
from tests.simulation.world import Running


class Heirs:
    """The checker of these messages."""

    def __init__(self, world: Any) -> None:
        self.world, self.run = world, world.run
        #: By message, and the one that it has joined: when it first said so.
        self._joined_at: dict[tuple[str, str], float] = {}
        #: By id: the bodies of a message; and those that ran in its place, each after which of its bodies.
        self._runs: dict[str, list[Running]] = defaultdict(list)
        self._heirs: dict[str, list[tuple[int | str, Running]]] = defaultdict(list)
        world.broker.on_put.append(self._put)
        world.bodies.watched.append((self._begins, lambda *_: None))

    def _put(self, message: dict[str, Any], is_taken: bool) -> None:
        headers = message["headers"]
        put_back = inside.put_back_in(headers)
        if is_taken and put_back is not None and put_back.joins is not None:
            self._joined_at.setdefault((headers["id"], put_back.joins.task_id), self.run.now)

    def _begins(self, body: Running, _: Any) -> None:
        task_id, put_back = f"m{body.number}", inside.put_back_in(self.run.current.delivered)
        self._runs[task_id].append(body)
        joined = put_back.joins.task_id if put_back is not None and put_back.joins is not None else ""
        if not (runs := self._runs[joined]) or len(self._runs[task_id]) > 1:
            return
        last, since = runs[-1], self._joined_at[task_id, joined]
        # The holders of a first attempt that was delivered twice may each have an heir.
        if last.attempt > 0 and [run.attempt for run in runs].count(last.attempt) == 1:
            heirs = {heir for heir, after in self._heirs[joined] if after is last} - {body.number}
            ended = [heir for heir in heirs if self.world.answers._had_ended(heir, since)]
            self.run.must(not ended, "message {} runs in the place of {}, as {} has done", task_id, joined, ended)
        self._heirs[joined].append((body.number, last))
