"""Judges a history: what overlapped, was lost, was reported twice or left behind, and how long recovery took.

A body runs from its first line to its last. So each finding is certain, however busy the machine was; what happens
between the last line of a killed body and its death is not seen.

Exceptions of `docs/guarantees.md` are found as well, with the excuse that applies (`excuses.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tests.storm import borrowed, newest, waiting
from tests.storm.excuses import LOST_BY_BROKER, Excuses
from tests.storm.story import Attempt, Fault, Line, Story

#: What a finding is about: two bodies at once; a body after the message's end; a fence that did not grow; an end that
#: changed; a message that exists nowhere; a message that still waits; a key without a time to live, or a lock without
#: a holder; two waiting messages of one job; a success of a run that the message may not end as; a run or an end that a
#: newer message should have prevented.
Broken = Literal[
    "overlap", "again", "fence", "told twice", "lost", "stuck", "left", "sent twice", "wrong end", "not the newest"
]
BROKEN: Sequence[Broken] = get_args(Broken)

#: Share of the ttl after which clients hear a server that answers again.
HEARD = 0.25


@dataclass(frozen=True)
class Finding:
    broken: Broken
    subject: str
    at: float
    text: str
    #: The exception of the guarantees that applies; empty for none.
    excuse: str = ""


@dataclass
class Verdict:
    findings: list[Finding] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    #: Seconds from the end of a fault to the next body of a key that was running, by kind of fault.
    recovery: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    messages: int = 0
    bodies: int = 0
    #: Messages whose sender got an error.
    unsure: int = 0
    #: How often a job that is locked when sent was sent, and how often it was a duplicate.
    clicks: int = 0
    duplicates: int = 0
    #: From the first fault to the last one.
    seconds: float = 0.0

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.excuse]

    def of(self, kind: str, broken: Broken, ttl: float) -> int:
        """How many findings without an excuse came within two leases of such a fault."""
        windows = [(fault.begin, fault.end + 2 * ttl) for fault in self.faults if fault.kind == kind]
        return sum(
            finding.broken == broken and any(begin <= finding.at <= end for begin, end in windows)
            for finding in self.broken
        )


class Checker:
    """Judges the history of workers whose locks have this ttl, in seconds.

    Args:
        ttl: of all locks.
        quorum: of the lock servers; 1 if there is one.
        servers: number of lock servers.
    """

    def __init__(self, ttl: float, *, quorum: int = 1, servers: int = 1) -> None:
        self._ttl = ttl
        self._quorum, self._servers = quorum, servers

    def judge(self, lines: Iterable[Line], *, is_over: bool = True) -> Verdict:
        """The verdict; for a storm that is not over, it leaves out messages without an end."""
        story = Story(lines, quorum=self._quorum, servers=self._servers, pause=HEARD * self._ttl)
        excuses = Excuses(story, self._ttl)
        verdict = Verdict(faults=story.faults, messages=len(story.sent), bodies=len(story.attempts))
        verdict.unsure = len(story.unsure)
        if story.faults:
            verdict.seconds = max(one.end for one in story.faults) - min(one.begin for one in story.faults)
        for attempts in story.by_key():
            verdict.findings += _overlaps(attempts, excuses)
            verdict.findings += _fences(attempts)
        verdict.findings += _again(story, excuses)
        verdict.findings += _ticks(story, excuses)
        verdict.findings += _told_twice(story, excuses)
        for job, at, text, excuse in waiting.sent_twice(story):
            verdict.findings.append(Finding("sent twice", job, at, text, excuse))
        for message, at, text in waiting.answers(story):
            verdict.findings.append(Finding("left", message, at, text))
        for message, at, text, excuse in borrowed.wrong_ends(story):
            verdict.findings.append(Finding("wrong end", message, at, text, excuse))
        for message, at, text, excuse in newest.broken(story, self._ttl):
            verdict.findings.append(Finding("not the newest", message, at, text, excuse))
        verdict.clicks, verdict.duplicates = len(story.clicked), len(story.duplicates)
        if is_over:
            verdict.findings += _missing(story, excuses)
        for line in story.left:
            broken: Broken = "stuck" if line["what"] == "message" else "left"
            verdict.findings.append(Finding(broken, line["name"], line["at"], f"{line['what']} {line['text']}"))
        _recover(story, verdict)
        return verdict


def _overlaps(attempts: Sequence[Attempt], excuses: Excuses) -> Iterator[Finding]:
    running: list[Attempt] = []
    for second in attempts:
        running = [first for first in running if first.end > second.start]
        if len(running) >= second.limit:
            found = {first.run: excuses.of_overlap(first, second) for first in running}
            sure = [first for first in running if not found[first.run]]
            first = (sure or running)[0]
            text = f"{_name(second)} started {first.end - second.start:.2f} s before the end of {_name(first)}"
            # Each body with an excuse may be the surplus one.
            excuse = "" if len(sure) >= second.limit else next(filter(None, found.values()))
            yield Finding("overlap", second.key, second.start, text, excuse)
        running.append(second)


def _fences(attempts: Sequence[Attempt]) -> Iterator[Finding]:
    # In a semaphore, and among overlapping bodies, the first holder need not be the first to write its line.
    highest: Attempt | None = None
    for attempt in attempts:
        if not attempt.fence or attempt.limit > 1:
            continue
        if highest and attempt.fence <= highest.fence and attempt.start >= highest.end:
            text = f"{_name(attempt)} has fence {attempt.fence}, {_name(highest)} before it {highest.fence}"
            yield Finding("fence", attempt.key, attempt.start, text)
        if highest is None or attempt.fence > highest.fence:
            highest = attempt


def _again(story: Story, excuses: Excuses) -> Iterator[Finding]:
    """Bodies that ran after the success, or another end, of their message."""
    messages: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in sorted(story.attempts.values(), key=lambda attempt: attempt.start):
        messages[attempt.message].append(attempt)
    for message, attempts in messages.items():
        done = [attempt for attempt in attempts if attempt.how == "done" and attempt.is_last]
        told = story.told.get(message, [])
        for second in attempts:
            first = next((first for first in done if first is not second and first.end <= second.start), None)
            if first:
                text = f"{_name(second)} started {second.start - first.end:.2f} s after the success {_name(first)}"
                yield Finding("again", message, second.start, text, excuses.of_second_run(first, second))
            elif earlier := next((line for line in told if line["at"] < second.start), None):
                text = f"{_name(second)} started {second.start - earlier['at']:.2f} s after {_end_of(earlier)}"
                yield Finding("again", message, second.start, text, excuses.of_end(earlier, second.start))


def _ticks(story: Story, excuses: Excuses) -> Iterator[Finding]:
    """Ticks of beat for which two messages were sent."""
    ticks: dict[tuple[str, str], Attempt] = {}
    for attempt in story.attempts.values():
        if attempt.due is None or attempt.how != "done":
            continue
        first = ticks.setdefault((attempt.key, attempt.due), attempt)
        if first.message != attempt.message:
            text = f"{_name(attempt)} for the tick of {attempt.due}, which {_name(first)} was for"
            yield Finding("again", attempt.key, attempt.start, text, excuses.of_tick(first, attempt))


def _told_twice(story: Story, excuses: Excuses) -> Iterator[Finding]:
    for message, lines in story.told.items():
        other = next((line for line in lines if line["state"] != lines[0]["state"]), None)
        if other:
            text = f"told {_end_of(lines[0])}, and {other['at'] - lines[0]['at']:.2f} s later {_end_of(other)}"
            yield Finding("told twice", message, other["at"], text, excuses.of_ends(lines[0], other))


def _missing(story: Story, excuses: Excuses) -> Iterator[Finding]:
    """Messages without an end; messages after a failed one are not expected to have one."""
    stuck = {line["name"] for line in story.left if line["what"] == "message"}
    lost: set[str] = set()
    for message, line in story.sent.items():
        if message in story.told or message in story.unsure or message in stuck:
            continue
        before = line.get("after", ())
        if any(not _goes_on(story, one) or one in lost for one in before):
            continue
        lost.add(message)
        latest = max((place for place in story.broker if place[0] == message), default=None)
        by_broker = latest is not None and story.broker[latest] == "queued"
        text = f"{line.get('task')} of {line.get('key')} has no end"
        yield Finding("lost", message, line["at"], text, LOST_BY_BROKER if by_broker else excuses.of_missing(before))


def _recover(story: Story, verdict: Verdict) -> None:
    keys = [attempts for attempts in story.by_key() if len(attempts) > 1]
    starts = [[attempt.start for attempt in attempts] for attempts in keys]
    for fault in story.faults:
        for attempts, begun in zip(keys, starts, strict=True):
            # Only the last few bodies can still have been running.
            before = bisect_left(begun, fault.begin)
            if any(_was_hit(one, fault) for one in attempts[max(before - 8, 0) : before]):
                place = bisect_left(begun, fault.end)
                if place < len(begun):
                    verdict.recovery[fault.kind].append(begun[place] - fault.end)


def _was_hit(attempt: Attempt, fault: Fault) -> bool:
    """Whether it ran when the fault began, in a process that the fault struck, or anywhere if it struck all."""
    # The last line of a killed body comes up to one beat earlier.
    return attempt.start <= fault.begin <= attempt.end + 0.2 and (not fault.pids or attempt.pid in fault.pids)


def _goes_on(story: Story, message: str) -> bool:
    """Whether the messages after this one must have an end."""
    return any(line["state"] in ("SUCCESS", "REVOKED") for line in story.told.get(message, ()))


def _name(attempt: Attempt) -> str:
    return f"{attempt.message[:8]} (pid {attempt.pid} on {attempt.host})"


def _end_of(line: Line) -> str:
    error = line.get("error")
    return f"{line['state']} ({error})" if line["state"] != "SUCCESS" and error else line["state"]
