"""How a waiter waits on Redis: it blocks on a list to which each release pushes.

Redis gives each element to the client that has blocked longest, and forgets clients whose connection is gone. The
command stays open over several questions, so that no waiter loses its place in the queue by asking.

On one server, or in a cluster, the question follows that command (`docs/protocol.md`, section 7). A waiter that leaves
leaves its owner's tombstone, or the question behind it would take the lock for nobody; if a waiter is killed, its
connection closes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.redis import keyspace, lock_answers, lock_commands
from celery_singleton_lock.stores.redis.connection import Connection
from celery_singleton_lock.stores.redis.script import Call, Command
from celery_singleton_lock.stores.redis.server import STEP_TIMEOUT, Server, words_of
from celery_singleton_lock.stores.waiters import Ask, AskingWaiter

#: The most seconds that a waiter sleeps before it asks again: a wake-up that goes to a dead, frozen or unreachable
#: waiter costs the others no more.
SLICE = 1.0

#: Seconds for which a waiter that is not woken only looks who has the lock, and asks if that has changed. Its place in
#: `:waiting` must outlive them, even if one question fails.
ONLY_LOOKS = lock_commands.WAITING_TTL / 2

#: Asks for the lock, if it is not held by the same as before.
Look = Callable[[Held], Lease | Held | Record]

#: Seconds until the next question when the key is about to move to another server, or has moved.
MOVING = 0.1


class PipedWaiter(AskingWaiter):
    """A `Waiter` whose question follows its wake-up.

    Args:
        wake_up: wakes it.
        ask: acquires the lock, if the wake-up brought no answer.
        leave: voids what is left of the questions; with True, frees the lock.
        request: what it asks for; the same that `ask` has.
        confirm: gives a lease its whole ttl; whether it is still held.
        look: may take the place of `ask` for a while; None if only asking shows what matters.
    """

    def __init__(
        self,
        wake_up: RedisWakeUp,
        ask: Ask,
        leave: Callable[[bool], None],
        *,
        request: LockRequest,
        confirm: Callable[[Lease], bool],
        look: Look | None = None,
    ) -> None:
        super().__init__(wake_up, ask, leave)
        self._look_at = look
        #: What was found when it last asked, and when that was.
        self._last: Held | None = None
        self._asked_at = 0.0
        self._redis_wake_up = wake_up
        self._request = request
        self._confirm = confirm

    def _may_be_given_more(self) -> bool:
        return self._was_cut or self._redis_wake_up.is_open or self._request.late

    def _asked(self, ask: Ask) -> Lease | Held | Record:
        self._last, self._asked_at = None, clock.now()
        found = super()._asked(ask)
        self._last = found if isinstance(found, Held) else None
        return found

    def _look(self) -> Lease | Held | Record:
        look, last = self._look_at, self._last
        if look is None or last is None or self._rang or clock.now() - self._asked_at >= ONLY_LOOKS:
            return self.ask()
        asked_at, found = self._asked_at, self._asked(partial(look, last))
        if isinstance(found, Held) and found.owner == last.owner:
            self._asked_at = asked_at
        return found

    def _woken(self, timeout: float) -> Lease | Held | Record | None:
        try:
            answer = self._redis_wake_up.wait(timeout)
        except LockUnavailable:
            self._last = None  # The server may have been restarted, and have forgotten that it waits.
            raise
        if answer is None or answer is True:
            self._rang |= answer is True
            return None
        found = lock_answers.parse_handed_over(answer, self._request)
        return None if isinstance(found, Lease) and not self._confirm(found) else found


class RedisWakeUp:
    """A place in the queue of a lock: a `WakeUp`.

    Args:
        key: the lock's key.
        server_of: which server the list is on; asked again after an error.
        server: its name, for messages.
        behind: what the server is to do when it wakes the waiter.
        renewal: confirms the lease that it has got by that; None if that is not known beforehand.
        step: seconds that the answer to the renewal may take.
    """

    def __init__(
        self,
        key: str,
        server_of: Callable[[], Server],
        server: str,
        behind: Call | None = None,
        renewal: Call | None = None,
        step: float = STEP_TIMEOUT,
    ) -> None:
        self._key = key
        self._behind = behind
        self._renewal = renewal
        self._step = step
        #: When the renewal was sent, until its answer is read.
        self._renewed_at: float | None = None
        self._server_of = server_of
        self._server = server
        self._exits = ExitStack()
        self._connection: Connection | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        connection, self._connection = self._connection, None
        with suppress(RedisError, OSError), self._exits:
            if self._behind is None and connection is not None and connection.unanswered and not connection.is_quiet:
                self.pass_on()  # Woken while it left: somebody else may need the wake-up.

    @property
    def is_open(self) -> bool:
        """Whether the server still has something to do for it."""
        return self._connection is not None and self._connection.unanswered > 0

    def pass_on(self) -> None:
        with suppress(RedisError, OSError):
            self._server_of().run(lock_commands.wake(self._key))

    def wait(self, timeout: float) -> Any:
        """See `WakeUp.wait`.

        Returns:
            The answer to the call behind it, or True if there was none, or the server has forgotten the script; None if
            it was not woken.
        """
        try:
            connection = self._queued()
            connection.wait_at_most(min(max(timeout, 0.001), SLICE))
            return self._heard(connection)
        except TimeoutError:
            return None
        except (RedisError, OSError) as error:
            self._leave_connection(error)
            if _is_elsewhere(error):
                clock.sleep(min(timeout, MOVING))
                return None
            raise LockUnavailable(self._server, words_of(error)) from error

    def confirmation(self) -> tuple[float, Any] | None:
        """When the renewal of the lease was sent, and its answer; None if it was not sent.

        Raises:
            RedisError, OSError: no answer, or an error.
        """
        connection, renewal, sent_at = self._connection, self._renewal, self._renewed_at
        self._renewed_at = None
        if connection is None or renewal is None or sent_at is None:
            return None
        try:
            connection.wait_at_most(self._step)
            return sent_at, renewal.understood(connection.read())
        except (RedisError, OSError) as error:
            self._leave_connection(error)
            raise

    def _leave_connection(self, error: Exception) -> None:
        self._connection = None
        with suppress(RedisError, OSError):
            self._exits.__exit__(type(error), error, error.__traceback__)

    def _heard(self, connection: Connection) -> Any:
        """The last answer that is still to come; True if that is the wake-up itself."""
        answer, behind = None, self._behind
        try:
            while connection.unanswered:
                answer = connection.read()
        except NoScriptError:
            connection.ran.clear()
            return True
        if behind is None:
            return True
        if self._renewal is not None and lock_answers.is_granted(answer):
            # First of all: it is answered while the waiter reads what it has got.
            self._renewed_at = clock.now()
            connection.send(self._renewal.by_digest)
        connection.ran.add(behind.script.sha)
        return behind.understood(answer)

    def _queued(self) -> Connection:
        """The connection on which the command is open."""
        if self._connection is None:
            self._connection = self._exits.enter_context(self._server_of().connection())
        if not self._connection.unanswered:
            self._connection.send(("BLPOP", keyspace.wake_key(self._key), 0), *self._behind_it(self._connection))
        return self._connection

    def _behind_it(self, connection: Connection) -> Sequence[Command]:
        """The command to carry out as it is woken.

        By the script's text if this connection has not run it before: a server that does not know the script would do
        nothing as it wakes the waiter, which has lost its place in the queue by then. Otherwise by its digest: reading
        and hashing the text takes the server longer than running it.
        """
        if (behind := self._behind) is None:
            return ()
        return (behind.by_digest if behind.script.sha in connection.ran else behind.by_text,)


def _is_elsewhere(error: Exception) -> bool:
    """Whether the key is on another server of the cluster now, or this server is no longer its master."""
    return isinstance(error, (AskError, ClusterDownError, MovedError, TryAgainError)) or str(error).startswith(
        "UNBLOCKED"
    )
