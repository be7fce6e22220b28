"""Judges messages that end as another one's run: copies that have joined it, and parts of a canvas that follow it.

Each body returns its message's id. So a success says whose run it was of: its own, or one of the same job that was not
over when the message was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.storm.story import Attempt, Line, Story
from tests.storm.waiting import KEEPS_OUT

#: Tasks whose messages may end as another one, by `on_conflict` or as followers; and as runs of which job.
JOINING = "joining"
FOLLOWING = ("once", "behind", "waiting", "each")

#: Seconds that a line may be late by which a body says that it has ended.
SLACK = 0.5


def wrong_ends(story: Story) -> Iterator[tuple[str, float, str, str]]:
    """Successes of no run, or of one that they may not be of: message, time, text, and what is excused of it."""
    runs: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in story.attempts.values():
        if attempt.how == "done" and attempt.is_last:
            runs[attempt.message].append(attempt)
    for message, lines in story.told.items():
        for line in lines:
            value = line.get("value")
            if line["state"] == "SUCCESS" and value is not None and (wrong := _wrong(story, line, runs.get(value, []))):
                excuse = _excuse(story, line, runs.get(value, []))
                yield message, line["at"], f"ended as {value[:8]}, {wrong}", excuse


def _wrong(story: Story, line: Line, runs: list[Attempt]) -> str:
    """What is wrong with an end; empty for nothing."""
    message, value = line["message"], line["value"]
    if not runs:
        return "which has not run"
    if value == message:
        return ""
    sent = story.sent.get(message)
    if sent is None or sent["task"] not in (JOINING, *FOLLOWING):
        return "though it neither joins nor follows"
    if not any(_is_of_job(run, sent) for run in runs):
        return "a run of another job"
    # One that keeps the others out for its time may have run by then.
    since = sent["at"] - SLACK - (KEEPS_OUT if sent["task"] == "each" else 0.0)
    return "" if any(since <= run.end for run in runs) else "whose run was over before it was sent"


def _excuse(story: Story, line: Line, runs: list[Attempt]) -> str:
    """A lock server that came back with older data has the lock again that the run had freed."""
    from tests.storm.excuses import FORGOT

    sent = story.sent.get(line["message"])
    is_of_job = sent is not None and [run for run in runs if _is_of_job(run, sent)]
    if not is_of_job or sent is None:
        return ""
    return FORGOT if any(story.forgot(run.start, sent["at"]) is not None for run in is_of_job) else ""


def _is_of_job(run: Attempt, sent: Line) -> bool:
    if sent["task"] == JOINING:
        return run.key == sent["key"]
    job = f"{sent['task']}:{sent['key']}"
    return run.key == job or run.key.startswith(f"{job}:")
