"""Which attempts a node of a Redlock may still carry out."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress

from celery_singleton_lock.holder import stem

#: Attempts at most that a node is told come too late: one that has not answered for longer is asked for nothing.
MOST_LATE = 32

#: Owners at most whose attempts are known: many more than wait in one process.
MOST_OWNERS = 2_000


class Late:
    """The attempts that failed and that some node has not answered: the next ones of their owner name them, whether it
    asks again or waits.

    Args:
        nodes: how many there are.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        #: By owner: the nodes that will not carry out an attempt any more.
        self._settled: OrderedDict[str, dict[str, set[int]]] = OrderedDict()

    def add(self, attempt: str, settled: set[int]) -> None:
        """An attempt has failed; `settled` are the nodes that will not carry it out any more, and grows with them."""
        self._settled.setdefault(stem(attempt), {})[attempt] = settled
        while len(self._settled) > MOST_OWNERS:
            with suppress(KeyError):  # Another thread was faster.
                self._settled.popitem(last=False)

    def names(self, owner: str) -> list[str]:
        """The attempts of an owner that come too late from now on."""
        known = self._settled.get(stem(owner), {})
        left = [(attempt, settled) for attempt, settled in known.items() if len(settled) < self._nodes]
        if left:
            self._settled[stem(owner)] = dict(left[-MOST_LATE:])
        else:
            self.forget(owner)
        return [attempt for attempt, _ in left[-MOST_LATE:]]

    def forget(self, owner: str) -> None:
        """It asks for nothing any more."""
        self._settled.pop(stem(owner), None)
