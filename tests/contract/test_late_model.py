"""Random histories in which requests arrive late, again, or never: never too many runs at once, and no lock is stuck.

The server is real, and so is the store; the network is a proxy. It keeps requests, and each may reach the server at any
later moment, as if it had been in a socket until then.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.store import Store
from tests.contract import inside
from tests.patience import until
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer

TTL = 300.0
SENDERS = 3


class Network(LossyProxy):
    """Loses requests on demand, and keeps them for later.

    Attributes:
        fates: of the next requests: "lost" does not arrive (yet), "unheard" arrives, but its answer does not.
        late: the requests that were lost.
        met: how many there were of each fate.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.fates: list[str] = []
        self.late: list[bytes] = []
        self.met = {"lost": 0, "unheard": 0, "well": 0}
        super().__init__(port)

    def deliver(self, request: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(request)
            assert not connection.recv(65536).startswith(b"-NOSCRIPT")

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        if is_reply:
            super()._forward(source, sink, is_reply)
            return
        with suppress(OSError):
            while data := source.recv(65536):
                fate = self.fates.pop(0) if self.fates and b"EVAL" in data else "well"
                self.met[fate] += 1
                if fate == "lost":
                    self.late.append(data)
                elif fate == "unheard":
                    self.deliver(data)
                if fate != "well":
                    break
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@dataclass
class Delivery:
    """One delivery of a message; after it has given up, a copy of the message names its owner."""

    sender: int
    message: int = 0
    copy: int = 0
    owner: str = field(default_factory=new_owner)
    lease: Lease | None = None
    given_up: list[str] = field(default_factory=list)
    #: Whether the release of the message before was answered.
    heard: bool = False

    @property
    def holder(self) -> Holder:
        return Holder("task", since=float(self.copy), sending=f"message-{self.sender}-{self.message}")


class History:
    """What some workers do with one lock."""

    def __init__(self, store: Store, network: Network, seed: int) -> None:
        self.store, self.network, self.rng = store, network, random.Random(seed)
        # Its own: what is still repeated for another history has nothing to do with it.
        self.key = f"late-model:{{job:{seed}}}"
        self.limit = self.rng.choice([1, 1, 2])
        self.deliveries = [Delivery(sender) for sender in range(SENDERS)]
        self.fence = 0

    def play(self, steps: int) -> None:
        rules = [self.acquire, self.acquire, self.release, self.deliver_again, self.refuse, self.arrive_late]
        for _ in range(steps):
            self.rng.choice(rules)(self.rng.choice(self.deliveries))
            self.runners_have_the_lock()
        self.settle()
        for it in self.deliveries:
            self.release(it, is_disturbed=False)
        self.settle()

    def disturb(self) -> None:
        self.network.fates = self.rng.choices(["lost", "unheard", "well"], k=self.rng.randint(0, 3))

    def ask(self, owner: str, holder: Holder, **more: Any) -> Lease | Held | Record:
        asked = {"ttl": TTL, "check_finished": True, "limit": self.limit, **more}
        return self.store.acquire(LockRequest(self.key, owner, holder=holder, **asked))

    def acquire(self, it: Delivery) -> None:
        if it.lease is not None:
            return
        self.disturb()
        limit, once = self.rng.randint(1, self.limit), self.rng.random() < 0.5
        try:
            found: object = self.ask(it.owner, it.holder, limit=limit, check_finished=once, given_up=it.given_up)
        except LockUnavailable:
            found = None
        self.network.fates = []
        if isinstance(found, Lease):
            assert sum(other.lease is not None for other in self.deliveries) < limit, "too many at once"
            assert found.fence > self.fence
            it.lease, self.fence = found, found.fence
        else:
            assert not isinstance(found, Record)
            self.put_back(it)

    def put_back(self, it: Delivery) -> None:
        """The delivery is over; a copy comes, under a new owner."""
        self.store.abandon(Lease(self.key, it.owner, ttl=TTL, fence=0, sent_at=clock.now(), limit=self.limit))
        it.given_up = [*it.given_up, it.owner][-3:]
        it.copy, it.owner = it.copy + 1, new_owner()

    def release(self, it: Delivery, *, is_disturbed: bool = True) -> None:
        if it.lease is None:
            return
        if is_disturbed:
            self.disturb()
        try:
            assert self.store.free(it.lease, record=Record(it.holder.message, b"record", 60.0)), "it was taken away"
            it.heard = True
        except LockUnavailable:
            it.heard = False
        self.network.fates = []
        it.message, it.owner, it.lease, it.given_up = it.message + 1, new_owner(), None, []

    def deliver_again(self, it: Delivery) -> None:
        """A copy of a message comes while it is carried out, and afterwards."""
        if it.lease is not None:
            assert isinstance(self.ask(new_owner(), it.holder), Held)
        if it.heard:
            before = replace(it.holder, sending=f"message-{it.sender}-{it.message - 1}")
            assert isinstance(self.ask(new_owner(), before), Record)

    def refuse(self, it: Delivery) -> None:
        if it.lease is not None:
            record = Record(it.holder.message, b"refused", 60.0)
            assert self.store.refuse(self.key, it.holder, record) is not None, "it runs"

    def arrive_late(self, _: Delivery) -> None:
        if self.network.late:
            self.network.deliver(self.network.late.pop(self.rng.randrange(len(self.network.late))))

    def settle(self) -> None:
        """The server works for a while: only deliveries that run have the lock then."""
        while self.network.late:
            self.network.deliver(self.network.late.pop(0))
        running = {it.lease.owner for it in self.deliveries if it.lease is not None}
        until(lambda: {held.owner for held in self.store.held(self.key)} == running, "only who runs has the lock")
        self.runners_have_the_lock()

    def runners_have_the_lock(self) -> None:
        leases = [it.lease for it in self.deliveries if it.lease is not None]
        assert self.store.renew(leases, timeout=5.0) == [True] * len(leases)


@pytest.fixture
def network(redis_server: RedisServer) -> Iterator[Network]:
    with Network(redis_server.port) as network:
        yield network


def play(network: Network, histories: int) -> None:
    for seed in range(histories):
        print("seed", seed)
        with closing(open_url(f"redis://127.0.0.1:{network.port}/0")) as store:
            History(store, network, seed).play(30)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.set_seconds(monkeypatch, "between two tries", 0.0)


@pytest.mark.parametrize("histories", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_never_more_runs_at_once_than_the_limit_allows(network: Network, histories: int) -> None:
    play(network, histories)
    assert min(network.met.values()) > histories, "all of it has happened"


@pytest.mark.slow
@pytest.mark.parametrize(
    "promise",
    ["an acquire is undone", "a later try leaves a tombstone", "a copy names the owner before it"],
)
def test_model_can_fail(network: Network, monkeypatch: pytest.MonkeyPatch, promise: str) -> None:
    inside.break_promise(monkeypatch, promise)
    monkeypatch.setattr(f"{__name__}.until", partial(until, seconds=2.0))
    with pytest.raises(AssertionError):
        play(network, 300)
