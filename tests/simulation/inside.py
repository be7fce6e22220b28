"""The package's inside, as far as the simulator knows it: names of modules and attributes, and the formats of headers
and keys. Nothing else in the simulator names them.

A name or a format that has changed fails the simulation at once, and says which one: nobody reads a missing name as
"nothing there", so that no checker goes blind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from celery_singleton_lock.task import header
from celery_singleton_lock.task.joined import Joined
from tests.simulation.scheduler import simulation

Part = TypeVar("Part")


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


def check_keys(keys: Any) -> None:
    """Make sure that each key is one that the checkers know."""
    for key in keys:
        if (part := part_of(key)) not in PARTS:
            raise _unknown(f"the key {key} has the part {part!r}")


@lru_cache(maxsize=4096)
def part_of(key: str) -> str:
    """The part of a key that says what it holds: the one after the hash tag, or after the lock of a queue."""
    _, _, rest = key.rpartition("}") if "}" in key else key.partition(":")
    return rest.removeprefix(":queue").removeprefix(":").partition(":")[0]


def _unknown(what: str) -> UnknownInside:
    # The package may catch what a checker raises in one of its calls.
    simulation().fail(f"the simulator does not know the inside: {what}")
    return UnknownInside(what)
