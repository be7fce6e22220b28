"""Judges a flood by its history: what was sent, refused and run, and whether that is exactly what the scope allows.

All lines are from one clock, and each is written either before or after the event that it reports. So the interval in
which a lock was surely held lies within the real one, and the interval in which it may have been held contains it. Two
sure holders of one lock at once are one too many; a call refused while nobody can have held the lock is one too few.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from celery_singleton_lock.options.rules import (
    UNTIL_AND_WHILE_EXECUTING,
    UNTIL_EXECUTED,
    UNTIL_EXPIRED,
    WHILE_EXECUTING,
)
from tests.storm.flood.rules import Rules

#: What is wrong: two messages of a job that have its lock, or two runs; a message that ran again after its end, that
#: was refused though nobody had the lock, or that exists nowhere; a job that could not be sent and run in time; a queue
#: that is longer or shorter than what was sent.
Broken = Literal["sent twice", "overlap", "again", "refused", "lost", "stuck", "queue"]

#: Seconds by which the lock server's clock may deviate from ours during the time of one lock.
CLOCKS = 0.1

#: Seconds until a confirmation, or a release after a kill, has reached the lock server.
LATER = 1.0

#: Scopes with which a job runs once at a time.
RUN_ALONE = (WHILE_EXECUTING, UNTIL_EXECUTED, UNTIL_AND_WHILE_EXECUTING)

Line = Mapping[str, Any]


@dataclass
class Delivery:
    """A copy of a message that a worker's process carries out.

    Attributes:
        killed: when its process was killed, if it had not ended before.
    """

    begun: float
    group: int
    pid: int
    start: float | None = None
    end: float | None = None
    refused: float | None = None
    over: float | None = None
    killed: float | None = None

    @property
    def last(self) -> float:
        return max(at for at in (self.begun, self.start, self.end, self.over, self.killed) if at is not None)

    def ran_until(self) -> float:
        """When its body ended, or was killed."""
        return self.end if self.end is not None else self.killed if self.killed is not None else math.inf


@dataclass
class Message:
    """A call: sent, or refused when it was to be sent.

    Attributes:
        told: when its sender knew the outcome; None if it was killed before.
        outcome: `sent`, `duplicate` or `unsure`.
        of: the message of which it is a duplicate.
        broker: when it was put into the queue ("queued"), and when a worker had it ("taken").
        is_revoked: whether its result says that it was refused.
    """

    name: str
    scope: str
    job: str
    sending: float
    pid: int
    told: float | None = None
    outcome: str = ""
    of: str = ""
    broker: list[tuple[float, str]] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    is_revoked: bool = False

    @property
    def is_sent(self) -> bool:
        return self.outcome == "sent" or bool(self.broker or self.deliveries)

    @property
    def has_run(self) -> bool:
        return any(one.end is not None for one in self.deliveries)

    @property
    def is_over(self) -> bool:
        return self.has_run or any(one.refused is not None for one in self.deliveries)

    @property
    def last(self) -> float:
        """The time of the last sign of it."""
        times = [self.sending, self.told or 0.0, *(at for at, _ in self.broker)]
        return max([*times, *(one.last for one in self.deliveries)])


@dataclass(frozen=True)
class Finding:
    broken: Broken
    scope: str
    text: str
    excuse: str = ""


@dataclass
class Counts:
    """Counts of one scope.

    Attributes:
        queued: messages in the queue before the first worker started, as the broker counted them; None if not asked.
        freed: the longest time after the last kill until a job could be sent and run; None if not tried.
        killed: numbers of killed senders, workers and children.
    """

    sends: int = 0
    sent: int = 0
    duplicates: int = 0
    unsure: int = 0
    runs: int = 0
    refused: int = 0
    queued: int | None = None
    freed: float | None = None
    killed: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Verdict:
    counts: dict[str, Counts]
    findings: list[Finding]

    @property
    def broken(self) -> list[Finding]:
        return [one for one in self.findings if not one.excuse]

    def number_of(self, scope: str, broken: Broken, *, excused: bool = False) -> int:
        return sum((one.scope, one.broken, bool(one.excuse)) == (scope, broken, excused) for one in self.findings)


class Judge:
    """Reads a history, line by line.

    Args:
        rules: of the flood.
        bound: seconds after which a job can be sent and run again, whatever was killed.
    """

    def __init__(self, rules: Rules, bound: float) -> None:
        self._rules, self._bound = rules, bound
        self.messages: dict[str, Message] = {}
        self._open: dict[int, tuple[str, Delivery]] = {}
        self._kills: list[Line] = []
        self._queues: list[Line] = []
        self._free: dict[tuple[str, str], float] = {}
        self._calm: float | None = None

    def read(self, lines: Iterable[Line]) -> None:
        for line in lines:
            getattr(self, f"_{line['event']}")(line)

    def verdict(self) -> Verdict:
        for message in self.messages.values():
            for one in message.deliveries:
                one.killed = self._end_of(one)
            self._note_unsaid_refusal(message)
        findings = [
            *self._sent_twice(),
            *self._overlaps(),
            *self._again(),
            *self._refusals(),
            *self._losses(),
            *self._stuck(),
            *self._wrong_queues(),
        ]
        return Verdict(self._counts(), findings)

    # Lines.

    def _sending(self, line: Line) -> None:
        name = line["message"]
        self.messages[name] = Message(name, line["scope"], line["job"], line["at"], line["pid"])

    def _sent(self, line: Line) -> None:
        message = self.messages[line["message"]]
        message.told, message.outcome, message.of = line["at"], line["event"], line.get("of", "")

    _duplicate = _unsure = _sent

    def _queued(self, line: Line) -> None:
        self.messages[line["message"]].broker.append((line["at"], line["event"]))

    _taken = _queued

    def _begun(self, line: Line) -> None:
        delivery = Delivery(line["at"], line["group"], line["pid"])
        self.messages[line["message"]].deliveries.append(delivery)
        self._open[line["pid"]] = line["message"], delivery

    def _step(self, line: Line) -> None:
        name, delivery = self._open[line["pid"]]
        if name == line["message"]:
            setattr(delivery, line["event"], line["at"])

    _start = _end = _refused = _over = _step

    def _revoked(self, line: Line) -> None:
        self.messages[line["message"]].is_revoked = True

    def _killed(self, line: Line) -> None:
        self._kills.append(line)

    def _length(self, line: Line) -> None:
        self._queues.append(line)

    def _calm_begins(self, line: Line) -> None:
        self._calm = line["at"]

    def _free_again(self, line: Line) -> None:
        self._free[line["scope"], line["job"]] = line["at"]

    # Conclusions from them.

    def _end_of(self, delivery: Delivery) -> float | None:
        """When the process of a delivery without an end was killed: between `since` and `at`, and after what it did."""
        if delivery.over is not None:
            return None
        kills = (kill for kill in self._kills if kill["at"] >= delivery.begun and self._is_its(kill, delivery))
        first = min(kills, key=lambda kill: kill["at"], default=None)
        return None if first is None else max(first["since"], delivery.last)

    @staticmethod
    def _note_unsaid_refusal(message: Message) -> None:
        """A refusal is stored before a signal reports it: a process killed in between leaves only the result."""
        if message.is_revoked and not message.is_over:
            for one in message.deliveries:
                if one.killed is not None and one.start is None:
                    one.refused = one.killed
                    return

    @staticmethod
    def _is_its(kill: Line, delivery: Delivery) -> bool:
        return kill["what"] != "sender" and kill["id"] in (delivery.group, delivery.pid)

    def _lasts(self, message: Message) -> float:
        """Seconds of its lock if nobody frees it, from when it is taken or confirmed."""
        seconds = self._rules.seconds_of(message.scope)
        return math.inf if seconds is None else seconds

    def _surely_held(self, message: Message) -> tuple[float, float]:
        """The time in which it surely has the lock of its job; the end is before the begin if that is not known."""
        known = [message.told] if message.outcome == "sent" and message.told is not None else []
        begin = min([*known, *(one.begun for one in message.deliveries)], default=math.inf)
        if message.outcome == "unsure" or not message.is_sent:
            return begin, -math.inf
        end = min((self._may_free(message, one) for one in message.deliveries), default=math.inf)
        return begin, min(end, message.sending + self._lasts(message) - CLOCKS)

    def _may_free(self, message: Message, one: Delivery) -> float:
        """The first moment at which a delivery may have freed its message's lock."""
        if message.scope == UNTIL_EXPIRED:
            return math.inf
        if one.refused is not None:
            return one.begun
        if message.scope == UNTIL_EXECUTED:
            dies = math.inf if self._rules.is_late else one.killed
            return min(one.ran_until() if one.end is not None else math.inf, math.inf if dies is None else dies)
        return one.begun if one.start is not None or one.over is None else math.inf

    def _held_until(self, message: Message) -> float:
        """The last moment at which a message may have the lock."""
        if message.scope == UNTIL_EXPIRED:
            return (message.told or self._last_of(message) + LATER) + self._lasts(message) + CLOCKS
        has_freed = [at for one in message.deliveries if (at := self._has_freed(message, one)) is not None]
        if has_freed:
            return min(has_freed)
        return self._last_of(message) + self._lasts(message) + LATER

    def _last_of(self, message: Message) -> float:
        """When anybody may have acted on it last; its sender may have, until it was killed."""
        if message.told is not None:
            return message.last
        kills = [kill["at"] for kill in self._kills if kill["what"] == "sender" and kill["id"] == message.pid]
        return max([message.last, *kills])

    @staticmethod
    def _has_freed(message: Message, one: Delivery) -> float | None:
        if one.over is None:
            return None
        if message.scope == UNTIL_EXECUTED or one.start is None:
            return one.over if one.end is not None or one.refused is not None else None
        return one.start

    # What is wrong.

    def _sent_twice(self) -> Iterator[Finding]:
        for of_job in self._by_job().values():
            if of_job[0].scope == WHILE_EXECUTING:
                continue
            held = sorted((*self._surely_held(one), one.name) for one in of_job)
            until, name = -math.inf, ""
            for begin, end, other in held:
                if end <= begin:
                    continue
                if begin < until:
                    yield self._found("sent twice", other, f"had the lock at {begin:.3f}, as {name[:8]} did")
                until, name = max((until, name), (end, other))

    def _overlaps(self) -> Iterator[Finding]:
        for of_job in self._by_job().values():
            groups = [of_job] if of_job[0].scope in RUN_ALONE else [[one] for one in of_job]
            for group in groups:
                runs = sorted((d.start, d.ran_until(), m.name) for m in group for d in m.deliveries if d.start)
                until = -math.inf
                for start, end, name in runs:
                    if start < until:
                        yield self._found("overlap", name, f"began at {start:.3f}, as another one ran")
                    until = max(until, end)

    def _again(self) -> Iterator[Finding]:
        for message in self.messages.values():
            ended = [one for one in message.deliveries if one.end is not None]
            for first in ended[:1]:
                later = [one for one in message.deliveries if one.start is not None and one.start > (first.end or 0)]
                excuse = "killed between its last line and its record" if first.killed is not None else ""
                if later:
                    yield self._found("again", message.name, "ran again after its end", excuse)

    def _refusals(self) -> Iterator[Finding]:
        """Wrong refusals, at the send or before the run."""
        jobs = self._by_job()
        for message in self.messages.values():
            if message.outcome == "duplicate":
                first = self.messages.get(message.of)
                if first is None or (first.scope, first.job) != (message.scope, message.job):
                    yield self._found("refused", message.name, "is a duplicate of a message that nobody has sent")
                elif not (first.sending <= (message.told or 0) and message.sending <= self._held_until(first)):
                    yield self._found("refused", message.name, f"is a duplicate of {message.of[:8]}, which is over")
            for one in message.deliveries:
                if one.refused is not None and not self._had_reason(one, jobs[message.scope, message.job]):
                    yield self._found("refused", message.name, "was not run, though no other one ran")

    def _had_reason(self, refused: Delivery, of_job: Sequence[Message]) -> bool:
        """Whether another delivery may have had the lock of the run."""
        for message in of_job:
            for one in message.deliveries:
                if one is refused or one.refused is not None or (one.start is None and one.over is not None):
                    continue  # This delivery had no lock itself.
                until = one.over if one.over is not None else (one.killed or math.inf) + self._rules.ttl + LATER
                if one.begun <= (refused.refused or 0) and refused.begun <= until:
                    return True
        return False

    def _losses(self) -> Iterator[Finding]:
        for message in self.messages.values():
            if message.is_sent and not message.is_over and message.outcome != "unsure":
                yield self._found("lost", message.name, f"was sent at {message.sending:.3f}", self._loss(message))

    def _loss(self, message: Message) -> str:
        """Why, according to the guarantees, a message may be lost."""
        is_killed = [kill["at"] for kill in self._kills if kill["what"] != "sender" and kill["at"] >= message.sending]
        last = max(message.broker, default=(0.0, ""))[1]
        if is_killed and last != "taken":
            return "taken off the queue by a worker that was killed before it had noted that"
        if is_killed and not self._rules.is_late:
            return "acknowledged early, by a worker that was killed"
        return ""

    def _stuck(self) -> Iterator[Finding]:
        if self._calm is None:
            return
        for scope, job in self._by_job():
            freed = self._free.get((scope, job), math.inf) - self._calm
            if freed > self._bound:
                text = f"{job} could be sent and run after {freed:.1f} s, the bound is {self._bound:g} s"
                yield Finding("stuck", scope, text)

    def _wrong_queues(self) -> Iterator[Finding]:
        for line in self._queues:
            of_scope = [one for one in self.messages.values() if one.scope == line["scope"]]
            sent = sum(one.is_sent and one.sending < line["at"] for one in of_scope)
            if line["length"] != sent:
                yield Finding("queue", line["scope"], f"{line['length']} messages were in the queue, {sent} were sent")

    def _by_job(self) -> Mapping[tuple[str, str], list[Message]]:
        jobs: dict[tuple[str, str], list[Message]] = defaultdict(list)
        for message in self.messages.values():
            jobs[message.scope, message.job].append(message)
        return jobs

    def _found(self, broken: Broken, name: str, text: str, excuse: str = "") -> Finding:
        message = self.messages[name]
        return Finding(broken, message.scope, f"{name[:8]} of {message.job} {text}", excuse)

    def _counts(self) -> dict[str, Counts]:
        found: dict[str, Counts] = defaultdict(Counts)
        for message in self.messages.values():
            counts = found[message.scope]
            counts.sends += 1
            counts.sent += message.is_sent
            counts.duplicates += message.outcome == "duplicate"
            counts.unsure += not message.is_sent and message.outcome != "duplicate"
            counts.runs += message.has_run
            counts.refused += message.is_over and not message.has_run
        for line in self._queues:
            found[line["scope"]].queued = line["length"]
        for (scope, _), at in self._free.items():
            counts = found[scope]
            counts.freed = max(counts.freed or 0.0, at - (self._calm or at))
        kinds = [kill["what"] for kill in self._kills]
        for counts in found.values():
            counts.killed = {kind: kinds.count(kind) for kind in ("sender", "worker", "child")}
        return dict(found)


def judge(rules: Rules, bound: float, lines: Iterable[Line]) -> Verdict:
    """The verdict on a history.

    Args:
        rules: of the flood.
        bound: seconds after which a job can be sent and run again, whatever was killed.
        lines: of the history, in the order of their times.
    """
    made = Judge(rules, bound)
    made.read(lines)
    return made.verdict()
