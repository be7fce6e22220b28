"""Judges messages that have a lock while they wait: no second one waits, and a lock ends with its message.

A message surely has its lock from when the broker has the message until a body begins, or the last body has ended; but
at most for `QUEUE_TTL` after each sign of it: then the lock may have expired.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.storm.story import Attempt, Story

#: Seconds that the lock of a message lasts without a sign of it, beyond its countdown; and most of that time.
QUEUE_TTL, SURELY = 40.0, 30.0

#: Seconds for which a message of the task "each" keeps others out, counted from before it is sent.
KEEPS_OUT = 4.0

#: Seconds after which a job that is over can be sent again, whatever kept it: a send without an answer takes three.
FREE_AGAIN = QUEUE_TTL + 60.0 + 10.0

#: Seconds from the release of a lock until a body has begun; and the same if the lock servers, or the result backend,
#: which is notified first, do not answer.
BEGINS, WAITS_FOR_SERVERS = 1.0, 3.0


@dataclass
class Waiting:
    """A message that was sent with a lock.

    Attributes:
        taken_at: when its sender took the lock, or earlier.
        heard: when the broker or a worker got it.
        over: when its lock was free at the latest, as far as the history shows; None if it does not show that.
    """

    message: str
    task: str
    owner: str
    taken_at: float
    heard: list[float] = field(default_factory=list)
    over: float | None = None

    @property
    def begin(self) -> float:
        return self.heard[0]

    def waits(self, at: float) -> bool:
        """Whether it surely has its lock at this time."""
        if self.task == "each":  # It has the lock for a fixed time, whatever happens to it.
            return self.begin < at <= self.taken_at + KEEPS_OUT - BEGINS
        if not self.begin < at or (self.over is not None and at >= self.over - BEGINS):
            return False
        until = self.begin
        for heard in sorted(self.heard):
            if heard > until + SURELY:
                break  # The lock may have expired before, and is not taken again.
            until = heard
        return at <= until + SURELY


def sent_twice(story: Story) -> Iterator[tuple[str, float, str, str]]:
    """Messages that were sent with a lock while another one waited: job, time, text, and excuse."""
    for job, waiting in _by_job(story).items():
        for place, second in enumerate(waiting):
            for first in waiting[:place]:
                if first.owner == second.owner or not first.waits(second.begin):
                    continue
                text = f"{second.message[:8]} was sent {second.begin - first.begin:.2f} s after {first.message[:8]}"
                begun = min((one.start for one in _attempts(story, first.message)), default=None)
                text += ", which waited" if begun is None else f", which began {begun - second.begin:.2f} s later"
                yield job, second.begin, text, _excuse(story, first, second)


def answers(story: Story) -> Iterator[tuple[str, float, str]]:
    """Duplicates of messages that have been over for longer than any lock lasts."""
    for line in story.duplicates:
        told = story.told.get(line["of"], ())
        if told and (late := line["at"] - told[0]["at"]) > FREE_AGAIN:
            yield line["message"], line["at"], f"is a duplicate of {line['of'][:8]}, over for {late:.0f} s"


def _by_job(story: Story) -> dict[str, list[Waiting]]:
    found: dict[tuple[str, str], Waiting] = {}
    for line in story.queued:
        clicked = story.clicked.get(line["message"])
        if clicked is None or not line.get("owner"):
            continue
        name = line["message"], line["owner"]
        waiting = found.setdefault(name, Waiting(line["message"], clicked["task"], line["owner"], clicked["at"]))
        waiting.heard.append(line["at"])
    jobs: dict[str, list[Waiting]] = defaultdict(list)
    for waiting in found.values():
        if waiting.message not in story.unsure and waiting.message not in story.unheard:
            clicked = story.clicked[waiting.message]
            waiting.over = _over(story, waiting)
            jobs[f"{clicked['task']}:{clicked['key']}"].append(waiting)
    for ordered in jobs.values():
        ordered.sort(key=lambda one: one.begin)
    return jobs


def _over(story: Story, waiting: Waiting) -> float | None:
    """When its lock was free: when its first body began, its last body ended, or its end was reported."""
    told = [line["at"] for line in story.told.get(waiting.message, ())]
    attempts = _attempts(story, waiting.message)
    if waiting.task == "once":
        times = [one.end for one in attempts if one.how == "done" and one.is_last]
    else:
        times = [one.start for one in attempts]
    return min([*times, *told], default=None)


def _attempts(story: Story, message: str) -> Sequence[Attempt]:
    return [one for one in story.attempts.values() if one.message == message]


def _excuse(story: Story, first: Waiting, second: Waiting) -> str:
    from tests.storm.excuses import FORGOT, KILLED_AS_IT_BEGAN, SLOW_TO_BEGIN, SLOW_TO_SEND

    # Either may have taken its lock first: it may take long from then until the broker has the message.
    if story.forgot(min(first.taken_at, second.taken_at), second.begin) is not None:
        return FORGOT
    if second.task == "each" and second.begin - second.taken_at > KEEPS_OUT - BEGINS:
        return SLOW_TO_SEND
    # Its lock is freed just before its body begins: in between, the worker may have died or been frozen.
    takers = [line for line in story.taken if line["message"] == first.message and line["at"] <= second.begin]
    is_at_start = first.task != "once"
    struck = any(
        fault.begin <= second.begin + BEGINS and fault.end >= line["at"]
        for line in takers
        for fault in story.faults
        if line["pid"] in fault.pids or any(pid in fault.pids for pid in story.group(line["pid"]))
    )
    if is_at_start and struck:
        return KILLED_AS_IT_BEGAN
    return SLOW_TO_BEGIN if is_at_start and _is_slow_to_begin(story, first, second.begin) else ""


def _is_slow_to_begin(story: Story, first: Waiting, at: float) -> bool:
    """Whether its body began soon after that time, and a server that it asks first did not answer meanwhile."""
    begun = min(_attempts(story, first.message), key=lambda one: one.start, default=None)
    if begun is None or not at < begun.start <= at + WAITS_FOR_SERVERS:
        return False
    return any(
        fault.kind.startswith("broker") or any(way.startswith((f"{begun.host}/", "*/")) for way in fault.silent)
        for fault in story.faults
        if fault.overlaps(at, begun.start)
    )
