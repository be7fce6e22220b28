"""Judges the history of a storm: what overlapped, ran again, had two ends, was sent twice, lost, or left behind.

Nothing strikes that the guarantees exclude, so nearly every finding is a fault. Two are not: an end while the only lock
server was silent may not have been recorded, and kombu loses what it has taken off a list as it is killed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from celery_singleton_lock.options.rules import SCOPES, WHILE_EXECUTING

Line = Mapping[str, Any]

#: Faults for which a lock server does not answer.
SILENT = ("lock server", "partition", "network")


class Finding(NamedTuple):
    broken: str
    text: str


@dataclass
class Body:
    """A body that ran, from its first line to its last: it may have run on until it was killed."""

    line: Line
    end: float
    is_done: bool = False

    @property
    def start(self) -> float:
        return self.line["at"]

    def __str__(self) -> str:
        return f"{self.line['message'][:8]} of {self.line['key']} on {self.line['host']}, from {self.start:.2f}"


@dataclass
class Call:
    """A message that was sent, or nearly: `outcome` is sent, duplicate, unsure, or empty if its sender was killed."""

    line: Line
    outcome: str = ""
    #: When the sender knew the outcome, and when a worker first had the message.
    known: float = float("inf")
    taken: float = float("inf")
    #: The last news of it from the broker.
    place: str = ""


@dataclass
class Story:
    """The lines of a history, sorted out."""

    bodies: dict[str, Body] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    ends: dict[str, list[Line]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Line] = field(default_factory=list)
    left: list[Line] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Story:
        made = cls()
        for line in sorted(lines, key=lambda one: one["at"]):
            getattr(made, f"_{line['event']}")(line)
        return made

    def pending(self) -> set[str]:
        """Messages that were sent and have no end."""
        return {name for name, call in self.calls.items() if call.outcome == "sent" and name not in self.ends}

    def was_silent(self, at: float, after: float) -> bool:
        return any(one["kind"].startswith(SILENT) and one["begin"] <= at <= one["at"] + after for one in self.faults)

    def _start(self, line: Line) -> None:
        self.bodies[line["run"]] = Body(line, line["at"])

    def _beat(self, line: Line) -> None:
        if body := self.bodies.get(line["run"]):
            body.end = line["at"]

    def _end(self, line: Line) -> None:
        self._beat(line)
        if body := self.bodies.get(line["run"]):
            body.is_done = line["how"] == "done"

    def _sending(self, line: Line) -> None:
        self.calls[line["message"]] = Call(line)

    def _sent(self, line: Line) -> None:
        call = self.calls[line["message"]]
        call.outcome, call.known = line["event"], line["at"]

    _duplicate = _unsure = _sent

    def _queued(self, line: Line) -> None:
        if call := self.calls.get(line["message"]):
            call.place = line["event"]

    def _taken(self, line: Line) -> None:
        self._queued(line)
        if call := self.calls.get(line["message"]):
            call.taken = min(call.taken, line["at"])

    def _told(self, line: Line) -> None:
        self.ends[line["message"]].append(line)

    def _fault(self, line: Line) -> None:
        self.faults.append(line)

    def _left(self, line: Line) -> None:
        self.left.append(line)


def judge(
    lines: Iterable[Line], *, ttl: float, queue_ttl: float, servers: int = 1, is_over: bool = True
) -> list[Finding]:
    """What is wrong. A storm that is not over is not asked for messages without an end.

    Args:
        lines: of all processes, in any order.
        ttl: seconds of a lock.
        queue_ttl: the same of a message's.
        servers: number of lock servers: of several, a majority always answers.
        is_over: whether all was calm at the end.
    """
    story = Story.of(lines)
    #: Seconds after a silence in which an end may still be unrecorded.
    later = ttl if servers == 1 else float("-inf")
    found = [*_overlaps(story), *_ends(story, later), *_ticks(story), *_sent_twice(story, queue_ttl)]
    if is_over:
        found += [
            Finding("lost", f"{story.calls[one].line} has no end") for one in story.pending() if _is_lost(story, one)
        ]
    return found + [Finding("left", line["text"]) for line in story.left]


def _overlaps(story: Story) -> Iterator[Finding]:
    """Too many bodies of a key at once; and fences that do not grow from one to the next."""
    keys: dict[str, list[Body]] = defaultdict(list)
    for body in sorted(story.bodies.values(), key=lambda one: one.start):
        keys[body.line["key"]].append(body)
    for bodies in keys.values():
        running: list[Body] = []
        for body in bodies:
            running = [one for one in running if one.end > body.start]
            if len(running) >= body.line["limit"]:
                yield Finding("overlap", f"{body}; {running[0]} until {running[0].end:.2f}")
            running.append(body)
        for first, second in pairwise(bodies):
            if first.end <= second.start and first.line["fence"] >= second.line["fence"] and first.line["limit"] == 1:
                yield Finding("fence", f"{second} has {second.line['fence']}; {first} has {first.line['fence']}")


def _ends(story: Story, later: float) -> Iterator[Finding]:
    """Messages with two ends, that ran on after their end, or that ended as one that has not run."""
    done = {body.line["message"] for body in story.bodies.values() if body.is_done}
    for message, ends in story.ends.items():
        if any(story.was_silent(one["at"], later) for one in ends):
            continue
        if len({one["state"] for one in ends}) > 1:
            yield Finding("two ends", f"{message[:8]}: {ends}")
        yield from (
            Finding("wrong end", f"{one}, which has not run") for one in ends if one["of"] and one["of"] not in done
        )
        for body in story.bodies.values():
            if body.line["message"] == message and body.start > ends[0]["at"]:
                yield Finding("again", f"{body}; it had ended at {ends[0]['at']:.2f}")


def _ticks(story: Story) -> Iterator[Finding]:
    ticks: dict[str, str] = {}
    for body in story.bodies.values():
        due = body.line["due"]
        if due and ticks.setdefault(due, body.line["message"]) != body.line["message"]:
            yield Finding("tick twice", f"{body}: the tick of {due}")


def _sent_twice(story: Story, queue_ttl: float) -> Iterator[Finding]:
    """Messages of one job that both surely had its lock: from the send until a worker has the message."""
    jobs: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in story.calls.values():
        if call.outcome == "sent" and call.line["task"] in SCOPES and call.line["task"] != WHILE_EXECUTING:
            jobs[call.line["task"], call.line["key"]].append(call)
    for calls in jobs.values():
        held = sorted((one.known, min(one.taken, one.line["at"] + queue_ttl), one.line["message"]) for one in calls)
        for (_, until, one), (begin, end, other) in pairwise(span for span in held if span[0] < span[1]):
            if begin < min(until, end):
                yield Finding("sent twice", f"{other} at {begin:.3f}; {one} until {until:.3f}")


def _is_lost(story: Story, message: str) -> bool:
    """Whether a message without an end is lost, and not by kombu: for that, it is still in a queue."""
    return story.calls[message].place != "queued"


def summary(lines: Sequence[Line], found: Sequence[Finding]) -> str:
    story = Story.of(lines)
    kinds: dict[str, int] = defaultdict(int)
    for fault in story.faults:
        kinds[fault["kind"]] += 1
    counts = f"{len(story.faults)} faults, {len(story.calls)} calls, {len(story.bodies)} bodies, {len(found)} findings"
    return "\n".join([counts, *(f"- {kind}: {times}" for kind, times in sorted(kinds.items())), *map(str, found)])
