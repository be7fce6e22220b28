"""Judges messages that end as another message's run: copies that joined it, and canvas parts that follow it.

Each body returns its message's id. So a success names its run: the message's own run, or a run of the same job that was
not over when the message was sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.storm.story import Attempt, Line, Story
from tests.storm.waiting import KEEPS_OUT

#: Tasks whose messages may end as another message, by `on_conflict` or as followers.
JOINING = "joining"
FOLLOWING = ("once", "behind", "waiting", "each")

#: Seconds by which the line may be late that a body writes at its end.
SLACK = 0.5


def wrong_ends(story: Story) -> Iterator[tuple[str, float, str, str]]:
    """Successes without a run, or with a run that they may not have: message, time, text, and excuse."""
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
    """What is wrong with an end; empty if nothing is."""
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
    # A run that keeps others out for a time may be over by then.
    since = sent["at"] - SLACK - (KEEPS_OUT if sent["task"] == "each" else 0.0)
    return "" if any(since <= run.end for run in runs) else "whose run was over before it was sent"


def _excuse(story: Story, line: Line, runs: list[Attempt]) -> str:
    """Why: a lock server that came back with older data has the lock again that the run had freed."""
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
