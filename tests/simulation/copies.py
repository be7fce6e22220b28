"""Copies of messages that share the locks of a Redlock with other users: each is carried out, refused, or answered by
the record of its message. What else Celery and the package's tasks do is left out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tests.simulation import inside

if TYPE_CHECKING:
    from tests.simulation.locks import Turn
    from tests.simulation.nodes import NodesChecker

#: The contents of a message's record, and its seconds to live.
DONE, REFUSED, LIFE = b"done", b"refused", 600.0

#: Seconds of a body's step.
STEP = 0.2


class Copies:
    """What happened to the messages, and what must hold."""

    def __init__(self, checker: NodesChecker) -> None:
        self._checker, self.run = checker, checker.run
        #: By message: its reported ends.
        self._ends: dict[str, set[bytes]] = defaultdict(set)

    def deliver(self, turn: Turn, message: str) -> None:
        """Deliver a copy of a message to a process."""
        package, store = turn.process.package, inside.store_of(turn.lock)
        request = inside.request_of_copy(package, turn.lock, message)
        holder = request.holder
        self._checker.waiting[turn.use.name].append(turn)
        self.run.note("is delivered", f"{turn.use.name} {message} use={turn.use.number}")
        try:
            found = store.acquire(request)
        except inside.public(package, "LockUnavailable") as error:
            store.abandon(request.hold())
            self._over(turn, f"has no answer: {error}")
            return
        if inside.is_lease(package, found):
            self._carry_out(turn, found, message, holder)
        elif (content := inside.content_of(package, found)) is not None:
            self._over(turn, f"is answered: {content!r}")
            self._has_ended(message, content)
        elif found.holder is not None and found.holder.is_copy_of(holder):
            self._over(turn, "stands by")
        else:
            self._refuse(turn, message, holder)

    def _carry_out(self, turn: Turn, lease: Any, message: str, holder: Any) -> None:
        package, lock = turn.process.package, turn.lock
        turn.lease = lease
        inside.heartbeat_of(lock).start(lease, lambda _: turn.lost.clear())
        self._checker._holds(turn)
        if self._checker._trusts(turn) and not self._checker.forgets:
            self.run.must(
                not self._ends[message], "message {} is carried out by use {} after its end", message, turn.use.number
            )
        left = turn.use.takes
        while left > 0 and lease.held:
            self.run.park(min(left, STEP))
            left -= STEP
        was_held = lease.held
        inside.heartbeat_of(lock).stop(lease)
        if turn in self._checker.holding[turn.use.name]:
            self._checker.holding[turn.use.name].remove(turn)
        try:
            if was_held:
                inside.store_of(lock).free(lease, record=inside.record_for(package, holder, DONE, LIFE))
                self._has_ended(message, DONE)
            else:
                inside.store_of(lock).free(lease)
        except inside.public(package, "LockUnavailable") as error:
            self.run.note("has no answer", f"{turn.use.name} use={turn.use.number} {error}")
        else:
            self.run.note("gives back", f"{turn.use.name} use={turn.use.number}")
        self._checker._freed_at[lease.owner] = self.run.now

    def _refuse(self, turn: Turn, message: str, holder: Any) -> None:
        package, lock = turn.process.package, turn.lock
        refused = inside.record_for(package, holder, REFUSED, LIFE)
        try:
            found = inside.store_of(lock).refuse(inside.key_of(lock), holder, refused)
        except inside.public(package, "LockUnavailable") as error:
            self._over(turn, f"has no answer: {error}")
            return
        if found is None:
            self._over(turn, "is refused")
            self._has_ended(message, REFUSED)
        elif (content := inside.content_of(package, found)) is not None:
            self._over(turn, f"is answered: {content!r}")
            self._has_ended(message, content)
        else:
            self._over(turn, "stands by")

    def _over(self, turn: Turn, how: str) -> None:
        self._checker.waiting[turn.use.name].remove(turn)
        self.run.note(how, f"{turn.use.name} use={turn.use.number}")

    def _has_ended(self, message: str, how: bytes) -> None:
        self._ends[message].add(how)
        ends = self._ends[message]
        if not self._checker.forgets:
            self.run.must(len(ends) == 1, "message {} has several ends: {}", message, sorted(ends))
