"""What one server, a Cluster and a Redlock carry: measured per lock, and with many leases that are kept alive.

    python -m benchmarks.scaling [--leases 1000000]

Takes about 1 KB of memory per lease in Redis (with its replica) and as much in the simulated workers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from redis import Redis

from benchmarks.measure import RESULTS, machine, server_version
from celery_singleton_lock import clock, process_identity
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.redis import lock_commands
from celery_singleton_lock.testing import RedisServer
from tests.servers import Cluster, Nodes

TTL, COUNT, PIPELINE = 30.0, 20_000, 500

#: Seconds between two renewals, as the heartbeat has it.
INTERVAL = TTL / 3

#: Seconds for which leases are kept alive at the end.
PERIOD = 60.0

RECORD = b'["SUCCESS",3600.0,true]\nnull'

_spawn = multiprocessing.get_context("spawn")


def key_of(number: int) -> str:
    """As long as those of tasks are."""
    return f"singleton_lock:1:{{shop.tasks.rebuild:{number:032x}}}"


def holder_of(number: int) -> Holder:
    return Holder(
        f"{number:08x}-0000-4000-8000-000000000000", 0, "worker1@host", 4242, 1.0, process=process_identity.own()
    )


def acquire_many(store: Any, numbers: Sequence[int], *, ttl: float = TTL) -> list[Lease]:
    """Take locks, many in one round trip."""
    leases = []
    for start in range(0, len(numbers), PIPELINE):
        batch, sent_at = numbers[start : start + PIPELINE], clock.now()
        owners = [new_owner() for _ in batch]
        asked = [
            lock_commands.acquire(
                LockRequest(key_of(number), owner, ttl=ttl, holder=holder_of(number), once=True), new_owner()
            )
            for number, owner in zip(batch, owners, strict=True)
        ]
        for number, owner, answer in zip(batch, owners, store._servers.run_each(asked, step=10.0), strict=True):
            assert answer[0] == 1, answer
            leases.append(Lease(key_of(number), owner, ttl=ttl, fence=answer[1], sent_at=sent_at, slot=0))
    return leases


class Counted:
    """What a server did between two looks, for each of so many things."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._before = self._look()

    def per(self, count: int) -> dict[str, float]:
        now = self._look()
        return {name: (now[name] - self._before[name]) / count for name in now}

    def _look(self) -> dict[str, float]:
        info = self._client.info()
        return {
            "memory bytes": info["used_memory"],
            "bytes in": info["total_net_input_bytes"],
            "bytes out": info["total_net_output_bytes"],
            "cpu µs": (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6,
        }


def per_lock() -> dict[str, dict[str, float]]:
    """Of one server: what each step takes."""
    found: dict[str, dict[str, float]] = {}

    def step(name: str, count: int, work: Callable[[], Any]) -> Any:
        counted = Counted(client)
        result = work()
        found[name] = counted.per(count)
        return result

    with RedisServer() as server, server.client() as client:
        store = open_url(server.url)
        acquire_many(store, range(100))
        leases = step("acquire, pipelined", COUNT, lambda: acquire_many(store, range(100, 100 + COUNT), ttl=600.0))
        step("renewal", COUNT, lambda: store.renew(leases, timeout=10.0))
        done = [Record(holder_of(number).message, RECORD, 3600.0) for number in range(100, 100 + COUNT)]
        step("release with record", COUNT, lambda: [store.free(it, record=m) for it, m in zip(leases, done)])  # noqa: B905
        server.flush()

        def pairs() -> None:
            for number in range(5000):
                (lease,) = acquire_many(store, [number])
                store.free(lease, record=Record(holder_of(number).message, RECORD, 3600.0))

        began = time.perf_counter()
        step("acquire + release, one after the other", 5000, pairs)
        found["acquire + release, one after the other"]["per second, one client"] = 5000 / (time.perf_counter() - began)
    return found


def redlock_pairs() -> dict[str, float]:
    """Of five nodes on this machine: what a pair takes of one node's time, and how many one client makes."""
    with Nodes(5) as nodes:
        store = open_url(nodes.url, {"restart_delay": False})
        client = nodes.servers[0].client()
        counted, began = Counted(client), time.perf_counter()
        for number in range(3000):
            lease = store.acquire(LockRequest(key_of(number), new_owner(), ttl=TTL, holder=holder_of(number)))
            assert isinstance(lease, Lease)
            store.free(lease)
        return {**counted.per(3000), "per second, one client": 3000 / (time.perf_counter() - began)}


def keep_alive(url: str, numbers: range, told: Connection) -> None:
    """One process with the leases of many workers: takes them, and renews them as often as they would."""
    store = open_url(url)
    began = clock.now()
    leases = acquire_many(store, numbers, ttl=600.0)
    told.send(clock.now() - began)
    told.recv()
    for lease in leases:
        lease.ttl = TTL
    share = max(len(leases) // 50, 1)
    until, renewed, lost, cpu, began = clock.now() + PERIOD, 0, 0, time.process_time(), clock.now()
    due = began
    while clock.now() < until:
        for start in range(0, len(leases), share):
            answers = store.renew(leases[start : start + share], timeout=5.0)
            renewed += sum(answers)
            lost += answers.count(False)
            due += INTERVAL * share / len(leases)
            clock.sleep(max(due - clock.now(), 0.0))
    seconds = clock.now() - began
    told.send((renewed / seconds, lost, (time.process_time() - cpu) / seconds))


def cluster(count: int) -> dict[str, Any]:
    """Leases on three masters with a replica each, renewed by two processes."""
    with Cluster() as group:
        before = sum(server.client().info()["used_memory"] for server in group.servers[:3])
        pipes, children = [], []
        for part in range(2):
            ours, theirs = _spawn.Pipe()
            numbers = range(part * count // 2, (part + 1) * count // 2)
            child = _spawn.Process(target=keep_alive, args=(group.url, numbers, theirs), daemon=True)
            child.start()
            pipes.append(ours)
            children.append(child)
        filled = max(pipe.recv() for pipe in pipes)
        memory = (sum(server.client().info()["used_memory"] for server in group.servers[:3]) - before) / count
        counted = [Counted(server.client()) for server in group.servers[:3]]
        for pipe in pipes:
            pipe.send("go")
        told = [pipe.recv() for pipe in pipes]
        for child in children:
            child.join()
        rate = sum(rate for rate, _, _ in told)
        cores = [it.per(1)["cpu µs"] / 1e6 / PERIOD for it in counted]
        held = sum(server.client().dbsize() for server in group.servers[:3])
    return {
        "leases": count,
        "filled at, per second": count / filled,
        "memory of the masters per lease, bytes": memory,
        "renewals wanted per second": count / INTERVAL,
        "renewals per second": rate,
        "leases lost": sum(lost for _, lost, _ in told),
        "keys at the end": held,
        "cores used by the masters, each": cores,
        "cores used by the two clients, each": [cpu for _, _, cpu in told],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leases", type=int, default=1_000_000)
    arguments = parser.parse_args()
    found = {"one server": per_lock(), "Redlock of 5, one node": redlock_pairs(), "Cluster": cluster(arguments.leases)}
    content = {"name": "scaling", **found, "machine": machine(server_version())}
    (RESULTS / "scaling.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(content, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
