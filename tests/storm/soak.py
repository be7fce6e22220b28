"""An hour of work, and what it leaves behind: `python -m tests.storm.soak --minutes 60 --picture soak.svg`.

Memory, threads and descriptors of the workers, keys and memory of their lock server: after a while all of it is flat.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

from celery_singleton_lock import clock
from celery_singleton_lock.testing import RedisServer
from tests.integration.workers import Process
from tests.storm import soak_app
from tests.storm.picture import picture
from tests.storm.scene import group_of

#: Pools, and how many bodies at once.
POOLS = {"prefork": 2, "threads": 4}

#: Seconds for which a finished message is remembered, and its result is kept: what is left behind is flat after that.
KEPT = 60.0

#: Messages in the queue at most.
QUEUED = 200

#: Pictures have so many points.
POINTS = 240

#: Shares of the time: what is there in the first part is compared to what is there in the second.
WARM, END = (0.4, 0.55), (0.85, 1.0)

#: By how much of what it was something may have grown, and how much more than nothing.
GROWTH, SOME = 0.1, {"MB": 4.0, "keys": 500.0, "threads": 2.0, "descriptors": 4.0}


class Soak:
    """Workers, their servers, and a sender that keeps them busy; `exits` ends it."""

    def __init__(self, directory: Path, exits: ExitStack) -> None:
        self._broker, self._locks = (exits.enter_context(RedisServer()) for _ in range(2))
        conf = {
            "broker_url": self._broker.url_of(0),
            "result_backend": self._broker.url_of(1),
            "result_expires": KEPT,
            "singleton_lock_backend": self._locks.url,
            "singleton_lock_done_ttl": KEPT,
        }
        self._app, self.sent = soak_app.make(conf), 0
        self._workers = {}
        for pool, concurrency in POOLS.items():
            command = ["worker", "-n", f"{pool}@soak", "-P", pool, "-c", str(concurrency), "-l", "WARNING"]
            environment = {"TEST_CONF": json.dumps(conf)}
            made = Process(pool, "tests.storm.soak_app", command, directory=directory, environment=environment)
            self._workers[pool] = exits.enter_context(made)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()
        exits.callback(self.stop)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def left(self) -> int:
        """Messages that have not been taken, or not been acknowledged."""
        with self._broker.client() as client:
            return int(client.llen("celery")) + int(client.hlen("unacked"))

    def sample(self) -> dict[str, float]:
        """What there is now, by what and whose."""
        found: dict[str, float] = {}
        for pool, worker in self._workers.items():
            pids = group_of(worker.process.pid)
            found[f"MB of {pool}"] = sum(map(_private_mb, pids))
            found[f"threads of {pool}"] = sum(_entries(pid, "task") for pid in pids)
            found[f"descriptors of {pool}"] = sum(_entries(pid, "fd") for pid in pids)
        with self._locks.client() as client:
            found["MB of locks"] = client.info("memory")["used_memory"] / 2**20
            found["keys of locks"] = client.dbsize()
        return found

    def _send(self) -> None:
        chance, numbers = random.Random(0), itertools.count()
        tasks = [self._app.tasks[name] for name in ("skipped", "waited", "shared")]
        with self._app.producer_pool.acquire(block=True) as producer:
            while not self._stopped.is_set():
                if self.left() > QUEUED:
                    self._stopped.wait(0.02)
                    continue
                for _ in range(QUEUED // 4):
                    key = f"h{chance.randrange(4)}" if chance.random() < 0.3 else f"c{next(numbers)}"
                    chance.choice(tasks).apply_async((key,), producer=producer)
                    self.sent += 1


def _private_mb(pid: int) -> float:
    """What only this process has."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024
    return 0.0


def _entries(pid: int, what: str) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/{what}"))
    return 0


def grown(samples: Sequence[dict[str, float]]) -> list[str]:
    """What is not flat, in words."""
    found = []
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        before, after = (
            median(values[int(len(values) * begin) : int(len(values) * end)]) for begin, end in (WARM, END)
        )
        if after > before * (1 + GROWTH) and after > before + SOME[name.split()[0]]:
            found.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--picture", type=Path, default=Path("soak.svg"), help="file for it (soak.svg)")
    options = parser.parse_args()
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        soak = Soak(Path(folder), exits)
        began = clock.now()
        while (at := clock.now() - began) < 60 * options.minutes:
            samples.append(soak.sample())
            clock.sleep(60 * options.minutes / POINTS)
        left = soak.left()
        done = soak.sent - left
        logs = [line for log in Path(folder).glob("*.log") for line in log.read_text().splitlines() if "ERROR" in line]
    wrong = grown(samples) + logs[:20]
    options.picture.write_text(picture(samples, at, f"{done:,} tasks in {at / 60:.0f} min"))
    print(f"{done:,} tasks in {at / 60:.1f} min ({done / at:.0f} a second), {left} in the queue at the end")
    print(_table(samples), *wrong, f"picture: {options.picture}", sep="\n")
    return min(len(wrong), 1)


def _table(samples: Sequence[dict[str, Any]]) -> str:
    shares = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
    rows = [["", *(f"after {share:.0%}" for share in shares)], ["---"] * (len(shares) + 1)]
    for name in samples[0]:
        values = [samples[int((len(samples) - 1) * share)][name] for share in shares]
        rows.append([name, *(f"{value:,.1f}" if name.startswith("MB") else f"{value:,.0f}" for value in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
