"""The public API as users' type checkers see it: never run, checked by mypy and pyright, both strict.

Where a comment ignores an error, that error is asserted: type checkers complain about unneeded comments.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from redis import Redis
from typing_extensions import assert_type

from celery_singleton_lock import (
    CallOptions,
    DuplicateTask,
    Lease,
    Lock,
    LockConflict,
    LockLost,
    LockUnavailable,
    Redlock,
    Semaphore,
    SingletonTask,
    StaleFence,
    install,
    lock_acquired,
    lock_lost,
)
from celery_singleton_lock.contrib.fencing import check_fence
from celery_singleton_lock.testing import RedisServer

app = Celery("shop")
install(app)


@app.task(base=SingletonTask)
def rebuild(tenant_id: int, full: bool = False) -> int:
    return tenant_id


@app.task(base=SingletonTask, bind=True, lock_key=["tenant_id"], lock_wait=10, on_conflict="raise")
def bill(self: SingletonTask, tenant_id: int) -> None:
    assert_type(self.lock, Lease)
    assert_type(self.lock.fence, int)
    assert_type(self.lock.remaining, float)
    assert_type(self.lock.held, bool)
    self.lock.check()


assert_type(rebuild, SingletonTask)
assert_type(bill, SingletonTask)
assert_type(rebuild.lock_key_of(7, full=True), str)
rebuild.delay(7)
rebuild.apply_async((7,), singleton_lock={"on_conflict": "raise", "wait": 5})
rebuild.apply_async((7,), singleton_lock=False)
rebuild.apply_async((7,), singleton_lock=True)  # type: ignore[arg-type]
rebuild.apply_async((7,), singleton_lock={"timeout": 5})  # type: ignore[arg-type]
rebuild.apply_async((7,), singleton_lock={"on_conflict": "explode"})  # type: ignore[arg-type]
rebuild.apply((7,), singleton_lock={"key": "seven"})
rebuild.s(7).set(singleton_lock={"wait": 5})  # type: ignore[call-arg] # Celery's stubs know its own options only.
rebuild.signature((7,), options={"singleton_lock": {"wait": 5}})
options: CallOptions = {"ttl": 60}
rebuild.apply_async((7,), singleton_lock=options)
chain = rebuild.s(7) | bill.si(7)


class Exclusive(SingletonTask):
    lock_key = ["tenant_id"]
    lock_name = "ledger"
    lock_ttl = 60
    on_conflict = "retry"
    on_lock_lost = "warn"


def choose(task: SingletonTask, conflict: LockConflict) -> str:
    return "skip"


class Chosen(SingletonTask):
    on_conflict = staticmethod(choose)


class Methods(SingletonTask):
    @staticmethod
    def lock_key(arguments: dict[str, Any]) -> str:
        return str(arguments["tenant_id"])

    @staticmethod
    def on_conflict(task: SingletonTask, conflict: LockConflict) -> str:
        return "skip"

    @staticmethod
    def on_duplicate(task: SingletonTask, duplicate: DuplicateTask) -> str:
        return "raise"


@app.task(base=SingletonTask, on_conflict=choose)
def sync(tenant_id: int) -> None: ...


class Wrong(SingletonTask):
    lock_ttl = "a minute"  # type: ignore[assignment]
    on_conflict = "explode"  # type: ignore[assignment]
    on_lock_lost = "shrug"  # type: ignore[assignment]
    on_unavailable = True  # type: ignore[assignment]


@lock_acquired.connect
def acquired(sender: SingletonTask, task_id: str, key: str, lease: Lease, waited: float, **_: Any) -> None: ...


@lock_lost.connect
def lost(sender: SingletonTask, lease: Lease, reason: str, **_: Any) -> None: ...


def outside_of_tasks(client: Redis, clients: list[Redis]) -> None:
    with Lock(client, "nightly", timeout=30) as lock:
        assert_type(lock, Lock)
        assert_type(lock.fence, int)
    with Redlock(clients, "nightly") as redlock:
        assert_type(redlock.lost, bool)
    with Semaphore(client, "exports", 3, blocking_timeout=60) as semaphore:
        semaphore.check()
    by_client: Lock = client.lock("nightly", lock_class=Lock)
    with by_client as held:
        assert_type(held.fence, int)
    assert_type(Lock(client, "nightly").acquire(blocking=False), bool)
    Lock(client, "nightly", seconds=30)  # type: ignore[call-arg]
    Semaphore(client, "exports", "three")  # type: ignore[arg-type]


def errors(conflict: LockConflict, lost: LockLost, unavailable: LockUnavailable, stale: StaleFence) -> None:
    assert_type(conflict.task_id, str | None)
    assert_type(conflict.remaining, float)
    assert_type(lost.reason, str)
    assert_type(unavailable.server, str)
    assert_type(stale.seen, int | None)


def guards(lease: Lease) -> None:
    check_fence("total", lease.fence)
    check_fence("total", lease)  # type: ignore[arg-type]


def servers() -> None:
    with RedisServer() as server:
        assert_type(server, RedisServer)
        assert_type(server.url, str)
