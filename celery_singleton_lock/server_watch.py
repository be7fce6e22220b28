"""Notices when a lock server stops answering, and when it answers again, for all that a process does with it.

Once it does not answer, a thread asks it every second, unless somebody else does. The process may have nothing else to
ask: its leases are lost, and its messages are with the broker.

The processes of a pool leave it to the process that has forked them: the pool logs one line, not one for each process.
They report that they got no answer, and the main process asks for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from celery_singleton_lock import clock, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.later import Later
from celery_singleton_lock.outage import AtRisk, Outage
from celery_singleton_lock.watched import weakly

#: Seconds from one question to the next during an outage.
ASK_AFTER = 1.0


class ServerWatch:
    """Watches one lock server.

    Args:
        server: its name, for messages.
        ask: asks the server something about a lock's key; raises `LockUnavailable` if there is no answer.
        leases: finds the leases that the server keeps for this process.
    """

    def __init__(self, server: str, ask: Callable[[str], None], leases: Callable[[], Sequence[AtRisk]]) -> None:
        self._server = server
        self._ask = ask
        self._leases = [leases]
        self._report: Callable[[str], None] | None = None
        # Weakly: the thread must not keep alive what nobody uses any more.
        self._later = Later("singleton-lock-outage", weakly(self._look))
        self._outage = Outage(self._at_risk)
        #: The key to ask about: in a cluster, other keys are on other servers.
        self._key = ""
        #: When to ask, if nobody else has asked by then.
        self._ask_at = 0.0
        #: Whether the process that has forked this one watches the server.
        self._is_left = False
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """In the child of a fork."""
        self._is_left = self._report is not None
        self._outage = Outage(self._at_risk, level=logging.DEBUG if self._is_left else logging.WARNING)

    def watch_for_children(self, report: Callable[[str], None], leases: Callable[[], Sequence[AtRisk]]) -> None:
        """Let the processes that are forked from this one from now on leave it to this process.

        Args:
            report: called in such a process with the key about which the server did not answer.
            leases: finds their leases.
        """
        self._report = report
        self._leases.append(leases)

    def failed(self, error: LockUnavailable, key: str) -> None:
        """Note that the server did not answer a question about the lock with this key."""
        self._outage.failed(error)
        if self._is_left and self._report is not None:
            self._report(key)
        else:
            self._ask_about(key, clock.now() + ASK_AFTER)

    def answered(self) -> None:
        """Note that the server has answered."""
        self._outage.answered(self._server)

    def look(self, key: str) -> None:
        """Ask the server at once, since a process that was forked from this one got no answer."""
        if not self._outage.is_under_way:
            self._ask_about(key, clock.now())

    def _at_risk(self) -> list[AtRisk]:
        return [lease for leases in self._leases for lease in leases()]

    def _ask_about(self, key: str, at: float) -> None:
        self._key, self._ask_at = key, at
        self._later.want()

    def _look(self) -> float | None:
        """Ask, if that is due; the seconds until the next call, None if the server answers."""
        if (left := self._ask_at - clock.now()) > 0:
            return left
        try:
            self._ask(self._key)
        except LockUnavailable as error:
            self._outage.failed(error)
        else:
            self._outage.answered(self._server)
        return ASK_AFTER if self._outage.is_under_way else None
