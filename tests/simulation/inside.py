"""The package's inside, as far as the simulator knows it: names of modules and attributes, and the formats of headers
and keys. Nothing else in the simulator names them.

A name or a format that has changed fails the simulation at once, and says which one: nobody reads a missing name as
"nothing there", so that no checker goes blind.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from celery import states

from celery_singleton_lock.holder import OWNER_LENGTH
from celery_singleton_lock.in_bulk import UNCONFIRMED_TTL
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.lock_commands import MEMORY_TTL
from celery_singleton_lock.stores.redis.nodes import MAX_PAUSE as PAUSE_OF_NODE
from celery_singleton_lock.stores.redis.script import ms
from celery_singleton_lock.stores.waiters import LOOK as SLICE
from celery_singleton_lock.task import message as messages
from celery_singleton_lock.task.queue_lock import SOON
from celery_singleton_lock.trust import STEP_SHARE
from celery_singleton_lock.worker.line import LOOK as REFRESH
from celery_singleton_lock.worker.line import MAX_PAUSE
from tests.simulation.scheduler import active

Part = TypeVar("Part")

#: For the checkers. A node of a Redlock that did not answer is left alone for `PAUSE_OF_NODE`.
__all__ = (
    "MAX_PAUSE",
    "MEMORY_TTL",
    "PAUSE_OF_NODE",
    "REFRESH",
    "SLICE",
    "SOON",
    "STEP_SHARE",
    "UNCONFIRMED_TTL",
    "ms",
)


class UnknownInside(AssertionError):
    """The package's inside is not as the simulator knows it."""


def attribute(of: Any, name: str) -> Any:
    """An attribute that must be there."""
    try:
        return getattr(of, name)
    except AttributeError:
        raise _unknown(f"{type(of).__name__} has no {name}") from None


def assign(of: Any, name: str, value: Any) -> None:
    """Set an attribute that must be there already."""
    attribute(of, name)
    setattr(of, name, value)


def module(package: Any, name: str) -> Any:
    """A module of a copy of the package, which must have been imported by now."""
    try:
        return sys.modules[f"{package.name}.{name}"]
    except KeyError:
        raise _unknown(f"the package has no {name}") from None


def public(package: Any, name: str) -> Any:
    """What a copy of the package has under a public name."""
    return attribute(sys.modules[package.name], name)


# Headers


class Target(NamedTuple):
    """The attempt of a message as which another one is to end."""

    task_id: str
    sending: str
    replaced: int
    retries: int
    since: float
    goes_on: bool
    sent: float


class Waits(NamedTuple):
    """The lock that a copy waits for."""

    key: str
    limit: int


@dataclass(frozen=True, slots=True)
class PutBack:
    """What a copy that was put back carries."""

    retries: int | None = None
    conflict: int = 0
    unavailable: int = 0
    follows: int = 0
    given_up: Sequence[str] = ()
    waits: Waits | None = None
    joins: Target | None = None
    leader: Target | None = None
    since: float | None = None
    arrived: int | None = None
    redelivered: bool = False
    exchange: str | None = None
    routing_key: str | None = None


@dataclass(frozen=True, slots=True)
class QueueLock:
    """The lock that a message brings."""

    task: str
    key: str
    owner: str
    seconds: float
    limit: int
    scope: str
    number: int | None = None
    replaces: bool = False
    follows: Target | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What a message carries."""

    id: str | None = None
    sent: str | None = None
    queue: QueueLock | None = None
    put_back: PutBack | None = None
    due: float | None = None
    entry: str | None = None


_TARGET = re.compile(r"\['m\d+', '[0-9a-f]+', 0, \d+, \d+\.\d+, (True|False), \d+\.\d+\]")

#: The parts that are lists, and what is in each place: an exchange of two places is seen.
LISTS = {
    "joins": (Target, _TARGET),
    "waits": (Waits, re.compile(r"\['[^']*:[^']*', \d+\]")),
    "leader": (Target, _TARGET),
    "queue": (
        QueueLock,
        re.compile(
            r"\['shop\.\w+', '[^']*:queue', '[0-9a-f]{32}', [\d.]+, \d+, '[a-z_]+'"
            r"(, (None|\d+), (True|False)(, \['.+\])?)?\]"
        ),
    ),
}


def header_of(headers: Mapping[str, Any]) -> Header:
    """What a message with these headers carries."""
    parts = dict(messages.carried_in(headers))
    if "queue" in parts:
        parts["queue"] = lock = _listed("queue", parts["queue"])
        if lock.follows is not None:
            parts["queue"] = replace(lock, follows=_listed("leader", lock.follows))
    if "put_back" in parts:
        put_back = parts["put_back"]
        parts["put_back"] = _made(PutBack, **{it: _listed(it, put_back[it]) for it in put_back})
    return _made(Header, **parts)


def put_back_of(headers: Mapping[str, Any]) -> PutBack:
    """What a copy with these headers carries; nothing, if its message was not put back."""
    return header_of(headers).put_back or PutBack()


def lock_in(headers: Mapping[str, Any]) -> QueueLock | None:
    """The lock that a message with these headers brings."""
    return header_of(headers).queue


def header_with(task_id: str, lock: QueueLock) -> dict[str, Any]:
    """Our header of a message that brings this lock, and nothing else."""
    parts = [lock.task, lock.key, lock.owner, lock.seconds, lock.limit, lock.scope]
    return {HEADER: {"id": task_id, "queue": parts}}


def _listed(name: str, value: Any) -> Any:
    """The value of a part that may be a list."""
    if name not in LISTS:
        return value
    kind, form = LISTS[name]
    if not form.fullmatch(repr(value)):
        raise _unknown(f"{name} is {value}")
    return _made(kind, *value)


def _made(kind: type[Part], *fields: Any, **named: Any) -> Part:
    try:
        return kind(*fields, **named)
    except TypeError as error:
        raise _unknown(f"{kind.__name__}: {error}") from None


# Keys

#: The parts of keys, after the name of a lock or another thing that several keys are about. A lock outside of tasks is
#: at its name itself.
PARTS = frozenset(
    {"", "run", "mail", "fence", "waiting", "asked", "order", "done", "tombstone", "memory"}
    | {"ledger", "claim", "queue"}
)

#: The value of a hold.
_HOLD = re.compile(rb"[0-9a-f]{32}\[")

#: In the keys of the lock of a waiting message; and in those of mailboxes.
OF_QUEUE, MAILBOX = ":queue:", b":mail:"

#: The names of records, after the part of their keys: of how an attempt of a plan's message has ended; and of others.
_OF_ATTEMPT = re.compile(r"(?P<id>m\d+(-after)?):[0-9a-f]{10}:\d+\.(?P<attempt>\d+)")
_OF_OTHERS = re.compile(r"(began|heir):.+|((runs|heir):)?[0-9a-f]{28,32}:\d+\.\d+|[0-9a-f-]{36}:[0-9a-f]{10}:\d+\.\d+")


def check_keys(keys: Any) -> None:
    """Make sure that each key is one that the checkers know."""
    for key in keys:
        if (part := part_of(key)) not in PARTS:
            raise _unknown(f"the key {key} has the part {part!r}")


def check_holds(values: Iterable[tuple[str, bytes]]) -> None:
    """Make sure that each hold has the form that the checkers know."""
    for key, value in values:
        if part_of(key) == "run":
            hold_of(value)


@lru_cache(maxsize=4096)
def part_of(key: str) -> str:
    """The part of a key that says what it holds: the one after the hash tag, or after the lock of a queue."""
    _, _, rest = key.rpartition("}") if "}" in key else key.partition(":")
    return rest.removeprefix(":queue").removeprefix(":").partition(":")[0]


def of_lock(lock: str, part: str = "run") -> str:
    """A key of this lock; by default, that of its first hold."""
    return f"{lock}:{part}"


@lru_cache(maxsize=1024)
def lock_of(key: str) -> str:
    """The lock of a key; a lock outside of tasks is at its own."""
    part = part_of(key)
    return key.rpartition(f":{part}")[0] if part else key


def holds_in(key: str, value: Any) -> list[tuple[str, bytes, float]]:
    """The holds in the set at the key of a lock: a name as if each had a key of its own, its value, and its end in ms
    since the epoch.
    """
    if not any(_HOLD.match(element) for element in value):
        return []
    lock = key.removesuffix(":run") if part_of(key) == "run" else keyspace.plain_key(key).base
    return [(f"{lock}:run:{element[:OWNER_LENGTH].decode()}", element, end) for element, end in value.items()]


def is_held_by(values: Mapping[str, bytes], lock: str) -> dict[str, bytes]:
    """The holds of a lock among these."""
    return {key: value for key, value in values.items() if part_of(key) == "run" and lock_of(key) == lock}


def name_in(key: str) -> str:
    """What follows the part of a key: the name of a record, or who was given up."""
    return key.rpartition(f":{part_of(key)}:")[2]


@lru_cache(maxsize=1024)
def attempt_of(key: str) -> tuple[str, int] | None:
    """The id of the message whose record is at a key, and the attempt that has ended; None if it is another key."""
    if part_of(key) != "done":
        return None
    if found := _OF_ATTEMPT.fullmatch(name_in(key)):
        return found["id"], int(found["attempt"])
    if not _OF_OTHERS.fullmatch(name_in(key)):
        raise _unknown(f"the key {key} has an unknown record")
    return None


def run_key(package: Any, lock: str) -> bytes:
    """The key of a lock that a process with this copy of the package holds."""
    return str(attribute(package("stores.redis.keyspace"), "run_key")(lock)).encode()


#: The parts of the keys of those that are in line.
OF_LINES = ("waiting", "asked")


def line_key(lock: str) -> str:
    """The key of those that are in line for a lock, by their places."""
    return lock + keyspace.WAITING


def mailbox_in(member: bytes) -> bytes:
    """The mailbox of somebody in line."""
    return member.rpartition(b"|")[0]


def name_of_waiter(member: bytes) -> bytes:
    """Its name there."""
    return member.rpartition(b"|")[2]


def fence_key(lock: str, *, is_plain: bool = False) -> str:
    """The key of the highest fence of a lock, which may be one outside of tasks."""
    return (keyspace.plain_key(lock) if is_plain else lock) + keyspace.FENCE


def tombstone_key(name: str, owner: str) -> str:
    """The key that says that an owner of a lock outside of tasks is over."""
    return keyspace.plain_key(name) + keyspace.TOMBSTONE + owner


def is_of_beat(key: str) -> bool:
    """Whether a lock only shows that a beat runs."""
    return "{beat:" in key


def number_of_order(name: bytes) -> str:
    """The id of a message from its name in an order, which is the beginning of its hold."""
    _, task_id, *_ = json.loads(name + b"0]")
    return str(task_id)


# Holds, leases and records


class Hold(NamedTuple):
    """The value of a lock; of one that a node of a Redlock got back, only the owner is known."""

    owner: str
    sending: str = ""
    task_id: str | None = None
    retries: int = 0
    node: str | None = None
    shown_pid: int = 0
    since: float = 0.0
    replaced: int = 0
    process: str = ""
    ttl: float = 0.0
    fence: int = 0
    label: str = ""
    order: str = ""
    newer: Sequence[str] = ()

    @property
    def pid(self) -> int:
        """The number of the process that holds it; 0 if it is reserved, or of a waiting message."""
        return int(self.process.split("/")[2]) if self.process else 0

    @property
    def is_kept(self) -> bool:
        """Whether the lock is kept for an attempt that is to come."""
        return bool(self.sending) and not (self.process or self.ttl)


class Record(NamedTuple):
    """How a message has ended, as a lock server knows it."""

    state: str
    seconds: float
    has_content: bool
    is_settled: bool
    mark: str = ""


@lru_cache(maxsize=1024)  # The checkers ask for the same ones at each look.
def hold_of(value: bytes) -> Hold:
    """The hold that is the value of a lock."""
    owner, rest = value[:OWNER_LENGTH].decode(errors="replace"), value[OWNER_LENGTH:]
    hold = _made(Hold, owner, *json.loads(rest or b"[]"))
    if not isinstance(hold.retries, int) or hold.process.count("/") not in (0, 2):
        raise _unknown(f"a hold has the value {value!r}")
    return hold


@lru_cache(maxsize=1024)
def record_of(value: bytes) -> Record:
    """The record that is the value of a key."""
    found = json.loads(value.partition(b"\n")[0])
    return Record(states.SUCCESS, found, False, True) if isinstance(found, int) else _made(Record, *found)


def repeated_by(process: Any) -> list[tuple[str, str, str]]:
    """What a process repeats, or repeated until it died, on its lock server: what, of which lock, and for whom."""
    opened = attribute(process.package("runtime"), "_all_opened")[-1:]
    outboxes = [attribute(runtime.store, "_outbox") for one in opened for runtime in one.runtimes.values()]
    return [call_id for outbox in outboxes for call_id in attribute(outbox, "_waiting")]


def has_left(process: Any, member: bytes) -> bool:
    """Whether a waiter of this process has left, as its process knows."""
    opened = attribute(process.package("runtime"), "_all_opened")[-1:]
    mailboxes = [attribute(runtime.store, "mailbox") for one in opened for runtime in one.runtimes.values()]
    ours = [it for it in mailboxes if str(attribute(it, "_key")).encode() == mailbox_in(member)]
    return any(name_of_waiter(member).decode() not in attribute(it, "_waiters") for it in ours)


# Processes


#: The modules that each process needs; they import the others.
NEEDED = (
    *("", "worker.bootstep", "worker.request", "task.singleton_task", "task.run", "beat.scheduler", "lock"),
    *("stores.redis.store", "stores.redis.redlock", "stores.redis.cluster", "stores.redis.urls"),
)


def is_loaded(
    package: Any,
    place: Callable[[], str],
    state_and_start: Callable[[int], tuple[str | None, str | None]],
    is_child: Callable[[], bool],
    uninterrupted: Callable[[], Any],
) -> None:
    """A copy of the package is loaded: put in place what its processes know of themselves and of others."""
    identity = module(package, "process_identity")
    assign(identity, "_place", place)
    assign(identity, "_state_and_start", state_and_start)
    for name in ("own", "is_dead"):
        assign(identity, name, uninterrupted()(attribute(identity, name)))
    assign(module(package, "task.interrupt"), "is_child_of_a_pool", is_child)


def all_that_start_anew(package: Any) -> Any:
    """What starts anew in the child of a fork, as a set that the copy of the package adds to."""
    return attribute(module(package, "forks"), "_all")


def begin_anew(package: Any) -> None:
    """Reset what is neither a container of a module nor starts anew in the child of a fork."""
    abort, runtime = module(package, "task.interrupt"), module(package, "runtime")
    assign(abort, "_by_signal", attribute(abort, "_BySignal")())
    attribute(runtime, "_all_opened")[:] = [attribute(runtime, "_Opened")()]


def task_class(package: Any) -> Any:
    """The class of exclusive tasks; Celery makes their requests of its own class."""
    base = public(package, "SingletonTask")
    base.Request = public(package, "SingletonRequest")
    return base


# Workers


def begin_worker(package: Any, app: Any, state: Any, parent: Any, *, has_processes: bool) -> Callable[[str], None]:
    """Do what the bootstep does in a main process; returns what frees the locks of an earlier life of that node.

    Args:
        state: this worker's part of Celery's state.
    """
    assign(module(package, "_celery"), "worker_state", state)
    bootstep, runtime = module(package, "worker.bootstep"), module(package, "runtime").Runtime.of(app)
    if has_processes:
        attribute(bootstep, "_look_after_processes")(parent, runtime)
    attribute(bootstep, "_have_copies_wait")(parent, runtime)
    return partial(attribute(bootstep, "free_left_behind"), runtime)


def line_of(package: Any, app: Any) -> Any:
    """The copies that wait in a main process; None if they wait only for their time."""
    return attribute(module(package, "worker.line"), "line_of").get(app)


def inherit_channel(child: Any, parent: Any) -> None:
    """A process of a pool has its parent's pipe for reports."""
    reports = module(parent, "task.reports")
    assign(module(child, "task.reports"), "_channel", attribute(reports, "_channel"))


def has_free_slot(package: Any, pool: Any) -> bool:
    """Whether a copy could be started now."""
    return bool(attribute(module(package, "worker.bootstep"), "has_free_slot")(pool))


def watch_line(line: Any, comes: Callable[[str], None], leaves_place: Callable[[str, bool], None]) -> None:
    """Be called with the lock of each wake-up that comes to a line, and of each place that it leaves as it has no slot,
    with whether somebody else is woken.
    """
    store = attribute(line, "_store")
    hear, wake = attribute(line, "_hear"), attribute(store, "wake")

    def hears(key: str) -> None:
        comes(key)
        hear(key)

    def wakes(key: str, leaves: str = "") -> Any:
        did = wake(key, leaves)
        if leaves:
            leaves_place(key, did)
        return did

    assign(line, "_hear", hears)
    assign(store, "wake", wakes)


def is_listening(line: Any) -> bool:
    """Whether a line is woken, as far as it knows."""
    return not (attribute(line, "_failures") or attribute(line, "_closed"))


def keys_of(line: Any) -> set[str]:
    """The locks for which a line has places on the server."""
    return set(attribute(line, "_copies"))


def name_of(line: Any, key: str) -> bytes:
    """The name of a line among those that wait for a lock; empty if it has no copy there."""
    copies = attribute(line, "_copies").get(key)
    name = "" if copies is None else attribute(line, "_store").mailbox.member(key, attribute(copies, "name"))
    return str(name).encode()


def mailbox_of(line: Any) -> bytes:
    """The mailbox of a line's process."""
    return str(attribute(attribute(attribute(line, "_store"), "mailbox"), "_key")).encode()


def is_held(request: Any) -> bool:
    """Whether the timer holds a copy until it is woken."""
    return attribute(request, "_held_until") is not None


# Locks outside of tasks, and beats


def locks(package: Any) -> Any:
    """The module of the classes of locks, and of their errors."""
    return module(package, "lock")


def lease_of(lock: Any) -> Any:
    """The lease of a lock that is held."""
    return lock.local.lease


def store_of(lock: Any) -> Any:
    """The store of all locks with the clients of this one."""
    return heartbeat_of(lock).store


def heartbeat_of(lock: Any) -> Any:
    """What renews their leases."""
    return attribute(lock, "_heartbeat")


def key_of(lock: Any) -> Any:
    """The key of a lock, which says that it is a lock outside of tasks."""
    return attribute(lock, "_key")


def request_of_copy(package: Any, lock: Any, message: str) -> Any:
    """How a copy of a message asks for a lock."""
    names = module(package, "holder")
    holder = names.Holder(message, process=attribute(module(package, "process_identity"), "own")())
    owner, base = attribute(names, "new_owner")(), module(package, "stores.base")
    return base.LockRequest(key_of(lock), owner, ttl=attribute(lock, "_ttl"), holder=holder, check_finished=True)


def record_for(package: Any, holder: Any, content: bytes, seconds: float) -> Any:
    """The record of an end of a message."""
    return attribute(module(package, "stores.base"), "Record")(holder.message, content, seconds)


def is_lease(package: Any, found: Any) -> bool:
    """Whether a lock was got."""
    return isinstance(found, public(package, "Lease"))


def content_of(package: Any, found: Any) -> bytes | None:
    """What is recorded, if a record was found in place of a lock."""
    return found.content if isinstance(found, module(package, "stores.base").Record) else None


def nodes_of(lock: Any) -> Any:
    """The nodes of a Redlock."""
    return attribute(store_of(lock), "_nodes")


def reaches_no_majority(nodes: Any, now: float) -> bool:
    """Whether a process has no connections to most nodes of its Redlock, and avoids these nodes by its clock."""
    avoided = sum(attribute(node, "_avoided_until") > now for node in nodes.each)
    connected = max((len(talk.lines) for talk in attribute(nodes, "_talks")), default=0)
    return bool(avoided >= nodes.quorum > connected)


def scheduler_of(package: Any, app: Any) -> Any:
    """The scheduler of a beat."""
    return attribute(module(package, "beat.scheduler"), "ExclusiveScheduler")(app)


def _unknown(what: str) -> UnknownInside:
    # The package may catch what a checker raises in one of its calls.
    if (run := active()) is not None:
        run.fail(f"the simulator does not know the inside: {what}")
    return UnknownInside(what)


# What a copy that was put back carries

#: The name of the header.
HEADER = attribute(messages, "HEADER")

#: Reasons that are counted.
REASONS = ("conflict", "unavailable", "follows")


def put_back_in(headers: Mapping[str, Any]) -> PutBack | None:
    """What a copy of this attempt carries; None if it was not put back."""
    put_back = header_of(headers).put_back
    return put_back if put_back is not None and put_back.retries == headers["retries"] else None


def counts_of(put_back: PutBack | None) -> dict[str, int]:
    """How often an attempt was put back, by reason."""
    return {reason: 0 if put_back is None else attribute(put_back, reason) for reason in REASONS}


def looks(put_back: PutBack) -> bool:
    """Whether the copy looks how another message ends."""
    return put_back.joins is not None or put_back.leader is not None


def has_ended(values: Sequence[tuple[str, bytes]], task_id: str) -> bool:
    """Whether one of these keys is the record of how an attempt of the message has ended."""
    return any(f":done:{task_id}:" in key for key, _ in values)
