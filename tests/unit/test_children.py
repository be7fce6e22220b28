"""What the main process does for its children, with memory locks and real processes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal.writer import JournalWriter
from celery_singleton_lock.journal_entry import CRASHED
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.worker import children
from celery_singleton_lock.worker.children import Children
from celery_singleton_lock.worker.run_hold import RunHold
from celery_singleton_lock.worker.silences import report
from tests.patience import LIMIT, until

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfds here")

#: Seconds: on a busy machine, the thread that renews may have to wait for most of them.
TTL = 2.0


class Store(MemoryStore):
    """A memory store that counts renewals, and can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        # Threads of earlier tests may still write of theirs.
        self.server = f"memory://{new_owner()}"
        self.fail = False
        self.renewed = 0
        self.failed = threading.Event()

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        if self.fail:
            raise LockUnavailable("test", "told to fail")
        return super().refuse(*args, **kwargs)

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        if self.fail:
            self.failed.set()
            raise LockUnavailable("test", "told to fail")
        self.renewed += 1
        return super().renew(holds, timeout=timeout)


class Delivery:
    """What a child carries out, as far as its main process knows it."""

    def __init__(self, store: MemoryStore, key: str = "k", *, holds: bool = True, ttl: float = TTL) -> None:
        self.is_running = True
        self.key, self.owner, self.ttl = key, new_owner(), ttl
        self.give_up_at = math.inf
        self.slot: int | None = None
        if holds:
            store.acquire(LockRequest(key, self.owner, ttl=ttl, holder=Holder()))

    def hold(self) -> Hold:
        return Hold(self.key, self.owner, ttl=self.ttl, slot=self.slot)

    def in_words(self) -> str:
        return f"task shop.bill[id], {self.key}"


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def family(store: Store) -> Iterator[Children]:
    family = Children(store, JournalWriter(None, lambda: None, 0), Heartbeat(store).server_watch)
    yield family
    family.close()


@pytest.fixture
def fork() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start a process that waits to be killed."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.stdin.close()
        process.kill()
        process.wait()


def is_held(store: Store, key: str = "k") -> bool:
    found = store.acquire(LockRequest(key, new_owner(), ttl=60, holder=Holder()))
    if isinstance(found, Lease):
        store.free(found)
    return isinstance(found, Held)


def check_held_for_longer_than_its_ttl(store: Store) -> None:
    end = clock.now() + 3 * TTL
    while clock.now() < end:
        assert is_held(store)
        clock.sleep(0.02)


def test_lock_of_a_running_delivery_is_renewed(store: Store, family: Children, fork: Callable) -> None:
    delivery = Delivery(store)
    family.assign(fork().pid, delivery)
    check_held_for_longer_than_its_ttl(store)


def supersede(store: Store, key: str = "k") -> None:
    """A newer message has come."""
    (occupant,) = store._occupants[key].values()
    occupant.holder = replace(occupant.holder, superseded_by="newer")


def test_child_that_does_not_stop_for_a_newer_message_is_killed(store: Store, family: Children, fork: Callable) -> None:
    child, delivery = fork(), Delivery(store)
    family.assign(child.pid, delivery)
    supersede(store)
    assert child.wait(LIMIT) == -signal.SIGKILL
    until(lambda: not is_held(store), "freed")


def test_child_that_has_stopped_for_a_newer_message_is_left_alone(
    store: Store, family: Children, fork: Callable
) -> None:
    child, delivery, other = fork(), Delivery(store), Delivery(store, "other")
    family.assign(child.pid, delivery)
    supersede(store)
    until(lambda: store.renewed > 0, "renewed")
    store.free(delivery.hold())
    family.assign(child.pid, other)
    renewed = store.renewed
    until(lambda: store.renewed > renewed + children.PATIENCE + 1, "the next one is renewed")
    assert child.poll() is None


def test_child_that_has_stopped_for_a_newer_message_may_take_time_to_report_it(
    store: Store, family: Children, fork: Callable
) -> None:
    """Its lock is free, and it is still storing its end in a slow result backend."""
    child, delivery = fork(), Delivery(store)
    family.assign(child.pid, delivery)
    supersede(store)
    until(lambda: store.renewed > 0, "renewed")
    store.free(delivery.hold())
    renewed = store.renewed
    until(lambda: child.poll() or store.renewed > renewed + children.PATIENCE + 1, "renewed several times")
    assert child.poll() is None


def test_assigning_a_delivery_waits_for_nothing(
    store: Store, family: Children, fork: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's consumer would wait, and with it all tasks."""
    child, here, waited = fork(), threading.get_ident(), []

    class Poll:
        def __init__(self) -> None:
            self._poll = poll()

        def register(self, *arguments: int) -> None:
            self._poll.register(*arguments)

        def poll(self, milliseconds: float | None) -> list[tuple[int, int]]:
            if threading.get_ident() == here:
                waited.append(milliseconds)
            return self._poll.poll(milliseconds)

    poll = children.select.poll
    monkeypatch.setattr(children.select, "poll", Poll)
    for _ in range(3):
        family.assign(child.pid, Delivery(store, holds=False))
    assert set(waited) == {0}


def test_short_deliveries_do_not_wake_the_thread(
    store: Store, family: Children, fork: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "FIRST_CHECK", 60.0)
    woken: list[None] = []
    monkeypatch.setattr(family._news, "give", lambda: woken.append(None))
    child = fork()
    over = Delivery(store, holds=False)
    over.is_running = False
    family.assign(child.pid, over)
    until(lambda: family._wakes_at)
    for _ in range(20):
        delivery = Delivery(store, holds=False)
        family.assign(child.pid, delivery)
        delivery.is_running = False
    assert woken == []


def test_latest_owner_of_a_delivery_counts(store: Store, family: Children, fork: Callable) -> None:
    """Lock server and broker did not answer, so the message waited in its slot, and asks as a new owner."""
    child, delivery = fork(), Delivery(store, holds=False)
    family.assign(child.pid, delivery)
    until(lambda: store.renewed)
    delivery.owner = new_owner()
    store.acquire(LockRequest(delivery.key, delivery.owner, ttl=TTL, holder=Holder()))
    check_held_for_longer_than_its_ttl(store)
    store.acquire(LockRequest(delivery.key, delivery.owner, ttl=600, holder=Holder()))
    family.free_when_gone(child.pid)
    delivery.is_running = False
    child.kill()
    until(lambda: not is_held(store))


def test_renewal_goes_on_after_an_error(store: Store, family: Children, fork: Callable) -> None:
    delivery = Delivery(store, ttl=2.0)
    family.assign(fork().pid, delivery)
    store.fail = True
    assert store.failed.wait(LIMIT)
    store.fail = False
    until(lambda: store.renewed)
    assert is_held(store)


def test_lock_of_a_dead_child_is_freed_at_once(store: Store, family: Children, fork: Callable) -> None:
    child, delivery = fork(), Delivery(store, ttl=600)
    family.assign(child.pid, delivery)
    child.kill()
    until(lambda: not is_held(store))


def test_freed_lock_is_reported_with_the_run_that_died(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    journal = store.journal("p", size=10)
    writer, since = JournalWriter(journal, lambda: None, 0), clock.wall() - 30
    holder = Holder("the-id", node="one@web", pid=7, since=since, ttl=600, label="tenant=7")
    children.free(store, RunHold(Delivery(store, ttl=600).hold(), holder, "shop.report"), writer)
    assert (
        "k (tenant=7): freed for a process that ended without freeing it: "
        "task shop.report[the-id] on one@web (pid 7)" in caplog.text
    )
    writer.write()
    (entry,) = journal.entries(since=0.0)
    assert (entry.kind, entry.outcome, entry.task, entry.key) == ("free", CRASHED, "shop.report", "k")
    assert (entry.task_id, entry.node, entry.pid, entry.label) == ("the-id", "one@web", 7, "tenant=7")
    assert entry.ended - entry.began == pytest.approx(30.0, abs=LIMIT)


def test_freed_lock_without_a_known_run_is_no_crash_of_one(store: Store) -> None:
    """It may have been kept for a retry that was revoked."""
    journal = store.journal("p", size=10)
    writer = JournalWriter(journal, lambda: None, 0)
    children.free(store, Delivery(store, ttl=600).hold(), writer)
    writer.write()
    (entry,) = journal.entries(since=0.0)
    assert (entry.kind, entry.outcome, entry.ran, entry.task_id) == ("free", "", False, None)


def test_lock_of_a_child_that_died_before_it_was_assigned_is_freed(
    store: Store, family: Children, fork: Callable
) -> None:
    child, delivery = fork(), Delivery(store, ttl=600)
    child.kill()
    child.wait()
    family.assign(child.pid, delivery)
    until(lambda: not is_held(store))


def test_only_the_lock_of_the_dead_child_is_freed(store: Store, family: Children, fork: Callable) -> None:
    pairs = [(fork(), Delivery(store, f"k{n}", ttl=600)) for n in range(5)]
    for child, delivery in pairs:
        family.assign(child.pid, delivery)
    pairs[2][0].kill()
    until(lambda: not is_held(store, "k2"))
    assert [is_held(store, f"k{n}") for n in range(5)] == [True, True, False, True, True]


def test_lock_is_renewed_in_its_place_once_that_is_known(store: Store, family: Children, fork: Callable) -> None:
    """A node of a Redlock that lacks it gets it again only then."""
    renewed: list[int | None] = []
    renew, delivery = store.renew, Delivery(store)

    def seen(holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        renewed.extend(hold.slot for hold in holds)
        return renew(holds, timeout=timeout)

    store.renew = seen
    family.assign(fork().pid, delivery)
    until(lambda: renewed, "it is renewed for the first time")
    assert set(renewed) == {None}
    delivery.slot = 0
    until(lambda: renewed[-1] == 0, "it is renewed there", seconds=20.0)


def test_next_delivery_replaces_the_last(store: Store, family: Children, fork: Callable) -> None:
    child, first, second = fork(), Delivery(store, "first", ttl=600), Delivery(store, "second", ttl=600)
    family.assign(child.pid, first)
    first.is_running = False
    family.assign(child.pid, second)
    child.kill()
    until(lambda: not is_held(store, "second"))
    assert is_held(store, "first"), "its present holder is not the child's concern"


def test_ended_delivery_is_neither_renewed_nor_freed(store: Store, family: Children, fork: Callable) -> None:
    child, delivery = fork(), Delivery(store)
    family.assign(child.pid, delivery)
    delivery.is_running = False
    until(lambda: not is_held(store))
    assert store.renewed == 0
    child.kill()


def test_forgotten_delivery_ends_by_itself(store: Store, family: Children, fork: Callable) -> None:
    delivery = Delivery(store)
    family.assign(fork().pid, delivery)
    del delivery
    until(lambda: not is_held(store))


def test_strangers_lock_is_neither_renewed_nor_freed(store: Store, family: Children, fork: Callable) -> None:
    child, delivery = fork(), Delivery(store, holds=False)
    stranger = Delivery(store)
    family.assign(child.pid, delivery)
    child.kill()
    clock.sleep(0.1)
    assert is_held(store)
    until(lambda: not is_held(store))
    del stranger


def test_killed_child_keeps_its_lock_until_it_is_gone(store: Store, family: Children, fork: Callable) -> None:
    """Its end was already reported (a hard time limit), but it is still cleaning up."""
    child, delivery = fork(), Delivery(store, ttl=600)
    family.assign(child.pid, delivery)
    delivery.is_running = False
    family.free_when_gone(child.pid)
    del delivery
    assert is_held(store)
    child.kill()
    until(lambda: not is_held(store))


def test_forgetting_a_child_waits_for_its_death(store: Store, family: Children, fork: Callable) -> None:
    child, delivery = fork(), Delivery(store, ttl=600)
    family.assign(child.pid, delivery)
    threading.Timer(0.1, child.kill).start()
    assert family.forget(child.pid, delivery)
    assert child.poll() is not None


def test_forgetting_a_child_does_not_wait_forever(
    store: Store, family: Children, fork: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "DEATH", 0.05)
    child, delivery = fork(), Delivery(store, ttl=600)
    family.assign(child.pid, delivery)
    assert not family.forget(child.pid, delivery)
    assert is_held(store)
    child.kill()
    until(lambda: not is_held(store))


def test_unknown_child_is_gone(family: Children) -> None:
    assert family.forget(1 << 22, Delivery(MemoryStore(), holds=False))


def test_child_that_reuses_a_pid_is_another_child(
    store: Store, family: Children, fork: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fork(), fork()
    first, second = Delivery(store, "first", ttl=600), Delivery(store, "second", ttl=600)
    # The watching thread stands still meanwhile, so the old child's end is not noticed when its PID comes again.
    open_pidfd = os.pidfd_open
    monkeypatch.setattr(Children, "_run", lambda self: None)
    family.assign(old.pid, first)
    old.kill()
    old.wait()
    monkeypatch.setattr(os, "pidfd_open", lambda pid: open_pidfd(new.pid if pid == old.pid else pid))
    family.assign(old.pid, second)
    monkeypatch.undo()
    family.assign(fork().pid, Delivery(store, "other", ttl=600))
    until(lambda: not is_held(store, "first"))
    assert is_held(store, "second")
    new.kill()
    until(lambda: not is_held(store, "second"))


def test_loss_of_a_delivery_does_not_wait_for_the_next_delivery_of_its_child(
    store: Store, family: Children, fork: Callable
) -> None:
    child, lost, running = fork(), Delivery(store, "lost", ttl=600), Delivery(store, "running", ttl=600)
    family.assign(child.pid, running)
    assert family.forget(child.pid, lost)
    child.kill()
    until(lambda: not is_held(store, "running"))


def test_lease_that_is_reported_late_is_renewed(store: Store, family: Children, fork: Callable) -> None:
    """Its key takes a while to compute."""

    class Late(Delivery):
        known = False

        def hold(self) -> Hold | None:
            return super().hold() if self.known else None

    delivery = Late(store, ttl=3.0)
    family.assign(fork().pid, delivery)
    clock.sleep(0.5)
    delivery.known = True
    until(lambda: store.renewed)


def test_no_descriptors_are_left(store: Store, family: Children, fork: Callable) -> None:
    def is_pidfd(name: str) -> bool:
        # Another test's thread may close one in between.
        with contextlib.suppress(FileNotFoundError):
            return "pidfd" in os.readlink(f"/proc/self/fd/{name}")
        return False

    def pidfds() -> int:
        return sum(is_pidfd(name) for name in os.listdir("/proc/self/fd"))

    before = pidfds()
    for _ in range(5):
        child, delivery = fork(), Delivery(store, ttl=600)
        family.assign(child.pid, delivery)
        child.kill()
        until(lambda: not is_held(store))
    until(lambda: pidfds() <= before)


def test_pool_is_trusted_where_there_are_no_pidfds(
    store: Store, family: Children, fork: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    child, delivery = fork(), Delivery(store)
    family.assign(child.pid, delivery)
    until(lambda: store.renewed)
    assert family.forget(child.pid, delivery)


def test_error_does_not_end_the_thread(store: Store, family: Children, fork: Callable) -> None:
    class Broken(Delivery):
        def hold(self) -> Hold:
            raise RuntimeError("as told")

    broken, delivery = Broken(store, "broken"), Delivery(store)
    family.assign(fork().pid, broken)
    family.assign(fork().pid, delivery)
    broken.is_running = True
    until(lambda: not is_held(store, "broken"))
    broken.is_running = False
    child, later = fork(), Delivery(store, "later", ttl=600)
    family.assign(child.pid, later)
    child.kill()
    until(lambda: not is_held(store, "later"))


def test_outage_is_reported_for_all_children(
    store: Store, family: Children, fork: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for those that have no lease yet, or no task."""
    caplog.set_level(logging.WARNING)
    deliveries = [Delivery(store, f"k{n}") for n in range(4)]
    for number, delivery in enumerate(deliveries):
        delivery.give_up_at = clock.now() + 100 - 10 * number
        family.assign(fork().pid, delivery)
    deliveries[0].give_up_at = math.inf
    deliveries[3].is_running = False
    store.fail = True
    until(lambda: "trying again" in caplog.text)
    assert "; trying again; 2 leases are given up unless they are renewed, the first in " in caplog.text
    assert "s: task shop.bill[id], k2" in caplog.text
    store.fail = False
    until(lambda: f"{store.server} answers again" in caplog.text)
    # Two threads may have seen the same at once, see `Outage`.
    own = {it.partition("; ")[0].partition(",")[0]: it for it in caplog.messages if "test:" in it or store.server in it}
    assert [*own] == ["lock server test: told to fail", f"{store.server} answers again"], caplog.text


def test_outage_that_a_child_reports_is_looked_into(
    store: Store, family: Children, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any delivery was assigned: its child may be faster than this process."""
    caplog.set_level(logging.WARNING)
    family.start()
    store.fail = True
    report(family.silences.writer, "k", "refused")
    until(lambda: "trying again" in caplog.text)
    store.fail = False
    until(lambda: "answers again" in caplog.text)


def test_one_thread_watches_all_children(store: Store, family: Children, fork: Callable) -> None:
    deliveries = [Delivery(store, f"k{n}") for n in range(5)]
    for delivery in deliveries:
        family.assign(fork().pid, delivery)
    before = sum(thread.name == "singleton-lock-children" for thread in threading.enumerate())
    family.assign(fork().pid, deliveries[0])
    assert sum(thread.name == "singleton-lock-children" for thread in threading.enumerate()) == before


def test_stopping_worker_renews_until_its_last_child_is_gone(store: Store, family: Children, fork: Callable) -> None:
    child, delivery = fork(), Delivery(store)
    family.assign(child.pid, delivery)
    family.close()
    renewed = store.renewed
    until(lambda: store.renewed > renewed)
    child.kill()
    until(lambda: not store.held(delivery.key))
    until(lambda: family._thread is None)
