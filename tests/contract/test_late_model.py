"""Random histories in which requests arrive late, again, or never: never too many runs at once, and no lock is stuck.

The server is real; the network is simulated here. Each request of a delivery is kept, and may reach the server at any
later moment, as if it had been in a socket until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.exceptions import TimeoutError

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.redis import lock_commands
from celery_singleton_lock.stores.redis.script import Call
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing import RedisServer

KEY = "late-model:{job:1}"
TTL = 300.0
SENDERS = st.integers(0, 2)


class Wire:
    """The network between a store and its server: loses requests on demand, and keeps them for later."""

    def __init__(self, store: RedisStore) -> None:
        self._run = store._servers.run
        #: What happens to the next requests: "lost" does not arrive (yet), "unheard" arrives, but its answer does not.
        self.fates: list[str] = []
        self.late: list[Call] = []
        store._servers.run = self.run  # type: ignore[method-assign]

    def run(self, call: Call, **options: Any) -> Any:
        fate = self.fates.pop(0) if self.fates else "well"
        if fate == "lost":
            self.late.append(call)
            raise TimeoutError("lost")
        answer = self._run(call, **options)
        if fate == "unheard":
            raise TimeoutError("unheard")
        return answer

    def deliver(self, index: int) -> None:
        """Carry out a lost request."""
        self._run(self.late.pop(index % len(self.late)))


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


FATES = st.lists(st.sampled_from(["lost", "unheard", "well"]), max_size=3)


class LateHistories(RuleBasedStateMachine):
    server: RedisServer

    @initialize(limit=st.sampled_from([1, 1, 2]))
    def begin(self, limit: int) -> None:
        self.server.flush()
        store = open_url(self.server.url_of(0))
        assert isinstance(store, RedisStore)
        self.store, self.limit = store, limit
        self.wire = Wire(store)
        # Repeated by a rule, not by a thread.
        self.pending: dict[Any, Call] = {}
        store._pending.add = lambda name, call, *, seconds: self.pending.__setitem__(name, call)  # type: ignore[method-assign]
        self.deliveries = [Delivery(sender) for sender in range(3)]
        self.fence = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for sender in range(3):
                self.release(sender, [])
            self.settle_everything()
            self.store.close()

    @rule(sender=SENDERS, fates=FATES, limit=st.integers(1, 2), once=st.booleans())
    def acquire(self, sender: int, fates: list[str], limit: int, once: bool) -> None:
        it, limit = self.deliveries[sender], min(limit, self.limit)
        if it.lease is not None:
            return
        self.wire.fates = fates
        try:
            found = self.ask(it.owner, it.holder, limit=limit, once=once, given_up=it.given_up)
        except LockUnavailable:
            found = None
        self.wire.fates = []
        if isinstance(found, Lease):
            others = sum(other.lease is not None for other in self.deliveries)
            assert others < limit, "too many at once"
            assert found.fence > self.fence
            it.lease, self.fence = found, found.fence
        else:
            assert not isinstance(found, Record)
            self.put_back(it)

    @rule(sender=SENDERS)
    def deliver_a_message_again(self, sender: int) -> None:
        """While it is carried out, and afterwards."""
        it = self.deliveries[sender]
        if it.lease is not None:
            assert isinstance(self.ask(new_owner(), it.holder, limit=self.limit), Held)
        if it.message and it.heard:
            before = replace(it.holder, sending=f"message-{sender}-{it.message - 1}")
            assert isinstance(self.ask(new_owner(), before, limit=self.limit), Record)

    def ask(self, owner: str, holder: Holder, **more: Any) -> Lease | Held | Record:
        return self.store.acquire(LockRequest(KEY, owner, ttl=TTL, holder=holder, **{"once": True, **more}))

    def put_back(self, it: Delivery) -> None:
        """The delivery is over; a copy comes, under a new owner."""
        lease = Lease(KEY, it.owner, ttl=TTL, fence=0, sent_at=clock.now(), limit=self.limit)
        self.store.abandon(lease)
        it.given_up = [*it.given_up, it.owner][-3:]
        it.copy, it.owner = it.copy + 1, new_owner()

    @rule(sender=SENDERS, fates=FATES)
    def release(self, sender: int, fates: list[str]) -> None:
        it = self.deliveries[sender]
        if it.lease is None:
            return
        self.wire.fates = fates
        try:
            assert self.store.free(it.lease, record=Record(it.holder.message, b"record", 60.0)), "it was taken away"
            it.heard = True
        except LockUnavailable:
            it.heard = False
        self.wire.fates = []
        it.message, it.owner, it.lease, it.given_up = it.message + 1, new_owner(), None, []

    @rule(sender=SENDERS)
    def refuse(self, sender: int) -> None:
        it = self.deliveries[sender]
        if it.lease is not None:
            record = Record(it.holder.message, b"refused", 60.0)
            assert self.store.refuse(KEY, it.holder, record, limit=self.limit) is not None, "it runs"

    @precondition(lambda self: self.wire.late)
    @rule(index=st.integers(0, 20))
    def deliver(self, index: int) -> None:
        self.wire.deliver(index)

    @precondition(lambda self: self.pending)
    @rule()
    def repeat(self) -> None:
        for name, call in [*self.pending.items()]:
            self.wire.run(call.again())
            del self.pending[name]

    @rule()
    def settle_everything(self) -> None:
        """The server works for a while: only deliveries that run have the lock then."""
        if self.pending:
            self.repeat()
        while self.wire.late:
            self.wire.deliver(0)
        running = {it.lease.owner for it in self.deliveries if it.lease is not None}
        assert {held.owner for held in self.store.held(KEY, limit=self.limit)} == running

    @invariant()
    def runners_have_the_lock(self) -> None:
        if hasattr(self, "store"):
            leases = [it.lease for it in self.deliveries if it.lease is not None]
            assert self.store.renew(leases, timeout=5.0) == [True] * len(leases)


@pytest.fixture
def histories(redis_server: RedisServer) -> Iterator[type[LateHistories]]:
    class Histories(LateHistories):
        server = redis_server

    yield Histories
    redis_server.flush()


def play(histories: type[LateHistories], examples: int, **more: Any) -> None:
    bounds = {"deadline": None, "suppress_health_check": [*HealthCheck], **more}
    run_state_machine_as_test(histories, settings=settings(max_examples=examples, stateful_step_count=30, **bounds))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_singleton_lock.stores.redis.store.PAUSE", 0.0)


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_never_more_runs_at_once_than_the_limit_allows(histories: type[LateHistories], examples: int) -> None:
    play(histories, examples)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["undone", "late", "given_up"])
def test_model_can_fail(histories: type[LateHistories], monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Without undoing an acquire, voiding its earlier attempts, or a copy that names its predecessor's owner."""
    acquire = lock_commands.acquire
    if broken == "undone":
        monkeypatch.setattr(RedisStore, "_end", lambda *_, **__: None)
    elif broken == "late":
        monkeypatch.setattr(lock_commands, "acquire", lambda *asked, late=(), **how: acquire(*asked, **how))
    else:

        def forgetful(request: LockRequest, name: str, **how: Any) -> Call:
            return acquire(replace(request, given_up=()), name, **how)

        monkeypatch.setattr(lock_commands, "acquire", forgetful)
        monkeypatch.setattr(RedisStore, "abandon", lambda *_: None)
        monkeypatch.setattr(RedisStore, "_end", lambda *_, **__: None)
    # Owners are random, so a history that failed may not fail again.
    with pytest.raises((AssertionError, FlakyFailure)):
        # The first one is enough; it need not be short.
        play(histories, 1000, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
