"""Calls of the scripts in `scripts/lock`: for one server or a cluster, and at the end for the nodes of a Redlock.

A request that was not answered may be carried out later, when its owner has long freed what another try has got. So
who ends such an owner leaves its tombstone: from then on the owner takes nothing.

Each script names its KEYS and ARGV at its top, in the same order as here; `docs/protocol.md` has the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.lock_answers import (
    PROMISE,
    answers_acquire,
    answers_next,
    answers_refusal,
    answers_release,
    answers_renewal,
)
from celery_singleton_lock.stores.redis.script import TOMBSTONE_TTL, Call, Script, are_texts, are_whole, ms
from celery_singleton_lock.stores.store import Place

#: Seconds that a wake-up is kept which nobody has read.
WAKE_TTL = 10.0

#: Seconds that the highest fence is kept after the last acquire. Without it the next one starts at the server's time,
#: which is higher as long as that clock was not set back by more than this.
FENCE_TTL = 600.0

#: Seconds for which a node of a Redlock remembers since when it remembers: ten years.
MEMORY_TTL = 315_360_000.0

#: The characters of a promise that name the call: copies may be refused with equal records, and none of them may take
#: back what another one has promised.
PROMISE_NAME = 8

_FENCE_MS = ms(FENCE_TTL)

_TAKING = "now", "lock/grant", "lock/answers", "lock/holds", "lock/line", "lock/request", "lock/newest"
ACQUIRE = Script(*_TAKING, "lock/acquire", answers=answers_acquire)
FREE = Script("now", "lock/holds", "lock/line", "lock/free", answers=answers_release)
NEXT = Script("now", "lock/line", "lock/next", answers=answers_next)
LOOK, PUSH = Script("now", "lock/holds", "lock/line", "lock/look"), Script("lock/push")
REFUSE = Script("now", "lock/answers", "lock/holds", "lock/refuse", answers=answers_refusal)
RENEW = Script("now", "lock/holds", "lock/renew", answers=answers_renewal, each=lambda call: len(call.keys))
REPLACE = Script("lock/replace_records", answers=are_whole, each=lambda call: len(call.keys))

#: For the nodes of a Redlock.
PUT_BACK = Script("lock/put_back", answers=lambda answer: answer is None)
VALUES = Script("lock/values", answers=are_texts, each=lambda call: len(call.keys))
RAISE_FENCE, TAKE_BACK = Script("lock/raise_fence"), Script("lock/take_back")


def without_defaults(args: Sequence[object]) -> Sequence[object]:
    """The arguments up to the last that says something: the script assumes that the others are 0 or empty."""
    count = len(args)
    while not args[count - 1]:
        count -= 1
    return args[:count]


def acquire(request: LockRequest, *, seed: int | str = "", memory: str | None = None) -> Call:
    """See `Store.acquire`.

    Args:
        request: what is asked for.
        seed: the least fence; empty: the server's time.
        memory: the key that says since when a node of a Redlock remembers; None to trust the server as it is.
    """
    key, holder, given_up, arrival = request.key, request.holder, request.given_up, request.arrival
    keys = [key + keyspace.FENCE, key + keyspace.TOMBSTONE + request.owner]
    if request.check_finished:
        keys.append(key + keyspace.DONE + holder.message)
    if request.since or request.waiting or arrival:
        keys += [key + keyspace.WAITING, key + keyspace.ASKED]
    if arrival:
        keys.append(key + keyspace.ORDER + arrival.order)
    keys.append(keyspace.run_key(key))
    keys += [key + keyspace.TOMBSTONE + each for each in given_up]
    if memory:
        keys.append(memory)
    args = [
        request.owner,
        holder.json_around_fence(request.ttl),
        ms(request.ttl),
        _FENCE_MS,
        int(request.check_finished),
        request.member if request.waiting else "",
        ms(request.since) if request.since else 0,
        holder.kept_as,
        seed,
        ms(MEMORY_TTL) if memory else 0,
        request.limit - 1,
        tombstone_ms(request.ttl) if given_up or request.late else 0,
        *((holder.order_member, arrival.number or "", ms(arrival.seconds)) if arrival else ("", "", 0)),
        arrival.order if arrival and arrival.stops else "",
        int(request.late),
    ]
    return Call(ACQUIRE, keys, without_defaults(args))


def free(
    hold: Hold,
    *,
    record: Record | None = None,
    reservation: Reservation | None = None,
    for_good: bool = False,
    wakes: bool = True,
    repeated: bool = False,
) -> Call:
    """See `Store.free`.

    However late it is sent (`Call.again`), what it leaves behind ends at the same time: from a record's remaining time,
    its reader sees how long ago the body ended.

    Args:
        hold: what to end.
        record, reservation: what to leave behind.
        for_good: whether the owner takes nothing any more, and gets a tombstone.
        wakes: whether a waiter is woken.
        repeated: whether it may have been carried out before: then it replaces no other record.
    """
    key = hold.key
    keys = [key + keyspace.WAITING, key + keyspace.ASKED]
    if record is not None:
        keys.append(key + keyspace.DONE + record.message)
    if reservation is not None:
        keys.append(key + keyspace.DONE + reservation.holder.message)
    keys.append(keyspace.run_key(key))
    if for_good:
        keys.append(key + keyspace.TOMBSTONE + hold.owner)
    args: list[object] = [
        hold.owner,
        int(wakes),
        *((record.content, ms(record.seconds)) if record else ("", 0)),
        int(repeated),
        *((_reserved(reservation.holder), ms(reservation.seconds)) if reservation else ("", 0)),
        tombstone_ms(hold.ttl) if for_good else 0,
    ]
    if record is None and reservation is None:
        return Call(FREE, keys, without_defaults(args))
    began = clock.now()

    def later() -> Call:
        late = clock.now() - began
        return free(
            hold,
            record=record and record.after(late),
            reservation=reservation and reservation.after(late),
            for_good=for_good,
            wakes=wakes,
            repeated=True,
        )

    return Call(FREE, keys, without_defaults(args), later=later)


def abandon(hold: Hold, *, wakes: bool = True) -> Call:
    """See `Store.abandon`."""
    return free(hold, for_good=True, wakes=wakes)


def refuse(key: str, holder: Holder, record: Record, *, promise: Record | None = None) -> Call:
    """See `Store.refuse`; with a promise, only a node that still has it takes the record in its place."""
    keys = [key + keyspace.DONE + record.message, keyspace.run_key(key)]
    copies = holder.kept_as, _beginning_of_copies(holder), holder.retries, holder.replaced
    promised = [] if promise is None else [promise.content]
    return Call(REFUSE, keys, [record.content, ms(record.seconds), *copies, *promised])


def recorded(key: str, message: str) -> Call:
    return Call(REFUSE, [key + keyspace.DONE + message], [])


def replace_records(records: Sequence[tuple[str, Record]]) -> Call:
    keys = [key + keyspace.DONE + record.message for key, record in records]
    return Call(REPLACE, keys, [arg for _, record in records for arg in (record.content, ms(record.seconds))])


def renew(holds: Sequence[Hold], ttls: Mapping[Hold, float]) -> Call:
    """Renew some holds in one call, each for this ttl; see `renewed` for the answer."""
    keys = [keyspace.run_key(hold.key) for hold in holds]
    return Call(RENEW, keys, [arg for hold in holds for arg in (hold.owner, _ttl_ms(hold, ttls[hold]))])


def renewed(holds: Sequence[Hold], answer: Any) -> list[bool]:
    """Which of the holds in a `renew` are still held."""
    return [one != 0 for _, one in zip(holds, answer, strict=True)]


def superseded(holds: Sequence[Hold], answer: Any) -> list[str | None]:
    """The task for which each of the holds in a `renew` is to end; None if it is not to end."""
    each = zip(holds, answer, strict=True)
    return [cleaned.text(one.decode(errors="replace")) if isinstance(one, bytes) else None for _, one in each]


def next_waiter(key: str, leaves: str = "", *, wakes: bool = True) -> Call:
    """Ask whom to wake; before that, this member leaves its place.

    Args:
        key: the lock.
        leaves: the member; '' if none leaves.
        wakes: whether the next one is woken in any case, and not only if this member was.
    """
    return Call(NEXT, [key + keyspace.WAITING, key + keyspace.ASKED], [leaves, int(wakes)])


def push(member: str) -> Call:
    """Wake a waiter."""
    mailbox, _, name = member.rpartition("|")
    return Call(PUSH, [mailbox], [name, ms(WAKE_TTL)])


def look(place: Place, member: str) -> Call:
    """See `Store.look`."""
    keys = [keyspace.run_key(place.key), place.key + keyspace.WAITING, place.key + keyspace.ASKED]
    return Call(LOOK, keys, [member, ms(place.since), place.copies, place.limit])


def tombstone_ms(ttl: float) -> int:
    """How long it is remembered that an owner of this ttl was given up."""
    return ms(max(ttl, TOMBSTONE_TTL))


def vote(request: LockRequest, *, memory: str | None) -> Call:
    """As `acquire`, for a node of a Redlock."""
    # One seed for all nodes, or their counters would differ, and have to be made equal before a token is given out.
    return acquire(request, seed=round(clock.wall() * 1_000_000), memory=memory)


def promise_of(record: Record, seconds: float) -> Record:
    """The promise to record this."""
    name = new_owner()[:PROMISE_NAME].encode()
    return record._replace(content=PROMISE + name + record.content, seconds=seconds)


def take_back(key: str, record: Record) -> Call:
    """Forget a refusal, or the promise of one."""
    return Call(TAKE_BACK, [key + keyspace.DONE + record.message], [record.content])


def values(holds: Sequence[Hold]) -> Call:
    """Ask what a node keeps for these."""
    return Call(VALUES, [keyspace.run_key(it.key) for it in holds], [])


def put_back(holds: Sequence[Hold], values: Mapping[Hold, bytes]) -> Call:
    """Give a node what it has lost: these values, or at least the owners."""
    keys, args = list[str](), list[object]()
    for it in holds:
        keys += [keyspace.run_key(it.key), it.key + keyspace.TOMBSTONE + it.owner]
        args += [values.get(it, it.owner), ms(it.ttl)]
    return Call(PUT_BACK, keys, args)


def raise_fence(key: str, owner: str, *, fence: int) -> Call:
    """Raise the counter of fencing tokens to `fence`, if the lock is held there."""
    args = [owner, fence, ms(FENCE_TTL)]
    return Call(RAISE_FENCE, [key + keyspace.FENCE, keyspace.run_key(key)], args)


def _ttl_ms(hold: Hold, ttl: float) -> int | str:
    """The ttl as `renew.lua` wants it."""
    return f"+{ms(ttl)}" if hold.only_longer else ms(ttl)


def _reserved(holder: Holder) -> str:
    """The value of a lock that is reserved for this holder's message."""
    return holder.reserved_as + holder.dumps()


def _beginning_of_copies(holder: Holder) -> str:
    """How the holder begins, behind the owner, if another message of the same sending has the lock."""
    return f"[{json.dumps(holder.sending)}," if holder.sending else ""
