"""Counts the ticks of a schedule that two beats run, with the same rules for every scheduler.

A schedule of one entry is sent once every interval. A tick counts when it arrives at the broker, which nothing strikes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.storm.story import Line

#: Seconds at the end of the calm in which the ticks are to come as if nothing had happened.
AT_THE_END = 10.0


@dataclass(frozen=True)
class Ticks:
    """What arrived, and what did not.

    Attributes:
        seconds: from the first fault to the calm; the attributes that follow are about this time.
        faults: how many there were.
        ended: beats that ended by themselves.
        arrived: ticks.
        early: ticks that came less than half an interval after a tick of another beat, unless both say when they were
            due, and that is not the same.
        late: ticks that are not early for that reason: the tick before came late.
        repeated: ticks that came under the id of an earlier tick.
        twice: ticks that are early or repeated.
        resumed: early ticks where one of the two beats had been frozen, and went on less than half an interval before.
        longest: seconds of the longest time without a tick.
        silent: seconds in which a tick was overdue, without delays of up to half an interval.
        at_the_end: ticks in the last ten seconds of the calm.
    """

    seconds: float
    faults: int
    ended: int
    arrived: int
    early: int
    late: int
    repeated: int
    twice: int
    resumed: int
    longest: float
    silent: float
    at_the_end: int

    @property
    def goes_on(self) -> bool:
        """Whether the schedule is sent when all is calm."""
        return self.at_the_end >= AT_THE_END - 1


def count(lines: Iterable[Line], *, interval: float = 1.0) -> Ticks:
    """Count the ticks in a history.

    Args:
        lines: in any order, with the events "begins", "calm" and "over" of the storm.
        interval: seconds between two ticks.
    """
    ordered = sorted(lines, key=lambda line: line["at"])
    times = {line["event"]: line["at"] for line in ordered if line["event"] in ("begins", "calm", "over")}
    begins, calm, over = times["begins"], times["calm"], times["over"]
    ticks = [line for line in ordered if line["event"] == "tick"]
    during = [line for line in ticks if begins <= line["at"] < calm]
    close, repeated = _close(ticks, interval / 2), _repeated(ticks)
    pairs = [(one, tick) for one, tick in close if not _are_apart(one, tick, interval / 2)]
    early = [tick for _, tick in pairs]
    faults = [line for line in ordered if line["event"] == "fault"]
    ended = sum(line["kind"].endswith("ended by itself") for line in faults)
    frozen = [line for line in faults if line["fate"] == "frozen"]
    gaps = [next_one - one for one, next_one in itertools.pairwise([begins, *(tick["at"] for tick in during), calm])]
    return Ticks(
        seconds=calm - begins,
        faults=len(faults) - ended,
        ended=ended,
        arrived=len(during),
        early=sum(tick in early for tick in during),
        late=sum(tick in during and tick not in early for _, tick in close),
        repeated=sum(tick in repeated for tick in during),
        twice=sum(tick in early or tick in repeated for tick in during),
        resumed=sum(tick in during and _went_on([one, tick], frozen, interval / 2) for one, tick in pairs),
        longest=max(gaps),
        silent=sum(gap - interval for gap in gaps if gap > 1.5 * interval),
        at_the_end=sum(over - AT_THE_END <= tick["at"] < over for tick in ticks),
    )


def _close(ticks: Sequence[Line], soon: float) -> list[tuple[Line, Line]]:
    """Ticks that came soon after a tick of another beat, each with that tick.

    A beat that catches up may send two ticks in quick succession, so only those of different beats count.
    """
    pairs = itertools.pairwise(ticks)
    return [(one, tick) for one, tick in pairs if tick["pid"] != one["pid"] and tick["at"] - one["at"] < soon]


def _are_apart(one: Line, tick: Line, least: float) -> bool:
    """Whether both say when they were due, and those times are at least this many seconds apart."""
    dues = one.get("due"), tick.get("due")
    return None not in dues and abs(dues[1] - dues[0]) >= least


def _repeated(ticks: Sequence[Line]) -> list[Line]:
    first: dict[str, Line] = {}
    return [tick for tick in ticks if first.setdefault(tick["message"], tick) is not tick]


def _went_on(ticks: Sequence[Line], frozen: Sequence[Line], soon: float) -> bool:
    """Whether one of these ticks was sent by a beat that had just been frozen."""
    return any(
        tick["pid"] in fault["pids"] and fault["begin"] < tick["at"] < fault["at"] + soon
        for tick in ticks
        for fault in frozen
    )
