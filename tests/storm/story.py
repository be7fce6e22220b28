"""A history, sorted out: which bodies ran, what happened to each message, and what went wrong meanwhile."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.storm.silences import Silences

Line = Mapping[str, Any]


@dataclass
class Attempt:
    """A body that ran, from its first line to its last."""

    run: str
    key: str
    message: str
    pid: int
    host: str
    fence: int
    limit: int
    #: Whether its end is the end of its message: it is not if it retries.
    is_last: bool
    retries: int
    due: str | None
    times: list[float]
    how: str = "open"

    @property
    def start(self) -> float:
        return self.times[0]

    @property
    def end(self) -> float:
        return self.times[-1]

    def gap_at(self, at: float) -> tuple[float, float]:
        """The lines before and after a moment."""
        after = min(max(bisect_left(self.times, at), 1), len(self.times) - 1)
        return self.times[after - 1], self.times[after]

    def stood_still(self, begin: float, end: float, least: float) -> float:
        """Seconds of that time that lie in gaps of at least this many seconds."""
        pairs = zip(self.times, self.times[1:], strict=False)
        gaps = ((max(one, begin), min(next_one, end)) for one, next_one in pairs if next_one - one >= least)
        return sum(max(next_one - one, 0.0) for one, next_one in gaps)


#: Seconds in which a process dies of a signal that came while it was frozen: it writes a traceback first.
DYING = 0.1


@dataclass(frozen=True)
class Fault:
    kind: str
    begin: float
    end: float
    pids: frozenset[int]
    #: What happened to them: "killed", "frozen" (a whole worker stood still), "stopped" (one of its processes did).
    fate: str
    #: The lock server that forgot something because of it; empty for none.
    forgot: str
    #: Whether it forgot only what was written since the fault began.
    latest: bool
    #: Whether it did not forget how messages ended.
    but_ends: bool
    #: Ways on which no lock server answered: "east/0", or "*/0" for those of all hosts.
    silent: frozenset[str]

    def overlaps(self, begin: float, end: float) -> bool:
        return self.end >= begin and self.begin <= end


class Story:
    """What the lines of a history say.

    Args:
        lines: of all processes, in any order.
        quorum: of the lock servers.
        servers: number of lock servers.
        pause: seconds until a lock server that answers again is heard.
    """

    def __init__(self, lines: Iterable[Line], *, quorum: int, servers: int, pause: float) -> None:
        self._quorum = quorum
        self.attempts: dict[str, Attempt] = {}
        self.told: dict[str, list[Line]] = defaultdict(list)
        #: Ends that a lock server had recorded before they were reported, of messages that did not run or were stopped.
        self.recorded: dict[str, list[Line]] = defaultdict(list)
        self.sent: dict[str, Line] = {}
        #: Perhaps sent: the sender got an error, or the package took the message for a duplicate.
        self.unsure: set[str] = set()
        #: Jobs that are locked when they are sent: which were about to be sent, were duplicates, were queued or taken.
        self.clicked: dict[str, Line] = {}
        self.duplicates: list[Line] = []
        self.queued: list[Line] = []
        self.taken: list[Line] = []
        #: By message and attempt: the last news of it from the broker.
        self.broker: dict[tuple[str, int], str] = {}
        #: By message: when a worker first got it, and when it met a lock for which only the newest message waits.
        self.came: dict[str, float] = {}
        self.met: dict[str, float] = {}
        self.faults: list[Fault] = []
        self.left: list[Line] = []
        for line in sorted(lines, key=lambda line: line["at"]):
            getattr(self, f"_{line['event']}")(line)
        self.faults = [self._when_it_went_on(one) for one in self.faults]
        spans = [(way, one.begin, one.end) for one in self.faults for way in one.silent]
        self.silences = Silences(spans, too_few=servers - quorum + 1, pause=pause)

    def by_key(self) -> Iterator[list[Attempt]]:
        """The attempts of each key, in the order of their starts."""
        keys: dict[tuple[str, int], list[Attempt]] = defaultdict(list)
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.start):
            keys[attempt.key, attempt.limit].append(attempt)
        yield from keys.values()

    def forgot(self, begin: float, end: float, *, written: float | None = None) -> float | None:
        """When the last lock server forgot something in that time, if so many did that no quorum is left.

        Args:
            begin: of that time.
            end: of that time.
            written: when the missing end was written.
        """
        found = [one for one in self.faults if one.forgot and one.overlaps(begin, end)]
        if written is not None:
            found = [one for one in found if not one.but_ends and (not one.latest or one.begin <= written)]
        return max(one.end for one in found) if len({one.forgot for one in found}) >= self._quorum else None

    def lacks(self, host: str, begin: float, gone: float, at: float) -> bool:
        """Whether no quorum is left of the servers that have a process's write.

        Args:
            host: of the process.
            begin: when it had something to write; it kept trying the servers that did not answer.
            gone: when it was killed.
            at: when somebody asks for the write. Meanwhile, other servers may have forgotten it.
        """
        missed, forgot = set[str](), set[str]()
        for one in self.faults:
            for where, _, server in (way.partition("/") for way in one.silent):
                if where in ("*", host) and one.begin <= begin and one.end >= gone:
                    missed.add(server)
                if one.forgot and begin <= one.end <= at:
                    forgot.add(server)
        return self._quorum > 1 and bool(forgot) and len(missed | forgot) >= self._quorum

    def struck(self, pid: int, fate: str, begin: float, end: float) -> Iterator[Fault]:
        """Faults with that fate that concerned a process in that time."""
        return (one for one in self.faults if one.fate == fate and pid in one.pids and one.overlaps(begin, end))

    def hogged(self, pid: int, begin: float, end: float) -> bool:
        """Whether a task held the GIL of that process in that time."""
        return any(
            one.key.startswith("hog-") and one.pid == pid and one.start <= end and one.end >= begin
            for one in self.attempts.values()
        )

    def _start(self, line: Line) -> None:
        self.attempts[line["run"]] = Attempt(
            *(line["run"], line["key"], line["message"], line["pid"], line["host"]),
            fence=line.get("fence", 0),
            limit=line.get("limit", 1),
            is_last=line.get("last", True),
            retries=line.get("retries", 0),
            due=line.get("due"),
            times=[line["at"]],
        )

    def _beat(self, line: Line) -> None:
        if line["run"] in self.attempts:
            self.attempts[line["run"]].times.append(line["at"])

    def _end(self, line: Line) -> None:
        self._beat(line)
        if line["run"] in self.attempts:
            self.attempts[line["run"]].how = line["how"]

    def _told(self, line: Line) -> None:
        self.told[line["message"]].append(line)

    def _recorded(self, line: Line) -> None:
        self.recorded[line["message"]].append(line)

    def _sent(self, line: Line) -> None:
        self.sent[line["message"]] = line
        if not line.get("after"):
            self.broker.setdefault((line["message"], 0), "queued")

    def _unsure(self, line: Line) -> None:
        self.unsure.add(line["message"])

    def _queued(self, line: Line) -> None:
        self.broker[line["message"], line.get("retries", 0)] = "queued"
        if line["message"] in self.clicked:
            self.queued.append(line)

    def _taken(self, line: Line) -> None:
        self.broker[line["message"], line.get("retries", 0)] = "taken"
        self.came.setdefault(line["message"], line["at"])
        if line["message"] in self.clicked:
            self.queued.append(line)  # The lock is confirmed, and lasts anew.
            self.taken.append(line)

    def _met(self, line: Line) -> None:
        self.met.setdefault(line["message"], line["at"])

    def _clicked(self, line: Line) -> None:
        self.clicked[line["message"]] = line

    def _duplicate(self, line: Line) -> None:
        self.duplicates.append(line)

    @property
    def unheard(self) -> set[str]:
        """Messages that were about to be sent, and whose sender never noted the outcome."""
        return self.clicked.keys() - self.sent.keys()

    def group(self, pid: int) -> frozenset[int]:
        """Processes that faults have struck together with this process."""
        return frozenset().union(*(fault.pids for fault in self.faults if pid in fault.pids))

    def _when_it_went_on(self, killed: Fault) -> Fault:
        """A frozen process dies of a signal (other than SIGKILL) when it resumes."""
        if killed.fate != "killed":
            return killed
        still = (one for one in self.faults if one.fate in ("frozen", "stopped") and one.pids & killed.pids)
        ends = [one.end for one in still if one.overlaps(killed.begin, killed.end)]
        return replace(killed, end=max([killed.end, *(end + DYING for end in ends)]))

    def _left(self, line: Line) -> None:
        self.left.append(line)

    def _fault(self, line: Line) -> None:
        pids, silent = frozenset(line.get("pids", ())), frozenset(line.get("silent", ()))
        about = line["kind"], line["begin"], line["at"], pids, line.get("fate", "")
        forgotten = line.get("forgot", ""), line.get("latest", False), line.get("but_ends", False)
        self.faults.append(Fault(*about, *forgotten, silent))
