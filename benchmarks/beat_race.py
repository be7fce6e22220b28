"""`python -m benchmarks.beat_race`: several ways to run beat twice, in the same storm; the table of docs/beat.md.

beat_weather.py has the events: beats are killed, stopped and resumed, or shut down, and the lock server
restarts. A supervisor restarts beats that have ended.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.beat_weather import SCHEDULE, TTL, weather

#: How many beats, with which scheduler and which settings.
CONTESTANTS: Mapping[str, tuple[int, str, Mapping[str, Any]]] = {
    "Celery's beat": (2, "celery.beat:PersistentScheduler", {}),
    "RedBeat": (2, "redbeat.RedBeatScheduler", {"beat_max_loop_interval": 1, "redbeat_lock_timeout": int(TTL)}),
    "exclusive": (3, "exclusive", {}),
}

HEAD = "| | beats | ended by themselves | runs of the 1 s job | of the 0.5 s job | too many | missing | longest gap |"


def cells_of(beats: int, scheduler: str, conf: Mapping[str, Any]) -> list[str]:
    """The cells of one contestant."""
    with tempfile.TemporaryDirectory() as directory:
        outcome = weather(
            Path(directory), lambda name: ("beat", "-S", scheduler, "-s", f"{directory}/{name}.schedule"), beats, **conf
        )
    seconds = outcome.ended - outcome.began
    times = [outcome.began, *(run.at for run in outcome.of("half")), outcome.ended]
    return [
        str(beats),
        str(outcome.died),
        f"{len(outcome.of('one'))} of {seconds:.0f}",
        f"{len(outcome.of('half'))} of {2 * seconds:.0f}",
        str(sum(outcome.twice(entry) for entry in SCHEDULE)),
        str(sum(outcome.missing(entry) for entry in SCHEDULE)),
        f"{max(later - earlier for earlier, later in itertools.pairwise(times)):.1f} s",
    ]


if __name__ == "__main__":
    print(HEAD)
    print("|" + " --- |" * 8)
    for name, contestant in CONTESTANTS.items():
        print(f"| {' | '.join([name, *cells_of(*contestant)])} |", flush=True)
