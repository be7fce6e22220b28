"""Who ran when, in a Redis stream: its order is the same for all containers, so their clocks need not agree.

A run adds an entry when it begins, with each step of its work, and at its end. Two runs overlap if one of them added
an entry after the other had begun; a worker that is killed adds nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from redis import Redis

STREAM = "record"

#: The set of the ids of all messages that were sent.
SENT = "sent"


@dataclass(frozen=True)
class Run:
    """One execution of a task.

    Attributes:
        job, task_id, worker, fence, due: what the task recorded when it began.
        places: the places of its entries in the stream.
        began, ended: the times of the first and the last entry, in seconds on the server's clock.
        outcome: "open", "done", "aborted" or "raised".
    """

    job: str
    task_id: str
    worker: str
    fence: int
    due: str
    places: tuple[int, ...] = field(repr=False)
    began: float
    ended: float
    outcome: str = "open"


@contextmanager
def run(client: Redis, task: Any, job: str) -> Iterator[Callable[[], None]]:
    """Record the body of the `with` block as a run of `job`; call the yielded function with each step.

    Args:
        client: a client of the Redis that keeps the record.
        task: the bound task.
        job: the name of the job.
    """
    request = task.request
    due = getattr(request, "singleton_lock", {}).get("due", "")
    start: dict[Any, Any] = {
        "job": job,
        "task_id": request.id,
        "worker": request.hostname,
        "fence": task.lock.fence,
        "due": due,
    }
    begun = client.xadd(STREAM, {"event": "start", **start})

    def leave(event: str) -> None:
        client.xadd(STREAM, {"event": event, "run": begun})

    outcome = "aborted"
    try:
        yield lambda: leave("step")
        outcome = "done"
    except Exception:
        outcome = "raised"
        raise
    finally:
        leave(outcome)


def read(client: Redis) -> list[Run]:
    """All runs, in the order in which they began; `client` decodes its answers."""
    runs: dict[str, Run] = {}
    entries: Any = client.xrange(STREAM)
    for place, (entry, fields) in enumerate(entries):
        at = int(entry.partition("-")[0]) / 1000
        event = fields["event"]
        if event == "start":
            fence = int(fields["fence"])
            runs[entry] = Run(
                *(fields["job"], fields["task_id"], fields["worker"], fence, fields["due"]),
                *((place,), at, at),
            )
        else:
            run = runs[fields["run"]]
            outcome = "open" if event == "step" else event
            runs[fields["run"]] = replace(run, places=(*run.places, place), ended=at, outcome=outcome)
    return list(runs.values())


def overlaps(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs of one job in which the first run added an entry after the second had begun."""
    return [
        (first, second)
        for first, second in combinations(sorted(runs, key=lambda run: run.places), 2)
        if first.job == second.job and second.places[0] < first.places[-1]
    ]
