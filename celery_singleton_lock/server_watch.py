"""Notices when a lock server stops answering, and when it answers again, for all that a process does with it.

Once it does not answer, a thread asks it every second until it does. The process may have nothing else to ask: its
leases are lost, and its messages are with the broker. Other answers do not end an outage: they may come from another
server of a cluster, or a server may renew leases, but grant no locks.

The processes of a pool leave it to the process that has forked them: the pool logs one line, not one for each process.
They report that they got no answer, and the main process asks for itself.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.background import Later
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.outage import AtRisk, Outage

logger = get_logger(__name__)

T = TypeVar("T")

#: Seconds from one question to the next during an outage.
ASK_AFTER = 1.0


class ServerWatch:
    """Watches one lock server.

    Args:
        server: its name, for messages.
        ask: asks whether the server would grant locks, as far as a lock's key shows; if not, raises `LockUnavailable`.
        leases: finds the leases that the server keeps for this process.
    """

    def __init__(self, server: str, ask: Callable[[str], object], leases: Callable[[], Sequence[AtRisk]]) -> None:
        self._server = server
        self._ask = ask
        self._leases = [leases]
        self._report: Callable[[str, str], None] | None = None
        # Weakly: the thread must not keep alive what nobody uses any more.
        self._later = Later("singleton-lock-outage", weakly(self._look))
        self._outage = Outage(self._at_risk)
        #: The key to ask about: in a cluster, other keys are on other servers.
        self._key = ""
        #: When to ask.
        self._ask_at = 0.0
        #: When it was last asked from here: reports of other processes may come one after the other.
        self._asked_at = 0.0
        #: Why another process got no answer.
        self._reported: str | None = None
        #: Whether the process that has forked this one watches the server.
        self._is_left = False
        forks.start_anew_in_child(self)

    def leave_to_parent(self, report: Callable[[str, str], None]) -> None:
        """In a process of a pool that was not forked: as `watch_for_children`, and a fork, would have it."""
        self._report = report
        self.start_anew()

    def start_anew(self) -> None:
        """In the child of a fork."""
        self._is_left = self._report is not None
        del self._leases[1:]  # Of other children.
        self._outage = Outage(self._at_risk, level=logging.DEBUG if self._is_left else logging.WARNING)

    def watch_for_children(self, report: Callable[[str, str], None], leases: Callable[[], Sequence[AtRisk]]) -> None:
        """Let the processes that are forked from this one from now on leave it to this process.

        Args:
            report: called in such a process with the key about which the server did not answer, and the reason.
            leases: finds their leases.
        """
        self._report = report
        self._leases[1:] = [leases]

    @property
    def is_silent(self) -> bool:
        """Whether the server does not answer, as far as is known."""
        return self._outage.is_under_way

    def failed(self, error: LockUnavailable, key: str) -> None:
        """Note that the server did not answer a question about the lock with this key."""
        self._outage.failed(error)
        if self._is_left and self._report is not None:
            self._report(key, error.reason)
        else:
            self._ask_about(key, clock.now() + ASK_AFTER)

    def answered(self) -> None:
        """Note that the server has answered."""
        if self._is_left:
            self._outage.answered(self._server)
        elif self._outage.is_under_way:
            self._outage.heard()

    def look(self, key: str, reason: str) -> None:
        """Ask the server, a second after the last time, since a process that was forked from this one got no answer."""
        if not self._outage.is_under_way:
            self._reported = reason
            self._ask_about(key, max(clock.now(), self._asked_at + ASK_AFTER))

    def _at_risk(self) -> list[AtRisk]:
        return [lease for leases in self._leases for lease in leases()]

    def _ask_about(self, key: str, at: float) -> None:
        self._key, self._ask_at = key, at
        self._later.want()

    def _look(self) -> float | None:
        """Ask, if that is due; the seconds until the next call, None if the server answers."""
        if (left := self._ask_at - clock.now()) > 0:
            return left
        reported, self._reported = self._reported, None
        try:
            self._asked_at = clock.now()
            self._ask(self._key)
        except LockUnavailable as error:
            self._outage.failed(error)
        else:
            if self._outage.is_under_way:
                self._outage.answered(self._server)
            elif reported is not None:
                logger.warning("%s; it answers by now", LockUnavailable(self._server, reported))
        return ASK_AFTER if self._outage.is_under_way else None


def weakly(call: Callable[[], T]) -> Callable[[], T | None]:
    """The same call; a bound method does not keep its object alive, and the call returns None once that is gone."""
    # Not `weakref.WeakMethod`, which takes half a kilobyte: there may be many.
    return partial(_call, weakref.ref(call.__self__), call.__func__) if isinstance(call, MethodType) else call


def _call(subject: weakref.ref[Any], method: Callable[[Any], T]) -> T | None:
    return None if (alive := subject()) is None else method(alive)
