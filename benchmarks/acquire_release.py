"""What one lock costs: acquire + release, as a ratio to redis-py's bare `SET NX PX` + `EVALSHA` in the same run.

    make bench

Both sides take turns in short rounds, so that what the machine does meanwhile hits both; the figure is the median of
the rounds' ratios. Ours also gives an owner per delivery, who holds the lock, a fencing token, a record
that the message was carried out, and wakes waiters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from redis import Redis

from celery_singleton_lock import process
from celery_singleton_lock.lease import Holder, Lease, Mark, new_owner
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.testing import RedisServer

ROUNDS, PAIRS = 40, 400
KEY = "bench:{key}"
RECORD = b'["SUCCESS", 3600.0, true]\nnull'
COMPARE_AND_DELETE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


def ours(server: RedisServer) -> Callable[[], None]:
    store = open_url(server.url)

    def pair() -> None:
        # As a task does: each message has another id, and leaves a record.
        holder = Holder(new_owner(), 0, "worker@host", 1, 0.0, process=process.identity())
        lease = store.acquire(KEY, new_owner(), ttl=30.0, holder=holder, once=True)
        assert isinstance(lease, Lease)
        store.release(lease, mark=Mark(holder.message, RECORD, 60.0))

    return pair


def bare(server: RedisServer) -> Callable[[], None]:
    client = Redis.from_url(server.url)
    sha = client.script_load(COMPARE_AND_DELETE)

    def pair() -> None:
        owner = new_owner()
        client.set("bench:bare", owner, nx=True, px=30_000)
        client.evalsha(sha, 1, "bench:bare", owner)

    return pair


def seconds(pair: Callable[[], None]) -> float:
    begun = time.perf_counter()
    for _ in range(PAIRS):
        pair()
    return (time.perf_counter() - begun) / PAIRS


def main() -> None:
    with RedisServer() as server:
        one, other = ours(server), bare(server)
        seconds(one), seconds(other)
        rounds = [(seconds(one), seconds(other)) for _ in range(ROUNDS)]
    ratios = sorted(mine / theirs for mine, theirs in rounds)
    mine, theirs = (statistics.median(times) * 1e6 for times in zip(*rounds, strict=True))
    low, high = ratios[ROUNDS // 10], ratios[-ROUNDS // 10]
    print(f"acquire + release: {mine:.0f} µs; bare SET NX PX + EVALSHA by redis-py: {theirs:.0f} µs")
    print(f"ratio: {statistics.median(ratios):.2f} (10 % to 90 % of the rounds: {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
