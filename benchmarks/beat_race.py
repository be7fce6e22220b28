"""`python -m benchmarks.beat_race`: several ways to run beat twice, in one storm; the table of docs/beat.md.

What happens is in tests/chaos/beats.py: leaders are killed, stopped and resumed, ended in order, and the server of the
locks restarts. A supervisor starts what has ended.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.beats import SCHEDULE, TTL, Outcome, weather


@dataclass(frozen=True)
class Contestant:
    """A way to run beat more than once."""

    beats: int
    scheduler: str
    conf: Mapping[str, Any]


CONTESTANTS: Mapping[str, Contestant] = {
    "Celery's beat": Contestant(2, "celery.beat:PersistentScheduler", {}),
    "RedBeat": Contestant(
        2, "redbeat.RedBeatScheduler", {"beat_max_loop_interval": 1, "redbeat_lock_timeout": int(TTL)}
    ),
    "ours, leader": Contestant(3, "exclusive", {}),
    "ours, shared": Contestant(3, "exclusive", {"singleton_lock_beat_mode": "shared"}),
}

HEAD = "| | beats | ended by themselves | runs of the 1 s job | of the 0.5 s job | too many | missing | longest gap |"


def main() -> None:
    """Print a row for each."""
    print(HEAD)
    print("|" + " --- |" * 8)
    for name, contestant in CONTESTANTS.items():
        with tempfile.TemporaryDirectory() as directory:
            outcome = weather(Path(directory), _command(directory, contestant), contestant.beats, **contestant.conf)
        print(_row(name, contestant, outcome), flush=True)


def _command(directory: str, contestant: Contestant) -> Callable[[str], tuple[str, ...]]:
    return lambda name: ("beat", "-S", contestant.scheduler, "-s", f"{directory}/{name}.schedule")


def _row(name: str, contestant: Contestant, outcome: Outcome) -> str:
    seconds = outcome.ended - outcome.began
    cells = [
        name,
        str(contestant.beats),
        str(outcome.died),
        f"{len(outcome.of('one'))} of {seconds:.0f}",
        f"{len(outcome.of('half'))} of {2 * seconds:.0f}",
        str(sum(outcome.twice(entry) for entry in SCHEDULE)),
        str(sum(outcome.missing(entry) for entry in SCHEDULE)),
        f"{max(later - earlier for earlier, later in _steps(outcome)):.1f} s",
    ]
    return f"| {' | '.join(cells)} |"


def _steps(outcome: Outcome) -> list[tuple[float, float]]:
    """From one run of the half-second job to the next."""
    times = [outcome.began, *(run.at for run in outcome.of("half")), outcome.ended]
    return list(itertools.pairwise(times))


if __name__ == "__main__":
    main()
