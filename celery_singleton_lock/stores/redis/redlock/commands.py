"""Calls for each node of a Redlock: as in `lock_commands`, in attempts to get a majority.

The last characters of an owner's token name the attempt; the token without them, its stem, is the same in all of the
owner's attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from celery_singleton_lock import chance, clock
from celery_singleton_lock.holder import OWNER_LENGTH, STEM_LENGTH, Holder, new_owner, stem
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis.lock_answers import answers_vote
from celery_singleton_lock.stores.redis.script import Call, Script, are_texts, ms

#: Names that an owner's attempts can have.
ATTEMPTS = 16 ** (OWNER_LENGTH - STEM_LENGTH)

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


def attempt_of(owner: str, number: int) -> str:
    """An owner's name in one attempt to get a majority; `attempt_of(owner, 0)` is the same for all of its attempts.

    A request of an attempt that was given up may arrive when the next one is under way: neither it nor its undoing may
    touch what the next one has got.
    """
    return f"{stem(owner)}{number % ATTEMPTS:0{OWNER_LENGTH - STEM_LENGTH}x}"


def next_attempt(request: LockRequest) -> str:
    """A name for another attempt, which the owner has not used lately: what undoes an old one may be on its way."""
    last = next(reversed(request.attempts), None)
    number = chance.randrange(ATTEMPTS) if last is None else int(last[STEM_LENGTH:], 16) + 1
    return attempt_of(request.owner, number % ATTEMPTS or 1)


def vote(request: LockRequest, *, memory: str | None, late: Sequence[str] = ()) -> Call:
    """As `lock_commands.acquire`.

    Args:
        request: its owner with the number of the attempt, see `attempt_of`.
        memory: the key that says since when a node remembers; None to trust it as it is.
        late: attempts of the same owner that some node has not answered. They come too late from now on: what undoes
            them may be on another connection, behind this.
    """
    of_all = request.named(stem(request.owner), [stem(owner) for owner in request.given_up])
    keys, args = lock_commands.question(of_all, attempt=request.owner, late=late)
    args = args._replace(
        reserved_as=stem(args.reserved_as),
        holder=request.owner[STEM_LENGTH:] + args.holder,
        # One for all nodes, or their counters would differ, and have to be made equal before a token is given out.
        fence_seed=round(clock.wall() * 1_000_000),
        memory_ms=ms(MEMORY_TTL) if memory else 0,
    )
    return Call(VOTE, [*keys, memory] if memory else keys, lock_commands.without_defaults(args))


def free(hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> Call:
    """As `lock_commands.free`, whichever attempt took it, and for good. Wakes nobody."""
    owner, over_for = stem(hold.owner), ms(hold.ttl)
    return lock_commands.ending(
        hold, owner, record=record, reservation=reservation, over=(owner,), over_for=over_for, wakes=False
    )


def abandon(hold: Hold) -> Call:
    """As `free`, for an acquire that was given up: its late requests take nothing."""
    owner = stem(hold.owner)
    return lock_commands.ending(hold, owner, over=(owner,), wakes=False)


def undo(hold: Hold, attempt: str) -> Call:
    """Take back one attempt; what is left of it comes too late from now on."""
    return lock_commands.ending(hold, attempt, over=(attempt,), wakes=False)


def promise_of(record: Record, seconds: float) -> Record:
    """The promise to record this."""
    name = new_owner()[:PROMISE_NAME].encode()
    return record._replace(content=PROMISE + name + record.content, seconds=seconds)


def refuse(key: str, holder: Holder, record: Record, *, promise: Record | None = None) -> Call:
    """As `lock_commands.refuse`; with a promise, only a node that still has it takes the record in its place."""
    call = lock_commands.refuse(key, holder, record, named=stem)
    return call if promise is None else call._replace(args=[*call.args, promise.content])


def take_back(key: str, record: Record) -> Call:
    """Forget a refusal, or the promise of one."""
    return Call(TAKE_BACK, [keyspace.done_key(key, record.message)], [record.content])


def renew(holds: Sequence[Hold]) -> Call:
    """As `lock_commands.renew`, whichever attempt took them."""
    return lock_commands.renew(holds, named=_renewed_as)


def values(holds: Sequence[Hold]) -> Call:
    """Ask what a node keeps for these."""
    return Call(VALUES, [keyspace.run_key(it.key) for it in holds], [])


def value_for_none(hold: Hold, value: bytes) -> bytes | None:
    """What a node keeps for a hold, without the name of an attempt; None if it has nothing, or no holder, for it."""
    begins = stem(hold.owner).encode()
    holder = value[OWNER_LENGTH:]
    return attempt_of(hold.owner, 0).encode() + holder if holder and value.startswith(begins) else None


def put_back(holds: Sequence[Hold], values: Mapping[Hold, bytes]) -> Call:
    """Give a node what it has lost: these values, or at least the owners."""
    keys, args = list[str](), list[object]()
    for it in holds:
        keys += [keyspace.run_key(it.key), keyspace.over_key(it.key, stem(it.owner))]
        args += [values.get(it, attempt_of(it.owner, 0)), ms(it.ttl)]
    return Call(PUT_BACK, keys, args)


def raise_fence(key: str, owner: str, *, fence: int) -> Call:
    """Raise the counter of fencing tokens to `fence`, if the lock is held there."""
    args = [stem(owner), fence, ms(lock_commands.FENCE_TTL)]
    return Call(RAISE_FENCE, [keyspace.fence_key(key), keyspace.run_key(key)], args)


def _renewed_as(hold: Hold) -> str:
    """The owner; with a mark if nobody knows where it has the lock: it may be waiting for it, as far as is known here.

    Its attempts keep their names then: what a failed one has left somewhere would stay, as long as the owner asks.
    """
    return stem(hold.owner) if hold.slot is not None else f"{stem(hold.owner)}*"
