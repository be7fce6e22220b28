"""Judges a history: who overlapped, what was lost, told twice, or left behind, and how long recovery took.

A body runs from its first line to its last one. So what is found is sure, whatever the machine was busy with; what
lies between the last line of a body that was killed and its death is not seen.

What `docs/guarantees.md` does not promise is found as well, with the exception that applies: a process that stood
still (its own lines have a gap, in which the other body started), a lock server that forgot more than it may, a worker
that was killed between the last line of a body and its record, a broker that lost what it had handed out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Line = Mapping[str, Any]

#: What a finding is about: two bodies at once; a body after the message's end; a fence that did not grow; an end that
#: changed; a message that is nowhere; one that waits; a key without a time to live, or a lock that nobody holds.
Broken = Literal["overlap", "again", "fence", "told twice", "lost", "stuck", "left"]
BROKEN: Sequence[Broken] = ("overlap", "again", "fence", "told twice", "lost", "stuck", "left")

#: Shares of the ttl: a body that writes nothing for so long stands still; and for which one that goes on after that may
#: write before it is stopped.
STANDS_STILL, GOES_ON = 0.2, 0.5

#: Shares of the ttl after which whoever lost a lock that the server forgot is stopped at the latest: a renewal, and a
#: child that has to be killed.
FORGOTTEN = 1.0


#: As what Celery fails a next step, or the body of a chord, that it could not send, as far as it knows: the broker had
#: it, and was cut off before it said so. No task of the storm fails like this.
UNSENT = ("ChordError", "ConnectionError", "OperationalError", "TimeoutError")


@dataclass
class Attempt:
    """A body that ran."""

    run: str
    key: str
    message: str
    pid: int
    host: str
    fence: int
    limit: int
    #: Whether its end is that of its message: not, where it retries.
    is_last: bool
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


@dataclass(frozen=True)
class Fault:
    kind: str
    begin: float
    end: float
    pids: frozenset[int]
    #: The lock server that has forgotten something by it; empty for none.
    forgot: str
    #: Whether lock servers did not answer meanwhile.
    silent: bool


@dataclass(frozen=True)
class Finding:
    broken: Broken
    subject: str
    at: float
    text: str
    #: Which exception of the guarantees this is; empty for none.
    excuse: str = ""


@dataclass
class Verdict:
    findings: list[Finding] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    #: Seconds from the end of a fault to the next body of a key that had been running, by kind.
    recovery: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    messages: int = 0
    bodies: int = 0
    #: Messages that the broker lost between its list and its note of what it handed out.
    lost_by_broker: int = 0

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.excuse]

    def of(self, kind: str, broken: Broken, ttl: float) -> int:
        """What was found, without an excuse, within two leases of such a fault."""
        windows = [(fault.begin, fault.end + 2 * ttl) for fault in self.faults if fault.kind == kind]
        return sum(
            finding.broken == broken and any(begin <= finding.at <= end for begin, end in windows)
            for finding in self.broken
        )


class _History:
    """Lines, sorted out."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.attempts: dict[str, Attempt] = {}
        self.told: dict[str, list[Line]] = defaultdict(list)
        self.sent: dict[str, Line] = {}
        self.unsure: set[str] = set()
        #: By message and attempt: what was last heard of it from the broker.
        self.broker: dict[tuple[str, int], str] = {}
        self.faults: list[Fault] = []
        self.left: list[Line] = []
        for line in sorted(lines, key=lambda line: line["at"]):
            getattr(self, f"_{line['event']}")(line)

    def _start(self, line: Line) -> None:
        self.attempts[line["run"]] = Attempt(
            *(line["run"], line["key"], line["message"], line["pid"], line["host"]),
            fence=line.get("fence", 0),
            limit=line.get("limit", 1),
            is_last=line.get("last", True),
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

    def _sent(self, line: Line) -> None:
        self.sent[line["message"]] = line
        if not line.get("after"):
            self.broker.setdefault((line["message"], 0), "queued")

    def _unsure(self, line: Line) -> None:
        self.unsure.add(line["message"])

    def _queued(self, line: Line) -> None:
        self.broker[line["message"], line.get("retries", 0)] = "queued"

    def _taken(self, line: Line) -> None:
        self.broker[line["message"], line.get("retries", 0)] = "taken"

    def _left(self, line: Line) -> None:
        self.left.append(line)

    def _fault(self, line: Line) -> None:
        pids = frozenset(line.get("pids", ()))
        self.faults.append(
            Fault(line["kind"], line["begin"], line["at"], pids, line.get("forgot", ""), line.get("silent", False))
        )

    def by_key(self) -> Iterator[list[Attempt]]:
        """The attempts of each key, in the order of their starts."""
        keys: dict[tuple[str, int], list[Attempt]] = defaultdict(list)
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.start):
            keys[attempt.key, attempt.limit].append(attempt)
        yield from keys.values()

    def silent(self, begin: float, end: float) -> bool:
        """Whether a lock server did not answer at some time between."""
        return any(one.silent and one.end >= begin and one.begin <= end for one in self.faults)

    def forgot(self, begin: float, end: float, at_least: int) -> bool:
        """Whether so many lock servers have forgotten something in that time."""
        return len({one.forgot for one in self.faults if one.forgot and one.end >= begin and one.begin <= end}) >= (
            at_least
        )


class Checker:
    """Judges the history of workers whose locks have this ttl, in seconds.

    Args:
        ttl: of all locks.
        quorum: of the lock servers; 1 where there is one.
    """

    def __init__(self, ttl: float, *, quorum: int = 1) -> None:
        self._ttl = ttl
        self._quorum = quorum

    def judge(self, lines: Iterable[Line], *, is_over: bool = True) -> Verdict:
        """What is found; of a storm that is not over, but for what has no end yet."""
        history = _History(lines)
        verdict = Verdict(faults=history.faults, messages=len(history.sent), bodies=len(history.attempts))
        for attempts in history.by_key():
            verdict.findings += self._overlaps(attempts, history)
            verdict.findings += self._fences(attempts)
        verdict.findings += self._again(history)
        verdict.findings += self._ticks(history)
        verdict.findings += self._told_twice(history)
        if is_over:
            self._missing(history, verdict)
        for line in history.left:
            broken: Broken = "stuck" if line["what"] == "message" else "left"
            verdict.findings.append(Finding(broken, line["name"], line["at"], f"{line['what']} {line['text']}"))
        self._recovery(history, verdict)
        return verdict

    def _overlaps(self, attempts: Sequence[Attempt], history: _History) -> Iterator[Finding]:
        running: list[Attempt] = []
        for second in attempts:
            running = [first for first in running if first.end > second.start]
            excuses = {first.run: self._excuse_of_overlap(first, second, history) for first in running}
            sure = [first for first in running if not excuses[first.run]]
            if len(running) >= second.limit:
                first = (sure or running)[0]
                text = f"{_name(second)} started {first.end - second.start:.2f} s before the end of {_name(first)}"
                # Of those that have an excuse each may be one too many.
                excuse = "" if len(sure) >= second.limit else excuses[first.run]
                yield Finding("overlap", second.key, second.start, text, excuse)
            running.append(second)

    def _excuse_of_overlap(self, first: Attempt, second: Attempt, history: _History) -> str:
        # One that was in a lease when it stopped asks as soon as it goes on: what started later is not excused by that.
        before, after = first.gap_at(second.start)
        earlier, _ = first.gap_at(before)
        for begin, end in ((before, after), (earlier, before)):
            stood_still = end - begin >= STANDS_STILL * self._ttl
            stopped_soon = first.end <= end + GOES_ON * self._ttl
            if stood_still and stopped_soon and begin <= second.start:
                return "stood still"
        end = first.start + FORGOTTEN * self._ttl
        forgotten = [one for one in history.faults if one.forgot and first.start <= one.end and one.begin <= first.end]
        if forgotten and history.forgot(first.start - self._ttl, second.start, self._quorum):
            end = max(one.end for one in forgotten) + FORGOTTEN * self._ttl
            return "lock server forgot" if first.end <= end else ""
        return ""

    def _fences(self, attempts: Sequence[Attempt]) -> Iterator[Finding]:
        # Of a semaphore, and of bodies that overlap, the first to be granted is not the first to write its line.
        highest: Attempt | None = None
        for attempt in attempts:
            if not attempt.fence or attempt.limit > 1:
                continue
            if highest and attempt.fence <= highest.fence and attempt.start >= highest.end:
                text = f"{_name(attempt)} has fence {attempt.fence}, {_name(highest)} before it {highest.fence}"
                yield Finding("fence", attempt.key, attempt.start, text)
            if highest is None or attempt.fence > highest.fence:
                highest = attempt

    def _again(self, history: _History) -> Iterator[Finding]:
        """Bodies that ran after the success of their message, or after another end of it."""
        messages: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in history.attempts.values():
            messages[attempt.message].append(attempt)
        for message, attempts in messages.items():
            attempts.sort(key=lambda attempt: attempt.start)
            done = [attempt for attempt in attempts if attempt.how == "done" and attempt.is_last]
            told = history.told.get(message, [])
            for second in attempts:
                first = next((first for first in done if first is not second and first.end <= second.start), None)
                if first:
                    text = f"{_name(second)} started {second.start - first.end:.2f} s after the success {_name(first)}"
                    excuse = self._excuse_of_again(first, second, history)
                    yield Finding("again", message, second.start, text, excuse)
                elif earlier := next((line for line in told if line["at"] < second.start), None):
                    text = f"{_name(second)} started {second.start - earlier['at']:.2f} s after {_end_of(earlier)}"
                    excuse = self._excuse_of_stopped(earlier, second.start, history)
                    yield Finding("again", message, second.start, text, excuse)

    def _excuse_of_again(self, first: Attempt, second: Attempt, history: _History) -> str:
        told = [line for line in history.told.get(first.message, ()) if first.end <= line["at"] < second.start]
        died = [one for one in history.faults if first.pid in one.pids and first.end <= one.end < second.start]
        if died and not told:
            return "killed before it was recorded"
        # Until it answers, only that process knows: the record is gone with it, though the result was stored.
        if (died or not told) and history.silent(first.end, second.start):
            return "done while the lock server was silent"
        if history.forgot(first.end - self._ttl, second.start, self._quorum):
            return "lock server forgot"
        return ""

    def _excuse_of_stopped(self, end: Line, at: float, history: _History) -> str:
        """Why a message could go on after this end."""
        if end.get("error") == "LockLost":
            return "stopped while the lock server was silent"
        if end.get("error") == "Reject":
            return "rejected, of which there is no record"
        if end.get("error") in UNSENT:
            return "sent, but not as far as Celery knows"
        if history.forgot(end["at"] - self._ttl, at, self._quorum):
            return "lock server forgot"
        return ""

    def _ticks(self, history: _History) -> Iterator[Finding]:
        """Ticks of beat's that two messages were sent for."""
        ticks: dict[tuple[str, str], Attempt] = {}
        for attempt in history.attempts.values():
            if attempt.due is None or attempt.how != "done":
                continue
            first = ticks.setdefault((attempt.key, attempt.due), attempt)
            if first.message != attempt.message:
                text = f"{_name(attempt)} for the tick of {attempt.due}, which {_name(first)} was for"
                excuse = "lock server forgot" if history.forgot(first.start, attempt.start, self._quorum) else ""
                yield Finding("again", attempt.key, attempt.start, text, excuse)

    def _told_twice(self, history: _History) -> Iterator[Finding]:
        for message, lines in history.told.items():
            other = next((line for line in lines if line["state"] != lines[0]["state"]), None)
            if other:
                # Celery keeps a success where one that was stopped tells that later.
                end = other if other.get("error") == "LockLost" else lines[0]
                excuse = self._excuse_of_stopped(end, other["at"], history)
                text = f"told {_end_of(lines[0])}, and {other['at'] - lines[0]['at']:.2f} s later {_end_of(other)}"
                yield Finding("told twice", message, other["at"], text, excuse)

    def _missing(self, history: _History, verdict: Verdict) -> None:
        """Messages that have no end: those that followed on a failure are not expected to."""
        waiting = {line["name"] for line in history.left if line["what"] == "message"}
        lost: set[str] = set()
        for message, line in history.sent.items():
            before = line.get("after", [])
            if message in history.told or message in history.unsure or message in waiting:
                continue
            if any(not _goes_on(history, one) or one in lost for one in before):
                continue
            lost.add(message)
            latest = max((place for place in history.broker if place[0] == message), default=None)
            if latest and history.broker[latest] == "queued":
                verdict.lost_by_broker += 1
                continue
            text = f"{line.get('task')} of {line.get('key')} has no end"
            verdict.findings.append(Finding("lost", message, line["at"], text))

    def _recovery(self, history: _History, verdict: Verdict) -> None:
        keys = [attempts for attempts in history.by_key() if len(attempts) > 1]
        starts = [[attempt.start for attempt in attempts] for attempts in keys]
        for fault in history.faults:
            for attempts, begun in zip(keys, starts, strict=True):
                # Nobody before the last ones can have been running any more.
                before = bisect_left(begun, fault.begin)
                if any(_was_hit(one, fault) for one in attempts[max(before - 8, 0) : before]):
                    place = bisect_left(begun, fault.end)
                    if place < len(begun):
                        verdict.recovery[fault.kind].append(begun[place] - fault.end)


def _was_hit(attempt: Attempt, fault: Fault) -> bool:
    """Whether it ran as the fault began: in a process that is concerned, or anywhere if all are."""
    # The last line of one that was killed lies a beat before.
    return attempt.start <= fault.begin <= attempt.end + 0.2 and (not fault.pids or attempt.pid in fault.pids)


def _goes_on(history: _History, message: str) -> bool:
    """Whether what follows on this message is to have an end."""
    return any(line["state"] in ("SUCCESS", "REVOKED") for line in history.told.get(message, ()))


def _name(attempt: Attempt) -> str:
    return f"{attempt.message[:8]} (pid {attempt.pid} on {attempt.host})"


def _end_of(line: Line) -> str:
    error = line.get("error")
    return f"{line['state']} ({error})" if line["state"] != "SUCCESS" and error else line["state"]
