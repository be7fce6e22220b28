"""A storm: load and nemeses for some minutes, then a calm, then the judge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from celery import states

from celery_singleton_lock import clock
from celery_singleton_lock.options.rules import SCOPES, WHILE_EXECUTING
from tests import appended
from tests.patience import until
from tests.storm.app import end_of
from tests.storm.judge import Finding, Story, judge
from tests.storm.nemesis import nemeses, raging
from tests.storm.scene import QUEUE_TTL, TTL, Scene, scene
from tests.storm.sender import LOADS, send

#: Seconds within which everything ends after the faults: copies wait for leases, and are put back for some seconds.
CALM = 120.0

#: Seconds after which messages without an end that are not in the broker count as lost.
UNSEEN = 5.0

#: Seconds after which each job can be sent again: by then, the lock of a lost message has expired.
FREE = QUEUE_TTL + 2 * TTL

#: Seconds between two looks.
PACE = 0.5

#: Messages that each sender sends in a flood, and how many senders a host has.
FLOOD, SENDERS = 200, 3


def storm(
    directory: Path,
    seed: int,
    minutes: float,
    *,
    place: str = "server",
    load: str = "mixed",
    mutant: str = "",
    kinds: str = "",
    enough: Callable[[list[Finding]], bool] | None = None,
) -> tuple[list[Mapping[str, Any]], list[Finding]]:
    """Run a storm; returns its history, and what is wrong.

    Args:
        directory: for the history and the logs of all processes.
        seed: decides what goes wrong.
        minutes: until the calm.
        place: where the locks are.
        load: what is sent. A flood first fills the queue: each scope must let through exactly what it allows.
        mutant: of the package, which the workers run.
        kinds: of faults: what their names begin with, separated by commas.
        enough: ends the storm, without a calm, once this is true of the findings so far.
    """
    with scene(directory, place=place, load=load, mutant=mutant) as made:
        rules = {"ttl": TTL, "queue_ttl": QUEUE_TTL, "servers": len(made.independent) or 1}
        if load == "flood":
            _fill_queue(made)
        made.start_workers()
        for host in made.hosts.values():
            host.sender = made.start_sender(host)
        angry, deadline = nemeses(made, seed, kinds), clock.now() + 60 * minutes
        with raging(angry):
            while clock.now() < deadline and not any(nemesis.error for nemesis in angry):
                clock.sleep(1)
                if enough and enough(found := judge(lines := appended.read(made.history), **rules, is_over=False)):
                    return lines, found
        _calm(made)
        lines = appended.read(made.history)
        return lines, judge(lines, **rules)


def _fill_queue(made: Scene) -> None:
    """Send without workers: one message of each job waits, or each that was sent under `while_executing`."""
    senders = [made.start_sender(host, FLOOD) for host in made.hosts.values() for _ in range(SENDERS)]
    until(lambda: all(sender.process.poll() is not None for sender in senders), "all was sent")
    calls = Story.of(appended.read(made.history)).calls.values()
    sent = Counter(call.line["task"] for call in calls)
    with made.broker.client() as client:
        found = Counter(json.loads(line)["headers"]["task"] for line in client.lrange("celery", 0, -1))
    for scope in SCOPES:
        jobs = {call.line["key"] for call in calls if call.line["task"] == scope}
        wanted = sent[scope] if scope == WHILE_EXECUTING else len(jobs)
        if found[scope] != wanted:
            _left(made, f"{found[scope]} messages of {scope} wait, not {wanted}")


def _calm(made: Scene) -> None:
    """Wait for everything to end, and record what does not."""
    for host in made.hosts.values():
        if host.sender:
            host.sender.kill()
    deadline, seen_at = clock.now() + CALM, clock.now()
    while (pending := _pending(made)) and clock.now() < min(deadline, seen_at + UNSEEN):
        for host in made.hosts.values():
            made.revive(host)
        if pending & _in_broker(made):
            seen_at = clock.now()
        clock.sleep(PACE)
    for message in pending & _in_broker(made):
        _left(made, f"the message {message} is still in the broker")
    for server in made.locks.servers:
        with server.client() as client:
            for key in client.scan_iter("singleton_lock*"):
                if client.pttl(key) == -1:
                    _left(made, f"{key} has no time to live")
    _try_jobs(made)


def _pending(made: Scene) -> set[str]:
    """Messages without an end, also if the backend is asked: who was killed as it reported one could not record it."""
    pending = Story.of(appended.read(made.history)).pending()
    for message in pending:
        meta = made.app.backend.get_task_meta(message, cache=False)
        if meta["status"] in states.READY_STATES:
            _note(made, "told", message=message, **end_of(meta["result"], meta["status"]))
    return pending


def _in_broker(made: Scene) -> set[str]:
    """Ids of the messages that wait in the queue, or in a worker."""
    with made.broker.client() as client:
        raw = [json.loads(line) for line in client.lrange("celery", 0, -1)]
        raw += [json.loads(line)[0] for line in client.hvals("unacked")]
    return {message["headers"]["id"] for message in raw}


def _try_jobs(made: Scene) -> None:
    """Check that each job can be sent and run again, once a lock that was left behind has expired."""
    load, began = LOADS[made.load], clock.now()
    left = {(task, key) for task in load.tasks if task in made.app.tasks for key in load.jobs}
    with made.sends():
        while left and clock.now() < began + FREE + CALM / 2:
            sent = {send(made.app, task, key, 0.0): (task, key) for task, key in left}
            clock.sleep(2)
            bodies = Story.of(appended.read(made.history)).bodies.values()
            left -= {sent.get(body.line["message"], ("", "")) for body in bodies}
    for task, key in left:
        _left(made, f"{task} of {key} does not run, and no message is under way")


def _left(made: Scene, text: str) -> None:
    _note(made, "left", text=text)


def _note(made: Scene, event: str, **fields: object) -> None:
    appended.append(made.history, {"at": clock.now(), "host": "", "pid": 0, "event": event, **fields})
