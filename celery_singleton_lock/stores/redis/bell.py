"""How a waiter is woken: it blocks on a list to which a release pushes.

Redis gives each element to the one that has blocked longest, and forgets those whose connection is gone. The command
stays open over several looks at the lock, so that nobody loses its place in the queue by looking.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import Any, Protocol

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis.connection import Stream
from celery_singleton_lock.stores.redis.script import Call
from celery_singleton_lock.stores.redis.server import told

#: Seconds that a waiter sleeps at most before it looks again: a wake-up that goes to a waiter which is dead, frozen, or
#: cannot be reached, costs the others no more.
SLICE = 1.0


#: Seconds until the next look when the key is about to move to another server, or has moved.
MOVING = 0.1


class Pole(Protocol):
    """What a bell can hang on: a server, or what a cluster shows of a key."""

    def run(self, call: Call) -> Any:
        """Run a script."""

    def stream(self) -> AbstractContextManager[Stream]:
        """A connection for this thread."""


class RedisBell:
    """A place in the queue of a lock; see `Bell`.

    Args:
        key: of the lock.
        server_of: which server the bell hangs on; asked again after an error.
        shown: the server's name, for messages.
        behind: what the server is to do when it wakes the waiter.
    """

    def __init__(self, key: str, server_of: Callable[[], Pole], shown: str, behind: Call | None = None) -> None:
        self._key = key
        self._behind = behind
        self._server_of = server_of
        self._shown = shown
        self._exits = ExitStack()
        self._stream: Stream | None = None

    def __enter__(self) -> RedisBell:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        stream, self._stream = self._stream, None
        with suppress(RedisError, OSError), self._exits:
            if self._behind is None and stream is not None and stream.unanswered and _answered(stream):
                # Woken while it left: somebody else may need that.
                self._server_of().run(lock_commands.wake_another(self._key))

    @property
    def is_open(self) -> bool:
        """Whether the server still has something to do for it."""
        return self._stream is not None and self._stream.unanswered > 0

    def wait(self, timeout: float) -> Any:
        """See `Bell.wait`.

        Returns:
            The answer to what stood behind; None if there is none.
        """
        try:
            stream = self._queued()
            stream.wait_at_most(min(max(timeout, 0.001), SLICE))
            return self._heard(stream)
        except TimeoutError:
            return None
        except (RedisError, OSError) as error:
            self._stream = None
            with suppress(RedisError, OSError):
                self._exits.__exit__(type(error), error, error.__traceback__)
            if _is_elsewhere(error):
                clock.sleep(min(timeout, MOVING))
                return None
            raise LockUnavailable(self._shown, told(error)) from error

    def _heard(self, stream: Stream) -> Any:
        """The last answer that is still to come."""
        answer = None
        while stream.unanswered:
            answer = stream.read()
        return None if self._behind is None else answer

    def _queued(self) -> Stream:
        """The connection on which the command is open."""
        if self._stream is None:
            self._stream = self._exits.enter_context(self._server_of().stream())
        if not self._stream.unanswered:
            self._stream.send(("BLPOP", keyspace.wake_key(self._key), 0))
            if self._behind is not None:
                # By its text: a server that has forgotten the script would do nothing as it wakes the waiter, which has
                # lost its place in the queue by then.
                self._stream.send(self._behind.by_text)
        return self._stream


def _is_elsewhere(error: Exception) -> bool:
    """Whether the key is at another server of the cluster now, or this one is its master no more."""
    return isinstance(error, (AskError, ClusterDownError, MovedError, TryAgainError)) or str(error).startswith(
        "UNBLOCKED"
    )


def _answered(stream: Stream) -> bool:
    stream.wait_at_most(0.0)
    return any(True for _ in stream.arrived())
