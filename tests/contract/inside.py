"""The inside of the package, as far as tests of a store name it: a name that is gone fails here, and not in silence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
from redis import ConnectionPool, Redis

from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.store import Place, Store
from celery_singleton_lock.task.ends import Outcome
from tests.patience import LIMIT

#: What a store is asked with, and answers.
__all__ = ("Freeing", "Held", "Hold", "Holder", "Lease", "LockRequest", "Place", "Record", "Reservation", "Store")
__all__ += ("Outcome", "new_owner", "open_url")


def named(path: str) -> Any:
    """What a module of the package calls by that name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"celery_singleton_lock.{module}"), name)


#: Seconds, by what they are for.
SECONDS = {
    "for which a question is repeated": "stores.redis.store.PATIENCE",
    "of one wait of a waiter": "stores.waiters.LOOK",
    "for which a node may be mute": "stores.redis.nodes.MUTE_FOR",
    "that the nodes have to answer": "stores.redis.redlock.MAX_ANSWER",
    "that a promise lasts": "stores.redis.redlock.PROMISED",
}


def seconds(what: str) -> float:
    """The value of such a constant."""
    return float(named(SECONDS[what]))


#: Numbers, by what they count.
NUMBERS = {
    "items in one round trip": "batches.BATCH",
    "items that wait at most": "batches.MOST",
    "tries to send a question": "stores.redis.store.TRIES",
    "tries to ask the nodes": "stores.redis.nodes.TRIES",
    "owners that a request gives up": "stores.base.MAX_GIVEN_UP",
}


def number(what: str) -> int:
    """The value of such a constant."""
    return int(named(NUMBERS[what]))


def set_seconds(monkeypatch: pytest.MonkeyPatch, what: str, value: float) -> None:
    """Give a constant another value for this test."""
    monkeypatch.setattr(f"celery_singleton_lock.{SECONDS[what]}", value)


def lock_key(key: str) -> str:
    """Where the holds of a lock are."""
    return str(named("stores.redis.keyspace.run_key")(key))


def waiting_set(key: str) -> str:
    """Where those that wait for a lock have their places."""
    return str(key + named("stores.redis.keyspace.WAITING"))


def asked_hash(key: str) -> str:
    """Where it stands when each of them asked last, and for how many copies."""
    return str(key + named("stores.redis.keyspace.ASKED"))


def fence_counter(key: str) -> str:
    """Where a server counts fencing tokens."""
    return str(key + named("stores.redis.keyspace.FENCE"))


def beats_keys(key: str, entry: str) -> list[str]:
    """The claims of an entry of beat, and the last run of one that was removed."""
    return [named(f"stores.redis.keyspace.{kind}_keys")(key, [entry])[0] for kind in ("claim", "gone")]


def end_hold(where: Redis | Store, key: str, owner: str) -> bool:
    """End a hold as its ttl does: nobody is told. Whether there was one."""
    if not isinstance(where, Redis):
        return where._occupants[key].pop(owner, None) is not None  # type: ignore[attr-defined]
    lock = lock_key(key)
    if where.type(lock) == "zset":
        mine = [value for value in where.zrange(lock, 0, -1) if str(value).startswith(owner)]
        return bool(mine) and bool(where.zrem(lock, *mine))
    return str(where.get(lock)).startswith(owner) and bool(where.delete(lock))


class Kept:
    """A lease that is renewed until it is released.

    Attributes:
        told: set when the holder is told that the lease is lost.
        left: how many seconds it would have lasted then.
    """

    def __init__(self, store: Store, lease: Lease, heartbeat: Any = None) -> None:
        self.lease = lease
        self.told = threading.Event()
        self.left = 0.0
        self._heartbeat = heartbeat or named("heartbeat.Heartbeat")(store)
        self._heartbeat.start(lease, self.lost)

    @classmethod
    def together(cls, store: Store, leases: Iterable[Lease]) -> list[Kept]:
        """Leases that are renewed in the same rounds, as those of a process are."""
        heartbeat = named("heartbeat.Heartbeat")(store)
        return [cls(store, lease, heartbeat) for lease in leases]

    def lost(self, lease: Lease) -> None:
        self.left = lease.remaining
        self.told.set()

    def release(self) -> None:
        self._heartbeat.stop(self.lease)


#: A command to a server, and its answer.
Call = Callable[..., Any]


def calls_through(patch: pytest.MonkeyPatch, store: Store, through: Callable[[Call], Call]) -> None:
    """All that a store asks its server goes through this from now on."""
    servers: Any = store._servers  # type: ignore[attr-defined]
    patch.setattr(servers, "run", through(servers.run))


def is_settled(store: Store) -> bool:
    """Whether the store has nothing to tell its server, or its nodes, any more."""
    return not any(_outboxes(store))


def repeat_nothing(patch: pytest.MonkeyPatch, store: Store) -> None:
    """It tells its server nothing more by itself."""
    patch.setattr(store._outbox, "send", lambda calls: [False] * len(calls))  # type: ignore[attr-defined]


def _outboxes(store: Store) -> list[Any]:
    return [node._outbox for node in nodes_of(store)] if hasattr(store, "_nodes") else [store._outbox]  # type: ignore[attr-defined]


def repeating_threads(store: Store) -> list[threading.Thread]:
    """The threads that tell it."""
    repeating = [*_outboxes(store), *([store._nodes] if hasattr(store, "_nodes") else [])]
    return [it._job._thread for it in repeating if it._job._thread is not None]


def command(name: str, *args: Any, **options: Any) -> Any:
    """A command to a server: "free", "abandon" or "wake"."""
    return named(f"stores.redis.lock_commands.{name}")(*args, **options)


def told(store: Store, call: Any) -> Any:
    """What the server answers to it."""
    return store._servers.run(call)  # type: ignore[attr-defined]


def asked(store: Store, *call: Any) -> Any:
    """What the server answers to a command of Redis."""
    return store._servers.command(*call)  # type: ignore[attr-defined]


def tell(connection: Any, *command: object) -> None:
    """Send a command, and read no answer."""
    connection.push(named("stores.redis.connection.packed")(command))
    connection.flush()


def server_at(port: int) -> Any:
    """A server that is asked directly."""
    return named("stores.redis.server.Server")(ConnectionPool(port=port))


#: How the nodes of a Redlock are asked, by what is done.
STEPS = {
    "connect": ("Nodes", "_connect"),
    "ask": ("Nodes", "ask"),
    "send": ("Nodes", "send"),
    "send to one": ("_Talk", "send"),
}


def step(what: str) -> Any:
    """What takes that step."""
    owner, name = STEPS[what]
    return getattr(named(f"stores.redis.nodes.{owner}"), name)


def nodes_of(store: Store) -> Sequence[Any]:
    """The nodes of a Redlock."""
    each: Sequence[Any] = store._nodes.each  # type: ignore[attr-defined]
    return each


def answer(name: str) -> Any:
    """An answer of a server: GRANTED, GIVEN_UP."""
    return named("stores.redis.lock_answers.Answer")[name]


def talk_of(store: Store) -> Any:
    """The lines that a thread used last to ask the nodes."""
    return store._nodes._talks[-1]  # type: ignore[attr-defined]


def listened(store: Store, through: Callable[[Call], Call]) -> None:
    """Its waits for answers go through this from now on."""
    talk = talk_of(store)
    talk.hear = through(talk.hear)


def connected(store: Store) -> list[bool]:
    """Which nodes the last lines reach."""
    return [node.index in talk_of(store).lines for node in nodes_of(store)]


def queue_lock(key: str, owner: str, seconds: float) -> Any:
    """The lock that a message is sent with."""
    return named("task.queue_lock.QueueLock")(key, owner, seconds=seconds, limit=1, scope="until_executed")


def confirmations(store: Store) -> Any:
    """What confirms sent messages."""
    return named("in_bulk.Confirmations")(store)


@contextmanager
def patient_nodes() -> Iterator[None]:
    """The nodes of a Redlock have a minute for an answer: on a busy machine, half a second is over before it is read,
    and the next try asks as another owner.
    """
    with ExitStack() as patched:
        for module in ("nodes", "redlock"):
            patched.enter_context(patch(f"celery_singleton_lock.stores.redis.{module}.MAX_ANSWER", LIMIT))
        patched.enter_context(patch("celery_singleton_lock.stores.redis.redlock._patience", lambda ttl: LIMIT))
        yield
