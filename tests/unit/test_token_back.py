"""Tokens of Celery's `rate_limit` that come back, on the consumer's own bucket and timer."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from celery.worker.consumer import consumer
from kombu.asynchronous.timer import Timer
from kombu.utils.limits import TokenBucket

from celery_singleton_lock._celery import give_token_back

TASK = "shop.sync"

#: Its stubs leave out what is private.
_consumer: Any = consumer


class Limited:
    """What a consumer does about the rate limit of one task; its loop is `turn`."""

    _limit_order = 0
    _schedule_bucket_request = _consumer.Consumer._schedule_bucket_request
    limit_task = _consumer.Consumer._limit_task

    def __init__(self, per_second: float) -> None:
        self.timer, self.begun = Timer(), deque[int]()
        self.bucket: Any = TokenBucket(per_second, capacity=1)
        self.task_buckets: defaultdict[str, Any] = defaultdict(lambda: None, {TASK: self.bucket})
        self._due = iter(self.timer)

    def _limit_move_to_pool(self, request: int) -> None:
        self.begun.append(request)

    def turn(self) -> None:
        """Do what is due now."""
        while (entry := next(self._due)[1]) is not None:
            entry()


def test_a_backlog_of_refused_messages_leaves_no_timer_for_each() -> None:
    limited = Limited(per_second=0.001)
    for number in range(4):  # As many as are prefetched.
        limited.limit_task(number, limited.bucket, 1)
    for number in range(4, 200):
        limited.begun.popleft()  # It is refused at once, and the next message comes.
        give_token_back(limited, TASK)
        limited.turn()
        limited.limit_task(number, limited.bucket, 1)
    assert len(limited.timer) <= 5
    assert len(limited.bucket.contents) == 3


def test_what_waits_begins_when_there_is_a_token_though_timers_are_shared() -> None:
    limited = Limited(per_second=100)
    give_token_back(limited, TASK)
    limited.turn()
    for number in range(20):
        limited.limit_task(number, limited.bucket, 1)
    while len(limited.begun) < 20:
        limited.turn()
    assert [*limited.begun] == [*range(20)]
    assert not limited.bucket.contents
    assert not len(limited.timer)
