"""The package's inside, as far as the simulator knows it: names of modules and attributes, and the formats of headers
and keys. Nothing else in the simulator names them.

A name or a format that has changed fails the simulation at once, and says which one: nobody reads a missing name as
"nothing there", so that no checker goes blind.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from celery_singleton_lock.confirmations import UNCONFIRMED_TTL
from celery_singleton_lock.holder import OWNER_LENGTH, STEM_LENGTH
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.redlock.commands import MEMORY_TTL
from celery_singleton_lock.stores.redis.redlock.node import MAX_PAUSE as PAUSE_OF_NODE
from celery_singleton_lock.stores.redis.waiter import SLICE
from celery_singleton_lock.task import header
from celery_singleton_lock.task.execution import holder_of
from celery_singleton_lock.task.joined import Joined
from celery_singleton_lock.task.queued import SOON
from tests.simulation.scheduler import simulation

Part = TypeVar("Part")

#: For the checkers. A node of a Redlock that did not answer is left alone for `PAUSE_OF_NODE`.
__all__ = ("MEMORY_TTL", "PAUSE_OF_NODE", "SLICE", "SOON", "UNCONFIRMED_TTL")

#: The bytes of a message in a list of ended messages, and of its name in them.
NOTED, NAMED = 12, 8


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


def public(package: Any, name: str) -> Any:
    """What a copy of the package has under a public name."""
    return attribute(sys.modules[package.name], name)


# Headers


@dataclass(frozen=True, slots=True)
class PutBack:
    """What a copy that was put back carries."""

    retries: int | None = None
    conflict: int = 0
    unavailable: int = 0
    lost: int = 0
    untold: int = 0
    follows: int = 0
    given_up: Sequence[str] = ()
    waits: tuple[str, int] | None = None
    joins: Joined | None = None
    leader: Sequence[Any] | None = None
    since: float | None = None
    arrived: int | None = None
    redelivered: bool = False
    returned: Sequence[int] | None = None
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
    replaced: Sequence[str] = ()
    follows: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """What a message carries."""

    id: str | None = None
    sent: str | None = None
    replaced: Any = None
    call: Any = None
    queue: QueueLock | None = None
    put_back: PutBack | None = None
    due: float | None = None
    entry: str | None = None


def header_of(headers: Mapping[str, Any]) -> Header:
    """What a message with these headers carries."""
    parts = dict(header.of_message(headers))
    if "queue" in parts:
        parts["queue"] = _made(QueueLock, *parts["queue"])
    if "put_back" in parts:
        put_back = dict(parts["put_back"])
        if "joins" in put_back:
            put_back["joins"] = _made(Joined, *put_back["joins"])
        parts["put_back"] = _made(PutBack, **put_back)
    return _made(Header, **parts)


def lock_in(headers: Mapping[str, Any]) -> QueueLock | None:
    """The lock that a message with these headers brings."""
    return header_of(headers).queue


def header_with(task_id: str, lock: QueueLock) -> dict[str, Any]:
    """Our header of a message that brings this lock, and nothing else."""
    parts = [lock.task, lock.key, lock.owner, lock.seconds, lock.limit, lock.scope]
    return {header.HEADER: {"id": task_id, "queue": parts}}


def _made(kind: type[Part], *fields: Any, **named: Any) -> Part:
    try:
        return kind(*fields, **named)
    except TypeError as error:
        raise _unknown(f"{kind.__name__}: {error}") from None


# Keys

#: The parts of keys, after the name of a lock or another thing that several keys are about. A lock outside of tasks is
#: at its name itself.
PARTS = frozenset(
    {"", "run", "wake", "fence", "slots", "waiting", "line", "order", "nudge", "done", "over", "memory"}
    | {"ended", "aside", "ledger", "secret", "claim", "gone", "queue"}
)

#: In the keys of the lock of a waiting message; and at the end of the keys at which waiters wait.
OF_QUEUE, WAKE = ":queue:", b":wake"

#: The names of records, after the part of their keys: of how an attempt of a plan's message has ended; and of others.
_OF_ATTEMPT = re.compile(r"(?P<id>m\d+(-after)?):[0-9a-f]{16}:\d+\.(?P<attempt>\d+)")
_OF_OTHERS = re.compile(r"(began|heir):.+|((runs|heir):)?[0-9a-f]{28,32}:\d+\.\d+|[0-9a-f-]{36}:[0-9a-f]{16}:\d+\.\d+")


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


def run_key(package: Any, lock: str, slot: int) -> bytes:
    """The key of a lock, or of a slot of it, that a process with this copy of the package holds."""
    return str(attribute(package("stores.redis.keyspace"), "run_key")(lock, slot)).encode()


def shared_fence_key(lock: str) -> str:
    """The key of the highest fence on a server."""
    return keyspace.shared_fence_key(keyspace.shared(lock))


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
        """The process that holds it; 0 if it is reserved, or of a waiting message."""
        return int(self.process.split("/")[1]) if self.process else 0

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


def stem(owner: str) -> str:
    """The beginning of an owner, the same for all its attempts."""
    return owner[:STEM_LENGTH]


@lru_cache(maxsize=1024)
def record_of(value: bytes) -> Record:
    """The record that is the value of a key."""
    return _made(Record, *json.loads(value.partition(b"\n")[0]))


def ended_name(task: Any, lock: str) -> bytes:
    """The name under which a lock server notes that the message of a running task, with this lock, has ended."""
    return keyspace.ended_name(lock, holder_of(task, task.request).message)


def names_of_ended(value: bytes) -> set[bytes]:
    """The names in a list of messages that have ended; the second from which it forgets each one is beside it."""
    if len(value) % NOTED:
        raise _unknown(f"a list of ended messages has {len(value)} bytes")
    return {value[at : at + NAMED] for at in range(0, len(value), NOTED)}


def repeated_by(process: Any) -> list[tuple[str, str, str]]:
    """What a process repeats, or repeated until it died, on its lock server: what, of which lock, and for whom."""
    opened = attribute(process.package("runtime"), "_all_opened")[-1:]
    pending = [attribute(runtime.store, "_pending") for one in opened for runtime in one.runtimes.values()]
    return [call_id for calls in pending for call_id in attribute(calls, "_calls")]


def _unknown(what: str) -> UnknownInside:
    # The package may catch what a checker raises in one of its calls.
    simulation().fail(f"the simulator does not know the inside: {what}")
    return UnknownInside(what)
