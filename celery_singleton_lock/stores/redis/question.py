"""One owner's question for a lock on one server, over all of its tries.

A try that was not answered may be carried out later. So each has a name, and the next one says which were given up
before it: from then on they take nothing. If there is no next try, `undone` undoes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import TimeoutError

from celery_singleton_lock import clock, trust
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.redis import lock_answers, lock_commands
from celery_singleton_lock.stores.redis.lock_answers import Answer
from celery_singleton_lock.stores.redis.script import Call


def granted(answer: Sequence[Any], request: LockRequest, sent_at: float) -> Lease:
    """The lease that was granted.

    Raises:
        TimeoutError: the lease counts from sending, and too little of it is left to start work.
    """
    _, fence, slot = answer
    if not trust.came_in_time(sent_at, request.ttl):
        raise TimeoutError(f"the answer took longer than a third of the ttl of {request.ttl:g} s")
    return request.lease(fence=fence, sent_at=sent_at, slot=slot)


class Question:
    """A request, over all of its tries.

    Args:
        run: carries out an acquire.
        request: what is asked for.
    """

    __slots__ = ("_request", "_run", "_slots", "_unanswered")

    def __init__(
        self,
        run: Callable[[Call], Sequence[Any]],
        request: LockRequest,
    ) -> None:
        self._run, self._request = run, request
        self._slots = request.limit
        #: Names of the tries that were not answered.
        self._unanswered: list[str] = []

    def try_once(self) -> Lease | Held | Record:
        """Ask; may be repeated after any error.

        Raises:
            RedisError, OSError: no answer, or an error.
        """
        return lock_answers.with_all_slots(self._slots, self._ask)

    def undone(self, place: str | None = None, *, free: bool = True) -> Call:
        """The call that undoes the tries that were not answered, and the hold that one of them may have got.

        It may be carried out late, when the owner has asked again and got the lock. So the whole value is named, with
        the holder as it is here.

        Args:
            place: the name of another question that was asked for this.
            free: whether to end the hold.
        """
        names = [*self._unanswered, *([place] if place else [])]
        request = self._request
        # Without the fence, which is not known.
        value = (
            request.owner + request.holder.around_fence(request.ttl).partition("\n")[0] + "," if free else new_owner()
        )
        return lock_commands.undo(request.hold(), value, names)

    def _ask(self, slots: int) -> Lease | Held | Record:
        name, sent_at = new_owner(), clock.now()
        self._slots = slots
        call = lock_commands.acquire(self._request, name, slots=slots, late=tuple(self._unanswered))
        # Noted before it is sent: an interruption may come between any two lines.
        self._unanswered.append(name)
        answer = self._run(call)
        if answer[0] == Answer.GRANTED:
            self._unanswered.clear()
            return granted(answer, self._request, sent_at)
        try:
            found = lock_answers.parse_acquired(answer, self._request, sent_at)
        except lock_answers.MoreSlots:
            self._unanswered.pop()  # It was answered, and took nothing.
            raise
        self._unanswered.clear()
        return found
