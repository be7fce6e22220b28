"""When too few lock servers could be reached from a host for a lock to be taken, renewed or freed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: A way to a lock server, and from when to when nothing came by it.
Span = tuple[str, float, float]


class Silences:
    """Those of all hosts.

    Args:
        spans: a way is "east/0" from one host, "*/0" from all.
        too_few: how many servers have to be silent at once.
        pause: seconds after which one that answers again is heard at the latest: clients connect anew, and ask again.
    """

    def __init__(self, spans: Iterable[Span], *, too_few: int, pause: float) -> None:
        self._spans, self._too_few, self._pause = list(spans), too_few, pause
        self._of: dict[str, Sequence[tuple[float, float]]] = {}

    def touch(self, host: str, begin: float, end: float) -> bool:
        """Whether there is one at some time between."""
        return any(first <= end and last >= begin for first, last in self._at(host))

    def cover(self, host: str, begin: float, end: float, *, still: Iterable[tuple[float, float]] = ()) -> bool:
        """Whether they go on from the one moment to the other.

        Args:
            host: where.
            begin: the one.
            end: the other.
            still: when a process stood still that nobody could answer; it asks as it goes on, and is heard as above.
        """
        reached = begin
        stood_still = ((first, last + self._pause) for first, last in still)
        spans = [one for one in sorted([*self._at(host), *stood_still]) if one[1] >= begin]
        for first, last in spans:
            if first > reached:
                break
            reached = max(reached, last)
        return bool(spans) and spans[0][0] <= begin and reached >= end

    def _at(self, host: str) -> Sequence[tuple[float, float]]:
        if host not in self._of:
            self._of[host] = self._found(host)
        return self._of[host]

    def _found(self, host: str) -> Sequence[tuple[float, float]]:
        changes = []
        for way, begin, end in self._spans:
            where, _, server = way.partition("/")
            if where in ("*", host):
                changes += [(begin, 1, server), (end + self._pause, -1, server)]
        found: list[tuple[float, float]] = []
        silent: dict[str, int] = {}
        began: float | None = None
        # One that begins as another ends goes on.
        for at, change, server in sorted(changes, key=lambda one: (one[0], -one[1])):
            silent[server] = silent.get(server, 0) + change
            enough = sum(number > 0 for number in silent.values()) >= self._too_few
            if enough and began is None:
                began = at
            elif not enough and began is not None:
                found.append((began, at))
                began = None
        return found
