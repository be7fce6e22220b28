"""The inside of the package, as far as tests of a store name it: a name that is gone fails here, and not in silence."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.store import Store
from tests.patience import LIMIT

#: As much of an owner as all attempts of a Redlock share.
SHARED = 24


def named(path: str) -> Any:
    """What a module of the package calls by that name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"celery_singleton_lock.{module}"), name)


#: Seconds, by what they are for.
SECONDS = {
    "between two tries": "stores.redis.store.PAUSE",
    "of one wait for a stop": "stores.redis.stops.SLICE",
    "of one wait for a stop in memory": "stores.memory.stops.SLICE",
    "until a dead process is removed from a line": "stores.redis.in_line.LONG_GONE",
}


def set_seconds(monkeypatch: pytest.MonkeyPatch, what: str, value: float) -> None:
    """Give a constant another value for this test."""
    monkeypatch.setattr(f"celery_singleton_lock.{SECONDS[what]}", value)


def most_stops() -> int:
    """How many stops are kept for a process."""
    return int(named("stores.redis.stops.KEPT"))


def lock_key(key: str, slot: int = 0) -> str:
    """Where the hold of a lock is, or of a slot of a semaphore."""
    return str(named("stores.redis.keyspace.run_key")(key, slot))


def wake_list(key: str) -> str:
    """Where wake-ups of those that wait for a lock are pushed."""
    return str(named("stores.redis.keyspace.wake_key")(key))


def waiting_set(key: str) -> str:
    """Where those that wait for a lock have their places."""
    return str(named("stores.redis.keyspace.waiting_key")(key))


def line_hash(key: str) -> str:
    """Where main processes write how many copies they have in line."""
    return str(named("stores.redis.keyspace.line_key")(key))


def of_queue(key: str) -> str:
    """The lock that a message is sent with, beside the one that it runs with."""
    return key + str(named("keys.key.QUEUE"))


def freed(key: str, passed_on: int = 0) -> Any:
    """A wake-up that so many processes had no use for."""
    return named("stores.wake_ups.Freed")(key, passed_on)


def most_passed_on() -> int:
    """How often a wake-up is passed on at least."""
    return int(named("stores.redis.wake_ups.MAX_PASSED_ON"))


def waits_without_a_word() -> float:
    """Seconds after which somebody who has not asked again does not wait any more."""
    return float(named("stores.redis.lock_commands.WAITING_TTL"))


def fence_counter(key: str) -> str:
    """Where a node of a Redlock counts fencing tokens."""
    return str(named("stores.redis.keyspace.fence_key")(key))


def beats_keys(key: str, entry: str) -> list[str]:
    """The claims of an entry of beat, and the last run of one that was removed."""
    return [named(f"stores.redis.keyspace.{kind}_keys")(key, [entry])[0] for kind in ("claim", "gone")]


def stop_list(prefix: str, process: str) -> str:
    """Where the stops of a process are pushed."""
    return str(named("stores.redis.keyspace.stops_key")(prefix, process))


def end_hold(where: Redis | Store, key: str, owner: str) -> bool:
    """End a hold as its ttl does: nobody is told. Whether there was one."""
    if not isinstance(where, Redis):
        slots: dict[int, Any] = where._occupants[key]  # type: ignore[attr-defined]
        mine = [slot for slot, hold in slots.items() if hold.owner == owner]
        for slot in mine:
            del slots[slot]
        return bool(mine)
    values = {name: where.get(name) for name in where.scan_iter(f"{key}*", _type="string")}
    names = [name for name, value in values.items() if str(value).startswith(owner[:SHARED])]
    return bool(names) and bool(where.delete(*names))


def break_promise(monkeypatch: pytest.MonkeyPatch, promise: str) -> None:
    """Break one of those that keep late requests from doing harm."""
    store, module = named("stores.redis.store.RedisStore"), "celery_singleton_lock.stores.redis.lock_commands"
    acquire = named("stores.redis.lock_commands.acquire")

    def forgetful(request: LockRequest, name: str, **how: Any) -> Any:
        return acquire(replace(request, given_up=()), name, **how)

    if promise == "a later try voids the earlier ones":
        monkeypatch.setattr(f"{module}.acquire", lambda *asked, late=(), **how: acquire(*asked, **how))
        return
    monkeypatch.setattr(store, "_end", lambda *_, **__: None)
    if promise == "a copy names the owner before it":
        monkeypatch.setattr(f"{module}.acquire", forgetful)
        monkeypatch.setattr(store, "abandon", lambda *_: None)


class Process:
    """Waits in a thread for locks, as the main process of a worker does, and notes what it hears.

    Attributes:
        heard: the locks that it was told of.
        errors: what its waiting raised.
        copies: how many of its copies wait for each lock; each waits since the time in `places`.
        moved: the times of locks whose first copy has begun by itself.
        compared: the times that were compared with those of others; None if any copy may begin.
    """

    def __init__(self, store: Store, places: Mapping[str, float], limit: int = 1) -> None:
        self.wake_ups: Any = store.wake_ups()
        self._place = named("stores.wake_ups.Place")
        self._limit = limit
        self.places = places
        self.copies = dict.fromkeys(places, 1)
        self.moved: dict[str, float] = {}
        self.heard: list[str] = []
        self.compared: list[float | None] = []
        self.errors: list[Exception] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._stopped = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Process:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._interrupt()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        self.wake_ups.leave()
        os.close(self._reader)
        os.close(self._writer)

    def stand(self, places: Mapping[str, float]) -> None:
        """Wait for these locks from now on."""
        self.places = places
        self._interrupt()

    def give_back(self, key: str) -> None:
        """Say that it has no use for what it heard."""
        self.wake_ups.give_back(key)

    def _interrupt(self) -> None:
        os.write(self._writer, b".")

    def _moved_to(self, key: str) -> Any:
        since = self.moved.get(key)
        return None if since is None else self._place(since, self._limit)

    def _run(self) -> None:
        while not self._stopped:
            places = {key: self._place(since, self._limit) for key, since in self.places.items()}
            try:
                freed = self.wake_ups.wait(places, self._reader, lambda key: self.copies.get(key, 1), self._moved_to)
                self.heard += [one.key for one in freed]
                self.compared += [one.place and one.place.since for one in freed]
            except LockUnavailable as error:
                self.errors.append(error)
                clock.sleep(0.02)
            with suppress(BlockingIOError):
                os.read(self._reader, 100)
