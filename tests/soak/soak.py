"""Workers that are kept busy; their memory, threads and descriptors, and the keys and memory of their lock server."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

from tests.integration.workers import Process
from tests.programs import group_of
from tests.redis_server import RedisServer
from tests.soak import app

#: Pools, and how many bodies each runs at once.
POOLS = {"prefork": 2, "threads": 4}

#: Seconds for which a finished message is remembered, and its result kept: after that, their number is flat.
KEPT = 60.0

#: The number of rarely used keys. Each leaves a counter for an hour, so the same ones come again.
COLD = 2000

#: The maximum number of messages in the queue.
QUEUED = 200

#: Parts of the time: values in the second are compared with those in the first.
WARM, END = (0.4, 0.55), (0.85, 1.0)

#: The growth that is tolerated: relative, and absolute by unit.
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
        self._app, self.sent = app.make(conf), 0
        self._workers = {}
        for pool, concurrency in POOLS.items():
            command = ["worker", "-n", f"{pool}@soak", "-P", pool, "-c", str(concurrency)]
            environment = {"TEST_CONF": json.dumps(conf)}
            made = Process(pool, "tests.soak.app", command, directory=directory, environment=environment)
            self._workers[pool] = exits.enter_context(made)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()
        exits.callback(self.stop)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def wrong(self) -> list[str]:
        """Workers that have ended, and errors in their logs."""
        found = [f"{pool} has ended" for pool, worker in self._workers.items() if worker.process.poll() is not None]
        for worker in self._workers.values():
            found += [line for line in worker.log.splitlines() if "ERROR" in line or "CRITICAL" in line]
        return found

    def left(self) -> int:
        """Messages that are in the queue, or unacknowledged."""
        with self._broker.client() as client:
            return int(client.llen("celery")) + int(client.hlen("unacked"))

    def sample(self) -> dict[str, float]:
        """The current values, by name."""
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
                    key = f"h{chance.randrange(4)}" if chance.random() < 0.3 else f"c{next(numbers) % COLD}"
                    chance.choice(tasks).apply_async((key,), producer=producer)
                    self.sent += 1


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


def grown(samples: Sequence[dict[str, float]], lately: Sequence[int]) -> list[str]:
    """What is not flat, in words; `lately` has, for each sample, the number of messages in the last `KEPT` seconds.

    The lock server remembers those, so it may hold more where there were more.
    """
    found = []
    then, now = _typical(lately)
    for name in samples[0]:
        before, after = _typical([sample[name] for sample in samples])
        allowed = before * max(now / max(then, 1), 1.0) if name.endswith(" of locks") else before
        if after > allowed * (1 + GROWTH) and after > allowed + SOME[name.split()[0]]:
            found.append(f"{name} grew from {before:.1f} to {after:.1f}")
    return found


def _typical(values: Sequence[float]) -> tuple[float, float]:
    """The median after the warm-up, and at the end."""
    before, after = (median(values[int(len(values) * begin) : int(len(values) * end)]) for begin, end in (WARM, END))
    return before, after
