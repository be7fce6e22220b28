"""Calls for each node of a Redlock: as in `lock_commands`, and those of a vote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis.lock_answers import answers_vote
from celery_singleton_lock.stores.redis.script import Call, Script, are_texts, ms

#: Seconds for which a node of a Redlock remembers since when it remembers: ten years.
MEMORY_TTL = 315_360_000.0

#: The record of a promise begins with this. A refusal's record on a minority of the nodes would look like the message's
#: end without being it: so the refusal is promised first. Then follow characters that name the call: copies may be
#: refused with equal records, and none of them may take back what another one has promised.
PROMISE, PROMISE_NAME = b"?", 8

VOTE = Script(*lock_commands.TAKING, "lock/vote", "lock/acquire", answers=answers_vote)
PUT_BACK = Script("lock/put_back", answers=lambda answer: answer is None)
VALUES = Script("lock/values", answers=are_texts, each=lambda call: len(call.keys))
RAISE_FENCE, TAKE_BACK = Script("lock/raise_fence"), Script("lock/take_back")

#: The scripts that the nodes run.
SCRIPTS = (
    VOTE,
    PUT_BACK,
    VALUES,
    RAISE_FENCE,
    TAKE_BACK,
    lock_commands.FREE,
    lock_commands.RENEW,
    lock_commands.WAKE,
    lock_commands.REFUSE,
    lock_commands.REPLACE,
)


def vote(request: LockRequest, *, memory: str | None) -> Call:
    """As `lock_commands.acquire`.

    Args:
        request: what is asked for.
        memory: the key that says since when a node remembers; None to trust it as it is.
    """
    # One seed for all nodes, or their counters would differ, and have to be made equal before a token is given out.
    seed = round(clock.wall() * 1_000_000)
    keys, args = lock_commands.question(request, fence_seed=seed, memory_ms=ms(MEMORY_TTL) if memory else 0)
    return Call(VOTE, [*keys, memory] if memory else keys, lock_commands.without_defaults(args))


def free(hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> Call:
    """As `lock_commands.free`, for good. Wakes nobody."""
    return lock_commands.ending(
        hold,
        hold.owner,
        record=record,
        reservation=reservation,
        tombstones=(hold.owner,),
        tombstone_for=ms(hold.ttl),
        wakes=False,
    )


def abandon(hold: Hold) -> Call:
    """As `free`, for an acquire that was given up: its late requests take nothing."""
    return lock_commands.ending(hold, hold.owner, tombstones=(hold.owner,), wakes=False)


def promise_of(record: Record, seconds: float) -> Record:
    """The promise to record this."""
    name = new_owner()[:PROMISE_NAME].encode()
    return record._replace(content=PROMISE + name + record.content, seconds=seconds)


def refuse(key: str, holder: Holder, record: Record, *, promise: Record | None = None) -> Call:
    """As `lock_commands.refuse`; with a promise, only a node that still has it takes the record in its place."""
    call = lock_commands.refuse(key, holder, record)
    return call if promise is None else call._replace(args=[*call.args, promise.content])


def take_back(key: str, record: Record) -> Call:
    """Forget a refusal, or the promise of one."""
    return Call(TAKE_BACK, [keyspace.done_key(key, record.message)], [record.content])


def values(holds: Sequence[Hold]) -> Call:
    """Ask what a node keeps for these."""
    return Call(VALUES, [keyspace.run_key(it.key) for it in holds], [])


def put_back(holds: Sequence[Hold], values: Mapping[Hold, bytes]) -> Call:
    """Give a node what it has lost: these values, or at least the owners."""
    keys, args = list[str](), list[object]()
    for it in holds:
        keys += [keyspace.run_key(it.key), keyspace.tombstone_key(it.key, it.owner)]
        args += [values.get(it, it.owner), ms(it.ttl)]
    return Call(PUT_BACK, keys, args)


def raise_fence(key: str, owner: str, *, fence: int) -> Call:
    """Raise the counter of fencing tokens to `fence`, if the lock is held there."""
    args = [owner, fence, ms(lock_commands.FENCE_TTL)]
    return Call(RAISE_FENCE, [keyspace.fence_key(key), keyspace.run_key(key)], args)
