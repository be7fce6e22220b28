"""What the scripts are asked, and what their answers mean: for one server, a cluster, and each node of a Redlock.

One key per lock, `<base>:run`, holding the owner and who that is (the slots of a semaphore beyond the first are
`<base>:run:1` and so on; `:slots` says how many are in use, where that is more than one). Beside it, all with a time to
live and all in one hash slot: `:fence` (the counter of fencing tokens), `:waiting` (who waits), `:wake` (a list that a
release pushes to, so that exactly one waiter wakes), `:done:<message>` for each message that was carried out, and
`:over:<owner>` for an owner that was given up, `:over:<request>` for a request that was. Beside the lock of beat's
leader there are `:ledger` (a hash of the last run of each entry), `:claim:<entry>:` for what is being sent,
`:gone:<entry>:` with the last run of an entry that was just removed, and `:secret`, of which the ids of ticks are made.

A request whose answer did not come may be carried out later, when whoever sent it has long turned away. So each request
for a lock has a name, and what comes next says which were given up: they take nothing any more.

Of all locks there is one journal: `<prefix>:{journal}` with `:counts`, `:labels` (those of the counts whose names come
from messages, by when they grew), `:entries` (a stream), `:last` (the last run of each key) and `:refused` (how often
in a row).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import RedisError

from celery_singleton_lock import clock
from celery_singleton_lock.holder import FIRST, OWNER_LENGTH, STEM_LENGTH, Holder, stem
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.journal import MAX_LABELS, Written
from celery_singleton_lock.stores.ledger import MEMORY
from celery_singleton_lock.stores.redis import keyspace

#: Seconds that ":waiting" outlives the last look of a waiter: longer than `bell.SLICE`, so that it is never missed.
#: It holds who looked, and when by the clock of their host: that is for people.
WAITING_TTL = 6.0

#: Seconds that an unclaimed wake-up is kept.
WAKE_TTL = 1.0

#: Seconds that a fence counter is kept after the last acquire. Without it the next one starts at the server's time,
#: which is higher as long as that clock was not set back by more than this.
FENCE_TTL = 3600.0

#: Seconds at least for which it is known what was given up: until the server has read what was sent of it, or seen that
#: its connection is closed.
OVER_TTL = 60.0

#: Seconds that a lock which is handed to a waiter is held for it, until it has said that it is there: what a waiter
#: costs the others that is frozen, or cannot be reached.
PROVISIONAL = 1.0

#: What the record of a promise begins with; see `refuse_vote`.
PROMISE = b"?"

#: Slots of one key that are looked at, at most.
MAX_SLOTS = 10_000

#: Leases, or entries of beat's, in one call of a script, which blocks the server for as long as it runs.
BATCH = 200

#: Names that an owner's attempts can have.
ATTEMPTS = 16 ** (OWNER_LENGTH - STEM_LENGTH)

#: Seconds for which beat's last runs are kept: more than a year, which is the longest crontab.
LEDGER_TTL = 40_000_000.0

#: Seconds for which the journal is kept after it was written to: 30 days.
JOURNAL_TTL = 2_592_000.0

#: Keys of which the journal knows the last run, and how often in a row a copy was refused.
KEYS_REMEMBERED = 10_000

#: Seconds for which a node of a Redlock remembers since when it remembers: ten years.
MEMORY_TTL = 315_360_000.0


L = TypeVar("L")

#: A command's name and arguments: texts, bytes and numbers.
Command = tuple[Any, ...]


class Script:
    """One or more `.lua` files in a row, known to a server by their digest."""

    def __init__(self, *names: str) -> None:
        folder = files(__package__).joinpath("scripts")
        lines = [line.strip() for name in names for line in folder.joinpath(f"{name}.lua").read_bytes().splitlines()]
        # Without comments: a server reads and hashes the text each time that a waiter is woken.
        self.text = b"\n".join(line for line in lines if line and not line.startswith(b"--"))
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


class Call(NamedTuple):
    """A script with its keys and arguments; `keys[0]` says which slot of a cluster it is for.

    Attributes:
        replicas: how many replicas must have what it wrote, and how many seconds they get for it.
        later: makes what is to be said instead where it is said later; None where that is the same.
    """

    script: Script
    keys: Sequence[str]
    args: Sequence[object]
    replicas: tuple[int, float] | None = None
    later: Callable[[], Call] | None = None

    @property
    def by_digest(self) -> Command:
        """The command for a server that knows the script."""
        return "EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.args

    @property
    def load(self) -> Command:
        """The command that makes it known."""
        return "SCRIPT", "LOAD", self.script.text

    @property
    def and_wait(self) -> Command:
        """The command that waits for the replicas."""
        count, seconds = self.replicas or (0, 0.0)
        return "WAIT", count, _ms(seconds)

    @property
    def by_text(self) -> Command:
        """The command for one that does not; it does afterwards."""
        return "EVAL", self.script.text, len(self.keys), *self.keys, *self.args


_ACQUIRE, _FREE, _RENEW = Script("now", "acquire"), Script("free"), Script("renew")
_VOTE, _PUT_BACK, _RAISE, _WAKE = Script("now", "vote", "acquire"), Script("put_back"), Script("raise"), Script("wake")

_ALIGN, _FORGET, _CLAIM, _RECORD = Script("align"), Script("forget"), Script("claim"), Script("record")
_SECRET, _UNCLAIM = Script("secret"), Script("unclaim")
_WRITE, _QUEUED = Script("now", "write"), Script("now", "queued", "acquire")
_REFUSE, _REPLACE, _TAKE_BACK = Script("refuse"), Script("replace"), Script("take_back")

#: The scripts that the nodes of a Redlock run.
OF_A_NODE = (
    *(_VOTE, _RENEW, _FREE, _PUT_BACK, _RAISE, _WAKE),
    *(_ALIGN, _FORGET, _CLAIM, _RECORD, _SECRET, _UNCLAIM),
    *(_REFUSE, _REPLACE, _TAKE_BACK),
)


class GivenUp(RedisError):
    """The owner, or the request, was given up before the server came to carry it out."""


class MoreSlots(Exception):
    """There are holds in slots that were not named.

    Attributes:
        slots: how many to name.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.slots = min(slots, MAX_SLOTS)


def waiting_since() -> Command:
    """The range of `:waiting` in which those are who still wait."""
    return _ms(clock.wall() - WAITING_TTL), "+inf"


def acquire(
    request: LockRequest,
    name: str,
    *,
    slots: int = 0,
    late: Sequence[str] = (),
    replicas: tuple[int, float] | None = None,
) -> Call:
    """See `LockStore.acquire`.

    Args:
        request: what is asked for.
        name: of this one question; a secret.
        slots: how many to look at; `limit` at least.
        late: questions of the same owner that were not answered. They come too late from now on.
        replicas: see `Call`.
    """
    key, owner, ttl, holder, given_up = request.key, request.owner, request.ttl, request.holder, request.given_up
    slots = max(slots, request.limit)
    keys = [keyspace.fence_key(key), keyspace.waiting_key(key), keyspace.done_key(key, holder.message)]
    keys += [keyspace.run_key(key, slot) for slot in range(slots)]
    keys += [keyspace.slots_key(key), keyspace.over_key(key, owner), keyspace.over_key(key, name)]
    keys += [keyspace.wake_key(key), *(keyspace.over_key(key, each) for each in (*late, *given_up))]
    sending = _beginning_of_copies(holder) if slots > 1 else ""
    waiter = (_ms(WAITING_TTL), _ms(clock.wall())) if request.waiting else (0, 0)
    args = [owner, _reserved_as(holder), holder.dumps(ttl), _ms(ttl), fence_ms(ttl), *waiter, sending]
    args += [int(request.once), slots, "", "", request.limit, "".join(given_up), over_ms(ttl)]
    args += [len(late) + len(given_up), _ms(WAKE_TTL), 0]
    return Call(_ACQUIRE, keys, args, replicas)


def queue(request: LockRequest, place: str) -> Call:
    """As `acquire`, to be carried out when the waiter at this place is woken; what it gives is to be confirmed."""
    call = acquire(replace(request, waiting=True, given_up=()), place)
    args = [*call.args]
    args[3], args[-1] = _ms(min(request.ttl, PROVISIONAL)), 1
    return Call(_QUEUED, call.keys, args)


def queued(answer: Sequence[Any], granted: Callable[[int, int], L], message: str) -> L | Held | Record | None:
    """What a `queue` was answered; None if that says nothing: ask."""
    return None if answer[0] in (4, 5) else found(answer, granted, message)


def undo(hold: Hold, value: str, requests: Sequence[str]) -> Call:
    """Have these requests take nothing any more, and end a hold whose value begins like this."""
    return _freed(hold, value, None, None, over=requests, wake=WAKE_TTL)


def vote(request: LockRequest, *, slot: int, memory: str | None, slots: int = 0) -> Call:
    """As `acquire`, for one slot on one node of a Redlock.

    Args:
        request: its owner with the number of the attempt, see `attempt_of`.
        slot: which one to take.
        memory: the key by which a node knows since when it remembers; None to trust it as it is.
        slots: how many to look at.
    """
    owner, given_up = stem(request.owner), [stem(name) for name in request.given_up]
    call = acquire(replace(request, owner=owner, given_up=given_up), request.owner, slots=slots)
    args = [*call.args, _ms(MEMORY_TTL) if memory else 0]
    args[1], args[2] = stem(str(args[1])), request.owner[STEM_LENGTH:] + str(args[2])
    # One seed for all nodes, or their counters would differ, and had to be made equal before a token is given out.
    args[10:12] = slot, round(clock.wall() * 1_000_000)
    over = (keyspace.over_key(request.key, owner), keyspace.over_key(request.key, request.owner))
    return Call(_VOTE, [*call.keys, *over, memory or over[0]], args)


def attempt_of(owner: str, number: int) -> str:
    """An owner's name in one attempt to get a majority; `attempt_of(owner, 0)` is the same for all of its attempts.

    A request of an attempt that was given up may arrive when the next one is under way: neither it nor its undoing may
    touch what the next one has got.
    """
    return f"{stem(owner)}{number % ATTEMPTS:0{OWNER_LENGTH - STEM_LENGTH}x}"


def _reserved_as(holder: Holder) -> str:
    """The owner under which the lock may be reserved for it; empty where nobody can have done that."""
    return holder.reserved_as if holder.attempt > FIRST else ""


def _beginning_of_copies(holder: Holder) -> str:
    """How the holder begins, behind the owner, where another message of the same sending has the lock."""
    return f"[{json.dumps(holder.sending)}," if holder.sending else ""


def free_vote(
    hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None, repeated: bool = False
) -> Call:
    """As `free`, on one node of a Redlock: in whatever attempt it was taken, and for good. Wakes nobody.

    However late a node is told, what that leaves behind ends when it would have.
    """
    owner, began = stem(hold.owner), clock.now()

    def later() -> Call:
        late = clock.now() - began
        left, kept = record and record.after(late), reservation and reservation.after(late)
        return free_vote(hold, record=left, reservation=kept, repeated=True)

    call = _freed(hold, owner, record, reservation, over=(owner,), wake=0, over_for=hold.ttl, repeated=repeated)
    return call._replace(later=later)


def abandon_vote(hold: Hold) -> Call:
    """As `free_vote`, for an acquire that was given up: whatever of it arrives later takes nothing."""
    owner = stem(hold.owner)
    return _freed(hold, owner, None, None, over=(owner,), wake=0)


def undo_vote(hold: Hold, attempt: str) -> Call:
    """Take back one attempt, on one node of a Redlock; what is left of it comes too late from now on."""
    return _freed(hold, attempt, None, None, over=(attempt,), wake=0)


def free(
    hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None, repeated: bool = False
) -> Call:
    """See `LockStore.free`.

    Args:
        hold, record, reservation: what to end, and to leave behind.
        repeated: it may have been carried out already, and others have acted upon that.
    """
    return _freed(hold, hold.owner, record, reservation, over=(), wake=WAKE_TTL, repeated=repeated)


def abandon(hold: Hold) -> Call:
    """See `LockStore.abandon`."""
    return _freed(hold, hold.owner, None, None, over=(hold.owner,), wake=WAKE_TTL)


def _freed(
    hold: Hold,
    value: str,
    record: Record | None,
    reservation: Reservation | None,
    *,
    over: Sequence[str],
    wake: float,
    over_for: float | None = None,
    repeated: bool = False,
) -> Call:
    key, places = hold.key, keyspace.places_of(hold)
    done = keyspace.done_key(key, record.message if record else "")
    next_done = keyspace.done_key(key, reservation.holder.message) if reservation else done
    keys = [keyspace.waiting_key(key), keyspace.wake_key(key), done, next_done, keyspace.slots_key(key), *places]
    keys += [keyspace.over_key(key, name) for name in over]
    args: list[object] = [value, _ms(wake) if wake else 0, "", 0, "", 0]
    args += [over_ms(hold.ttl) if over_for is None else _ms(over_for), hold.limit, len(places), int(repeated)]
    if record is not None:
        args[2:4] = record.content, _ms(record.seconds)
    if reservation is not None:
        holder = reservation.holder
        args[4:6] = holder.reserved_as + holder.dumps(), _ms(reservation.seconds)
    return Call(_FREE, keys, args)


def refuse(key: str, holder: Holder, record: Record, *, slots: int) -> Call:
    """See `LockStore.refuse`."""
    keys = [
        keyspace.done_key(key, record.message),
        keyspace.slots_key(key),
        *(keyspace.run_key(key, slot) for slot in range(slots)),
    ]
    args = [
        record.content,
        _ms(record.seconds),
        _reserved_as(holder),
        _beginning_of_copies(holder),
        holder.retries,
        holder.replaced,
    ]
    return Call(_REFUSE, keys, args)


def refuse_vote(key: str, holder: Holder, record: Record, *, slots: int) -> Call:
    """As `refuse`, on one node of a Redlock.

    A record on a minority of the nodes would look like the message's end, and be none. So it is promised first: a
    record that begins with `PROMISE`.
    """
    call = refuse(key, holder, record, slots=slots)
    return Call(call.script, call.keys, [*call.args[:2], stem(str(call.args[2])), *call.args[3:]])


def take_back(key: str, record: Record) -> Call:
    """Forget a refusal on one node of a Redlock."""
    return Call(_TAKE_BACK, [keyspace.done_key(key, record.message)], [record.content])


def refused(answer: Sequence[Any], message: str) -> Held | Record | None:
    """What a `refuse` was answered."""
    return None if answer[0] == 1 else found(answer, lambda *_: None, message)


def replace_records(records: Sequence[tuple[str, Record]]) -> Call:
    """See `LockStore.replace_records`."""
    keys = [keyspace.done_key(key, record.message) for key, record in records]
    return Call(_REPLACE, keys, [arg for _, record in records for arg in (record.content, _ms(record.seconds))])


def renew(holds: Sequence[Hold]) -> Call:
    """Renew some holds in one call; see `renewed` for the answer."""
    pairs = [pair for hold in holds for pair in _renewals(hold)]
    return Call(_RENEW, [place for place, _, _ in pairs], [arg for _, *pair in pairs for arg in pair])


def renewed(holds: Sequence[Hold], answer: Any) -> list[bool]:
    """Which of the holds in a `renew` are still ours."""
    answers = iter(answer)
    return [1 in [next(answers) for _ in _renewals(hold)] for hold in holds]


def _renewals(hold: Hold) -> list[tuple[str, str, int]]:
    """Keys that live on with a hold, each with the owner that must be there (or none), and milliseconds."""
    keys = [(place, hold.owner, _ms(hold.ttl)) for place in keyspace.places_of(hold)]
    if hold.limit > 1 and hold.slot != 0:
        keys.append((keyspace.slots_key(hold.key), "", _ms(hold.ttl)))
    return keys


def renew_vote(holds: Sequence[Hold]) -> Call:
    """As `renew`, on one node of a Redlock: in whatever attempt they were taken."""
    call = renew(holds)
    return Call(call.script, call.keys, [stem(arg) if isinstance(arg, str) else arg for arg in call.args])


def put_back(holds: Sequence[Hold]) -> Call:
    """Give one node of a Redlock what it has lost; the slots of the holds must be known."""
    keys = [
        key
        for it in holds
        for key in (keyspace.run_key(it.key, it.slot or 0), keyspace.over_key(it.key, stem(it.owner)))
    ]
    return Call(_PUT_BACK, keys, [arg for it in holds for arg in (attempt_of(it.owner, 0), _ms(it.ttl))])


def raise_fence(key: str, owner: str, *, slot: int, fence: int, ttl: float) -> Call:
    """Lift the counter of fencing tokens on one node to `fence`, if the lock is ours there."""
    return Call(_RAISE, [keyspace.fence_key(key), keyspace.run_key(key, slot)], [stem(owner), fence, fence_ms(ttl)])


def wake(key: str, *, limit: int) -> Call:
    """Wake a waiter; there are never more wake-ups than may hold the lock."""
    return Call(_WAKE, [keyspace.wake_key(key)], [_ms(WAKE_TTL), limit])


def wake_another(key: str) -> Call:
    """Pass a wake-up on that was taken from the list; so there are no more than there were, and none is thrown away."""
    return Call(_WAKE, [keyspace.wake_key(key)], [_ms(WAKE_TTL), 0])


def align(key: str, lasts: Mapping[str, int], *, ceiling: int) -> Call:
    """See `Ledger.align`."""
    return Call(_ALIGN, [keyspace.ledger_key(key)], [_ms(LEDGER_TTL), ceiling, *_pairs(lasts)])


def forget(key: str, gone: Sequence[bytes]) -> Call:
    """Have a ledger forget some entries, but for who claims within `MEMORY`."""
    keys = [keyspace.ledger_key(key), *keyspace.gone_keys(key, (entry.decode(errors="replace") for entry in gone))]
    return Call(_FORGET, keys, [_ms(MEMORY), *gone])


def write(
    prefix: str,
    size: int,
    counts: Mapping[str, int],
    entries: Sequence[Entry],
    slack: float,
    coarse: Mapping[str, str],
) -> Call:
    """See `Journal.write`."""
    keys = [
        keyspace.journal_key(prefix, part) for part in ("counts", "entries", "last", "refused", "labels", "scratch")
    ]
    args: list[object] = [_ms(JOURNAL_TTL), size, KEYS_REMEMBERED, MAX_LABELS, len(counts)]
    args += [arg for name, count in counts.items() for arg in (name, coarse.get(name, ""), count)]
    for it in entries:
        times = (round(it.began * 1000), round(it.ended * 1000), round(slack * 1000, 3))
        args += [_treated_as(it), it.key, *times, it.fence, it.dumps()]
    return Call(_WRITE, keys, args)


def written(answer: Any) -> Written:
    """What a `write` has found."""
    now, rows, overlaps = answer
    return Written(now / 1_000_000, rows, [Entry.loads(overlap) if overlap else None for overlap in overlaps])


def _treated_as(entry: Entry) -> str:
    if entry.kind == "run":
        return "run" if entry.limit == 1 else "turn"
    return "refusal" if entry.kind in REFUSALS else "note"


def claim(key: str, lasts: Mapping[str, int], owner: str, *, ttl: float, ceiling: int) -> Call:
    """See `Ledger.claim`."""
    keys = [
        keyspace.ledger_key(key),
        keyspace.over_key(key, owner),
        *keyspace.claim_keys(key, lasts),
        *keyspace.gone_keys(key, lasts),
    ]
    return Call(_CLAIM, keys, [owner, _ms(ttl), ceiling, *_pairs(lasts)])


def record(key: str, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> Call:
    """See `Ledger.record`."""
    return Call(
        _RECORD,
        [keyspace.ledger_key(key), *keyspace.claim_keys(key, lasts)],
        [owner, _ms(LEDGER_TTL), ceiling, *_pairs(lasts)],
    )


def unclaim(key: str, entries: Sequence[str], owner: str) -> Call:
    """See `Ledger.unclaim`."""
    return Call(_UNCLAIM, [keyspace.over_key(key, owner), *keyspace.claim_keys(key, entries)], [owner, _ms(OVER_TTL)])


def secret(key: str, value: str, *, at_least: bool) -> Call:
    """Look at the secret of a schedule; with a value, make that the secret where there is none.

    Args:
        key: what the schedule's keys begin with.
        value: of the secret; empty to look only.
        at_least: also where there is a smaller one.
    """
    return Call(_SECRET, [keyspace.secret_key(key)], [value, _ms(LEDGER_TTL), int(at_least)])


def held(value: bytes, pttl: int) -> Held:
    """What a lock's value and its remaining milliseconds say."""
    owner, holder = value[:OWNER_LENGTH].decode(errors="replace"), Holder.loads(value[OWNER_LENGTH:])
    return Held(holder, owner, float("inf") if pttl == -1 else max(pttl, 0) / 1000)


def found(answer: Sequence[Any], granted: Callable[[int, int], L], message: str) -> L | Held | Record:
    """What an acquire was answered for a message; `granted` makes a lease of the fence and the slot."""
    kind, *rest = answer
    if kind == 1:
        return granted(rest[0], rest[1])
    if kind == 4:
        raise GivenUp("this owner, or this request, was given up before the server came to carry it out")
    if kind == 5:
        raise MoreSlots(rest[0])
    if kind == 0:
        return replace(held(rest[0], rest[1]), slot=rest[2])
    return Record(message, rest[0], max(rest[1], 0) / 1000)


def over_ms(ttl: float) -> int:
    """How long it is known that an owner of this ttl, or a request, was given up."""
    return _ms(max(ttl, OVER_TTL))


def fence_ms(ttl: float) -> int:
    """How long a fence counter is kept for a lock with this ttl."""
    return _ms(max(FENCE_TTL, 2 * ttl))


def _pairs(lasts: Mapping[str, int]) -> list[object]:
    return [part for pair in lasts.items() for part in pair]


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 1)
