"""One owner's question for a lock on one server, over all of its tries.

A try that was not answered may be carried out later. So each has a name, and the next one says which were given up
before it: from then on they take nothing. What is given up without another try is undone by `undone`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import RedisError, TimeoutError

from celery_singleton_lock import clock
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.redis import lock_answers, lock_commands, stencil
from celery_singleton_lock.stores.redis.script import Call, Ready
from celery_singleton_lock.stores.redis.server import Server, Unread


class Question:
    """A request, over all of its tries.

    Args:
        run: carries out an acquire.
        request: what is asked for.
        replicas: see `Call`.
    """

    def __init__(
        self,
        run: Callable[[Call | Ready], Sequence[Any]],
        request: LockRequest,
        *,
        replicas: tuple[int, float] | None = None,
    ) -> None:
        self._run = run
        self._request = request
        self._replicas = replicas
        self._slots = request.limit
        #: Names of the tries that were not answered.
        self._unanswered: list[str] = []
        #: The first try, where it was sent ahead: when, and its answer, or what was in the way.
        self._ahead: tuple[float, Unread | Exception] | None = None

    def send_ahead(self, server: Server) -> None:
        """Send the first try now, whose answer `try_once` reads; what is rare is sent there as well."""
        name, sent_at = new_owner(), clock.now()
        if isinstance(call := self._call(name, self._slots), Ready):
            self._unanswered.append(name)
            try:
                self._ahead = sent_at, server.send(call)
            except (RedisError, OSError) as error:
                self._ahead = sent_at, error

    def drop(self) -> None:
        """Nobody wants the answer to what was sent ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and isinstance(ahead[1], Unread):
            ahead[1].drop()

    def try_once(self) -> Lease | Held | Record:
        """Ask; which may be repeated after any error.

        Raises:
            RedisError, OSError: no answer, or one that is an error.
        """
        found = lock_answers.with_all_slots(self._slots, self._ask)
        if isinstance(found, Lease) and clock.now() - found.acquired_at > self._request.ttl / 3:
            # Trust counts from sending; what is left of it is too little to start work on.
            raise TimeoutError(f"the answer took longer than a third of the ttl of {self._request.ttl:g} s")
        return found

    def undone(self, place: str | None = None, *, free: bool = True) -> Call:
        """What undoes the tries that were not answered, and the hold that one may have got.

        It may be carried out late, when the owner has asked again and got the lock. So the whole value is named, with
        the holder as it is here.

        Args:
            place: another name of a question that was asked for this.
            free: whether to end the hold.
        """
        names = [*self._unanswered, *([place] if place else [])]
        request = self._request
        # Without the fence, which was not answered.
        value = (
            request.owner + request.holder.around_fence(request.ttl).partition("\n")[0] + "," if free else new_owner()
        )
        return lock_commands.undo(request.hold(), value, names)

    def _ask(self, slots: int) -> Lease | Held | Record:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            sent_at, answer = ahead
            if isinstance(answer, Exception):
                raise answer
            return self._understood(answer.read(), sent_at)
        name, sent_at = new_owner(), clock.now()
        self._slots = slots
        call = self._call(name, slots)
        # Noted before it is sent: an interruption may come between any two lines.
        self._unanswered.append(name)
        return self._understood(self._run(call), sent_at)

    def _understood(self, answer: Sequence[Any], sent_at: float) -> Lease | Held | Record:
        try:
            found = lock_answers.acquired(answer, self._request, sent_at)
        except lock_answers.MoreSlots:
            self._unanswered.pop()  # It was answered, which took nothing.
            raise
        self._unanswered.clear()
        return found

    def _call(self, name: str, slots: int) -> Call | Ready:
        request, late, replicas = self._request, self._unanswered, self._replicas
        if slots == 1 and not late and replicas is None and (ready := stencil.acquire(request, name)) is not None:
            return ready
        return lock_commands.acquire(request, name, slots=slots, late=tuple(late), replicas=replicas)
