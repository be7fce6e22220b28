"""Judges messages of which only the newest is to run: `on_conflict="rerun"`, or `"replace"`, which also stops a run.

The lock server numbers them when they come, which nobody sees. But a message comes after a worker got it, and before it
met the lock or began to run: so for many pairs it is certain which message is older.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.storm.story import Attempt, Story

#: The tasks, by policy.
RERUN, REPLACE = "newest", "latest"

#: Share of the ttl within which a run has stopped for a newer one: a renewal reports it after a third, the run has a
#: tenth to stop, and a main process kills a child that has not stopped at its third renewal; each with a round trip.
STOPPED = 1.5


@dataclass(frozen=True)
class Came:
    """A message.

    Attributes:
        after: it did not come before this time.
        before: it had come by this time.
        met: when it met the lock; infinite if it did not.
    """

    message: str
    task: str
    after: float
    before: float
    met: float
    runs: list[Attempt]

    @property
    def begun(self) -> float:
        return min((run.start for run in self.runs), default=math.inf)

    def is_older(self, other: Came) -> bool:
        """Whether it is certainly older."""
        return self.before < other.after


def broken(story: Story, ttl: float) -> Iterator[tuple[str, float, str, str]]:
    """Broken promises: message, time, text, and excuse."""
    by_key = _by_key(story)
    for of_key in by_key.values():
        for newer in of_key:
            for older in of_key:
                if older.is_older(newer):
                    yield from _ran_late(story, older, newer)
                    if newer.task == REPLACE:
                        yield from _went_on(story, older, newer, ttl)
    came = {one.message: one for of_key in by_key.values() for one in of_key}
    yield from _superseded_by_older(story, came)


def _ran_late(story: Story, older: Came, newer: Came) -> Iterator[tuple[str, float, str, str]]:
    """Older arguments never run after newer ones."""
    from tests.storm.excuses import FORGOT

    for run in older.runs:
        if run.start > newer.begun:
            excuse = FORGOT if story.forgot(older.before, run.start) is not None else ""
            text = f"began {run.start - newer.begun:.2f} s after {newer.message[:8]}, which came later"
            yield older.message, run.start, text, excuse


def _went_on(story: Story, older: Came, newer: Came, ttl: float) -> Iterator[tuple[str, float, str, str]]:
    """A run is stopped once a newer message has met its lock."""
    for run in older.runs:
        late = run.end - newer.met
        if run.start < newer.met and late > STOPPED * ttl:
            text = f"ran for {late:.2f} s after {newer.message[:8]} had come to replace it"
            yield older.message, newer.met, text, _why_unheard(story, run, newer.met)


def _why_unheard(story: Story, run: Attempt, since: float) -> str:
    from tests.storm.excuses import FORGOT, FROZEN, HOGGED, UNHEARD

    for fate in ("frozen", "stopped"):
        if any(story.struck(run.pid, fate, since, run.end)):
            return FROZEN
    if story.hogged(run.pid, since, run.end):
        return HOGGED
    if story.forgot(run.start, run.end) is not None:
        return FORGOT
    return UNHEARD if story.silences.touch(run.host, since, run.end) else ""


def _superseded_by_older(story: Story, came: dict[str, Came]) -> Iterator[tuple[str, float, str, str]]:
    from tests.storm.excuses import FORGOT

    for message, lines in story.told.items():
        for line in lines:
            if (by := line.get("by")) is None or message not in came:
                continue
            one, newer = came[message], came.get(by)
            if newer is None or newer.task != one.task or story.sent[by]["key"] != story.sent[message]["key"]:
                yield message, line["at"], f"was superseded by {by[:8]}, which is no message of its key", ""
            elif newer.is_older(one):
                excuse = FORGOT if story.forgot(newer.before, line["at"]) is not None else ""
                yield message, line["at"], f"was superseded by {by[:8]}, which is older", excuse


def _by_key(story: Story) -> dict[tuple[str, str], list[Came]]:
    runs: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in story.attempts.values():
        runs[attempt.message].append(attempt)
    found: dict[tuple[str, str], list[Came]] = defaultdict(list)
    for message, sent in story.sent.items():
        if sent["task"] not in (RERUN, REPLACE) or message not in story.came:
            continue
        met, own = story.met.get(message, math.inf), runs.get(message, [])
        before = min([met, *(run.start for run in own)])
        one = Came(message, sent["task"], story.came[message], before, met, own)
        found[sent["task"], sent["key"]].append(one)
    return found
