"""Which attempts of an owner a node of a Redlock may still carry out."""

from __future__ import annotations

#: Attempts at most that a node is told come too late: one that has not answered for longer is asked for nothing.
MOST_LATE = 32


class Late:
    """The attempts of one owner that failed; those that some node has not answered are named by the next ones.

    Args:
        nodes: how many there are.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._settled: dict[str, set[int]] = {}

    def add(self, attempt: str, settled: set[int]) -> None:
        """An attempt has failed; `settled` are the nodes that will not carry it out any more, and grows with them."""
        self._settled[attempt] = settled

    def names(self) -> list[str]:
        """The attempts that come too late from now on."""
        left = [(attempt, settled) for attempt, settled in self._settled.items() if len(settled) < self._nodes]
        self._settled = dict(left[-MOST_LATE:])
        return [*self._settled]
