"""How much one server, a Cluster and a Redlock can carry: measured per lock, and with many leases kept alive.

    python -m benchmarks.scaling [--leases 1000000] [--flood 1000000] [--only PART]

Takes about 1 KB of memory per lease in Redis (with its replica) and as much in the simulated workers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from celery import states
from redis import Redis

from benchmarks.measure import RESULTS, machine, server_version
from benchmarks.processes import Child
from celery_singleton_lock import clock, process_identity
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.redis import lock_commands
from celery_singleton_lock.task.ends import Outcome
from celery_singleton_lock.task.message import record_name
from tests.redis_server import RedisServer
from tests.servers import Cluster, Nodes

#: Seconds that a lease lasts, between two renewals (as in the heartbeat), and for which leases are kept alive.
TTL, INTERVAL, PERIOD = 30.0, 10.0, 60.0

#: Locks on one server, pairs one after the other, and locks in one round trip.
COUNT, PAIRS, PIPELINE = 20_000, 3000, 500

#: Seconds that leases last before they are kept alive.
MEANWHILE = 600.0

#: Seconds for which the server remembers a message.
KNOWN = 3600.0

ENDED, SETTLED = Outcome(states.SUCCESS, b"null"), Outcome(states.SUCCESS, settled=True)

#: Waiters for one lock.
WAITERS = 1000

Found = dict[str, Any]


def key_of(number: int) -> str:
    """A key as long as those of tasks."""
    return f"singleton_lock:1:{{shop.tasks.rebuild:{number:032x}}}"


def holder_of(number: int) -> Holder:
    task_id = f"{number:08x}-0000-4000-8000-000000000000"
    record = record_name("shop.tasks.rebuild", task_id, task_id)
    return Holder(task_id, 0, "worker1@host", 4242, 1.0, process=process_identity.own(), record=record)


def record_of(number: int) -> Record:
    return ENDED.record_of(holder_of(number), KNOWN)


def pair(store: Any, number: int, *, remembered: bool) -> None:
    """Acquire and release, as a task does, or a lock outside of tasks."""
    lease = store.acquire(LockRequest(key_of(number), new_owner(), TTL, holder_of(number), check_finished=remembered))
    assert isinstance(lease, Lease), lease
    store.free(lease, record=record_of(number) if remembered else None)


def settled(number: int) -> tuple[str, Record]:
    """The settled record that a worker writes when everything that follows was sent."""
    return key_of(number), SETTLED.record_of(holder_of(number), KNOWN)


def acquire_many(store: Any, numbers: Sequence[int]) -> list[Lease]:
    """Take locks, many in one round trip (which no worker does)."""
    leases = []
    for start in range(0, len(numbers), PIPELINE):
        sent_at = clock.now()
        requests = [
            LockRequest(key_of(number), new_owner(), MEANWHILE, holder_of(number), check_finished=True)
            for number in numbers[start : start + PIPELINE]
        ]
        asked = [lock_commands.acquire(request) for request in requests]
        for request, answer in zip(requests, store._servers.run_each(asked, step=10.0), strict=True):
            assert answer[0] == 1, answer
            leases.append(request.lease(fence=answer[1], sent_at=sent_at, slot=0))
    return leases


def looked_at(client: Redis) -> dict[str, float]:
    info = client.info()
    return {
        "memory bytes": info["used_memory"],
        "bytes in": info["total_net_input_bytes"],
        "bytes out": info["total_net_output_bytes"],
        "cpu µs": (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6,
    }


@contextmanager
def counted(client: Redis, count: int) -> Iterator[Found]:
    """What a server does meanwhile, divided by `count`."""
    found: Found = {}
    before, began = looked_at(client), time.perf_counter()
    yield found
    found["per second, one client"] = count / (time.perf_counter() - began)
    found |= {name: (now - before[name]) / count for name, now in looked_at(client).items()}


def per_lock() -> Found:
    """What each step takes on one server."""
    with RedisServer() as server, server.client() as client:
        store = open_url(server.url)
        acquire_many(store, range(COUNT, COUNT + 100))
        with counted(client, COUNT) as acquired:
            leases = acquire_many(store, range(COUNT))
        with counted(client, COUNT) as renewed:
            store.renew(leases, timeout=10.0)
        with counted(client, COUNT) as released:
            for number, lease in enumerate(leases):
                store.free(lease, record=record_of(number))
        server.flush()
        with counted(client, PAIRS) as pairs:
            for number in range(PAIRS):
                pair(store, number, remembered=True)
    return {
        "acquire, pipelined": acquired,
        "renewal": renewed,
        "release with record": released,
        "acquire + release, one after the other": pairs,
    }


def memory_of(client: Redis) -> int:
    return int(client.info("memory")["used_memory"])


def left_behind(count: int) -> Found:
    """Bytes on one server: while locks are held, and afterwards."""
    found: Found = {}
    with RedisServer() as server, server.client() as client:
        store: Any = open_url(server.url)
        acquire_many(store, range(COUNT, COUNT + 100))
        server.flush()
        empty = memory_of(client)
        leases = acquire_many(store, range(COUNT))
        found["bytes per lock that is held"] = (memory_of(client) - empty) / COUNT
        store._servers.run_each([lock_commands.free(lease) for lease in leases], step=60.0)
        found["bytes per lock that is free"] = (memory_of(client) - empty) / COUNT
        server.flush()
        requests = [LockRequest(key_of(0), new_owner(), TTL, holder_of(0), waiting=True) for _ in range(WAITERS + 1)]
        before = memory_of(client)
        store._servers.run_each([lock_commands.acquire(request) for request in requests], step=60.0)
        found["bytes per waiter, beside its connection"] = (memory_of(client) - before) / WAITERS
        server.flush()
        found["flood"] = flood(store, client, count)
        store.close()
    return found


def flood(store: Any, client: Redis, count: int) -> Found:
    """Messages with different arguments: what is left of them, now and later."""
    empty, peak, began = memory_of(client), 0, clock.now()
    for start in range(0, count, PIPELINE):
        numbers = range(start, min(start + PIPELINE, count))
        leases = acquire_many(store, numbers)
        ends = [
            lock_commands.free(lease, record=record_of(number)) for number, lease in zip(numbers, leases, strict=True)
        ]
        store._servers.run_each(ends, step=10.0)
        store.replace_records([settled(number) for number in numbers])
        peak = max(peak, memory_of(client))
    lasted, at_once = clock.now() - began, memory_of(client)
    clock.sleep(lock_commands.FENCE_TTL + 10.0)
    lives = [client.pttl(name) for name in client.scan_iter(count=1000)]
    assert min(lives) > 0, "each key ends by itself"
    return {
        "messages": count,
        "seconds": lasted,
        "bytes each at the peak": (peak - empty) / count,
        "bytes each at the end of the flood": (at_once - empty) / count,
        "bytes each when the counters are gone": (memory_of(client) - empty) / count,
        "keys then": len(lives),
        "seconds until the last of them ends, at most": max(lives) / 1000,
    }


def redlock_pairs() -> Found:
    """Five nodes on this machine: the time that a pair takes on one node, and how many pairs one client makes."""
    with Nodes(5) as nodes, nodes.servers[0].client() as client:
        store = open_url(nodes.url, {"restart_delay": False})
        with counted(client, PAIRS) as pairs:
            for number in range(PAIRS):
                pair(store, number, remembered=False)
    return pairs


def keep_alive(orders: Connection, url: str, numbers: range) -> None:
    """One process with the leases of many workers: takes them, and renews them as often as those would."""
    store, began = open_url(url), clock.now()
    leases = acquire_many(store, numbers)
    orders.send(clock.now() - began)
    orders.recv()
    for lease in leases:
        lease.ttl = TTL
    share = max(len(leases) // 50, 1)
    answers: list[bool] = []
    due = began = clock.now()
    cpu = time.process_time()
    while clock.now() < began + PERIOD:
        for start in range(0, len(leases), share):
            answers += store.renew(leases[start : start + share], timeout=5.0)
            due += INTERVAL * share / len(leases)
            clock.sleep(max(due - clock.now(), 0.0))
    seconds = clock.now() - began
    orders.send((sum(answers) / seconds, answers.count(False), (time.process_time() - cpu) / seconds))


def cluster(count: int) -> Found:
    """Leases on three masters with a replica each, renewed by two processes."""
    with Cluster() as group, ExitStack() as exits:
        masters = [exits.enter_context(server.client()) for server in group.servers[:3]]
        empty = sum(looked_at(master)["memory bytes"] for master in masters)
        halves = range(count // 2), range(count // 2, count)
        children = [exits.enter_context(Child(keep_alive, group.url, half)) for half in halves]
        filled = max(child.pipe.recv() for child in children)
        before = [looked_at(master) for master in masters]
        for child in children:
            child.pipe.send("go")
        rates, lost, cpu = zip(*(child.pipe.recv() for child in children), strict=True)
        used = [
            (looked_at(master)["cpu µs"] - then["cpu µs"]) / 1e6 / PERIOD
            for master, then in zip(masters, before, strict=True)
        ]
        return {
            "leases": count,
            "filled at, per second": count / filled,
            "memory of the masters per lease, bytes": (sum(then["memory bytes"] for then in before) - empty) / count,
            "renewals wanted per second": count / INTERVAL,
            "renewals per second": sum(rates),
            "leases lost": sum(lost),
            "keys at the end": sum(master.dbsize() for master in masters),
            "cores used by the masters, each": used,
            "cores used by the two clients, each": cpu,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leases", type=int, default=1_000_000)
    parser.add_argument("--flood", type=int, default=1_000_000)
    parser.add_argument("--only", help="measure only this part, and leave the others as they are")
    asked = parser.parse_args()
    parts = {
        "one server": per_lock,
        "left behind": lambda: left_behind(asked.flood),
        "Redlock of 5, one node": redlock_pairs,
        "Cluster": lambda: cluster(asked.leases),
    }
    path = RESULTS / "scaling.json"
    known = json.loads(path.read_text()) if asked.only else {"name": "scaling", "machine": machine(server_version())}
    found = {name: measure() for name, measure in parts.items() if asked.only in (None, name)}
    content = json.dumps({**known, **found}, indent=2, ensure_ascii=False)
    path.write_text(content + "\n")
    print(content)


if __name__ == "__main__":
    main()
