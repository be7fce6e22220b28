"""When a host could reach too few lock servers to take, renew or free a lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: A way to a lock server, and the begin and end of its silence.
Span = tuple[str, float, float]


class Silences:
    """The silences of all hosts.

    Args:
        spans: silent ways; a way is "east/0" from one host, "*/0" from all hosts.
        too_few: how many servers have to be silent at once.
        pause: seconds after which a server that answers again is heard at the latest: clients reconnect, and ask again.
    """

    def __init__(self, spans: Iterable[Span], *, too_few: int, pause: float) -> None:
        self._spans, self._too_few, self._pause = list(spans), too_few, pause
        self._of: dict[str, Sequence[tuple[float, float]]] = {}

    def touch(self, host: str, begin: float, end: float) -> bool:
        """Whether there is a silence at some time in between."""
        return any(first <= end and last >= begin for first, last in self._at(host))

    def cover(self, host: str, begin: float, end: float, *, still: Iterable[tuple[float, float]] = ()) -> bool:
        """Whether silences cover the whole time.

        Args:
            host: where.
            begin: of that time.
            end: of that time.
            still: when a process was frozen, so that nobody could answer it; it asks when it resumes, and is heard
                after the pause.
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
        # A silence that begins when another ends continues it.
        for at, change, server in sorted(changes, key=lambda one: (one[0], -one[1])):
            silent[server] = silent.get(server, 0) + change
            enough = sum(number > 0 for number in silent.values()) >= self._too_few
            if enough and began is None:
                began = at
            elif not enough and began is not None:
                found.append((began, at))
                began = None
        return found
