"""An hour of work without faults, and what it leaves behind: after a while, everything must be flat."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from celery_singleton_lock import clock
from tests.programs import group_of
from tests.storm.scene import Scene, scene

#: Seconds for which a finished message is remembered, and its result kept: after that, their number is flat.
KEPT = 60

#: The number of looks.
LOOKS = 240

#: Parts of the time: values in the second are compared with those in the first.
WARM, END = (0.4, 0.55), (0.85, 1.0)

#: The growth that is tolerated: relative, and absolute by unit.
GROWTH, SOME = 0.1, {"MB": 4.0, "keys": 500.0, "threads": 2.0, "descriptors": 4.0}

Sample = dict[str, float]


def soak(directory: Path, minutes: float) -> list[str]:
    """Work for that long; prints what it looked at, and returns what grew or ended."""
    conf = {"result_expires": KEPT, "singleton_lock_done_ttl": KEPT}
    with scene(directory, load="flood", conf=conf) as made:
        made.history = None  # It would be larger than all that is looked at.
        made.start_workers()
        for host in made.hosts.values():
            made.start_sender(host)
        samples = []
        for _ in range(LOOKS):
            clock.sleep(60 * minutes / LOOKS)
            samples.append(_sample(made))
        workers = [worker for host in made.hosts.values() for worker in host.workers.values()]
        found = grown(samples) + [f"{one.name} has ended" for one in workers if one.process.poll() is not None]
    for name in samples[0]:
        print(f"{name:24}", *(f"{samples[int((LOOKS - 1) * share / 4)][name]:10,.1f}" for share in range(5)))
    print(*found, sep="\n")
    return found


def _sample(made: Scene) -> Sample:
    """The present values; each name is "unit of what"."""
    found: Sample = {}
    for host in made.hosts.values():
        for pool, worker in host.workers.items():
            pids, name = group_of(worker.process.pid), f"{pool} in the {host.name}"
            found[f"MB of {name}"] = sum(map(_private_mb, pids))
            found[f"threads of {name}"] = sum(_entries(pid, "task") for pid in pids)
            found[f"descriptors of {name}"] = sum(_entries(pid, "fd") for pid in pids)
    with made.locks.servers[0].client() as client:
        found["MB of locks"] = client.info("memory")["used_memory"] / 2**20
        found["keys of locks"] = client.dbsize()
    return found


def _private_mb(pid: int) -> float:
    """Megabytes of memory that only this process has."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024
    return 0.0


def _entries(pid: int, what: str) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/{what}"))
    return 0


def grown(samples: Sequence[Sample]) -> list[str]:
    """What is not flat, in words: medians, so that a peak does not count."""
    found = []
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        before, after = (median(values[int(len(values) * a) : int(len(values) * b)]) for a, b in (WARM, END))
        if after > before * (1 + GROWTH) and after > before + SOME[name.split()[0]]:
            found.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return found
