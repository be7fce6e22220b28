"""How other parts see exclusive tasks: the worker's main process, `map` and `chunks`, monitors of events."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from celery import states
from celery.events.state import State
from celery.exceptions import Reject, TaskRevokedError

from celery_singleton_lock import LockConflict
from tests.integration.conftest import LONG, POOLS, Shop, until
from tests.integration.events import watching
from tests.patience import LIMIT
from tests.recording import overlaps

#: A pool that runs one task at a time, so that no task meets a held lock.
SOLO = pytest.param("solo", marks=pytest.mark.slow)


def test_key_is_made_only_where_the_task_runs(shop: Shop) -> None:
    """The main process knows the key all the same: it frees the lock of a killed child."""
    (worker,) = shop.start("one", concurrency=2)
    shop.conf["singleton_lock_ttl"] = 60.0
    shop.send("slowly_keyed", "report", 0.7, 60.0)
    (first, run) = shop.record.wait_for(starts=2)
    assert (first.job, run.job) == ("key", "report")
    shop.app.control.revoke(["something"])  # The consumer may do other things meanwhile.
    until(lambda: shop.held())
    os.kill(run.pid, signal.SIGKILL)
    until(lambda: not shop.held())
    until(lambda: "freed for a process that ended" in worker.log)
    keyed = {each.pid for each in shop.record.runs("key")}
    assert keyed == {run.pid}
    assert worker.process.pid not in keyed


def send_starmap(shop: Shop, task: str, *items: tuple[Any, ...]) -> Any:
    """Send what `task.starmap(items).delay()` sends, and each part of `task.chunks(items, n).delay()`."""
    return shop.app.send_task("celery.starmap", kwargs={"task": dict(shop.sign(task)), "it": [*items]})


@pytest.mark.parametrize("pool", POOLS)
def test_items_of_a_map_are_exclusive(shop: Shop, pool: str) -> None:
    shop.start("one", "two", pool=pool)
    holding = shop.send("waiting", "report", LONG)
    shop.record.wait_for(starts=1)
    maps = [send_starmap(shop, "waiting", ("report", 0.1), ("report", 0.1)) for _ in range(2)]
    until(lambda: [key for key in shop.keys() if key.endswith(":waiting")])  # noqa: SIM118 - no dictionary
    shop.record.let_end("report")
    assert [result.get(timeout=LIMIT) for result in maps] == [["report"] * 2] * 2
    assert holding.get(timeout=LIMIT) == "report"
    runs = shop.record.runs("report")
    assert len(runs) == 5
    assert overlaps(runs) == []
    until(lambda: shop.held() == [])


def test_item_that_meets_a_held_lock_ends_its_map(shop: Shop) -> None:
    shop.start("one", concurrency=2)
    holding = shop.send("exclusive", "held", 60.0)
    shop.record.wait_for(starts=1)
    result = send_starmap(shop, "exclusive", ("first", 0.01), ("held", 0.01), ("third", 0.01))
    with pytest.raises(LockConflict, match=holding.id):
        result.get(timeout=LIMIT)
    assert len(shop.record.runs("held")) == 1
    assert shop.record.runs("third") == []


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool != SOLO])
def test_watchers_see_the_state_that_is_stored(shop: Shop, pool: str) -> None:
    seen = State()
    with watching(shop, seen.event):
        shop.start("one", pool=pool, arguments=("-E",))
        running = shop.send("exclusive", "report", 300.0)
        shop.record.wait_for(starts=1)
        copies = {
            policy: shop.send("exclusive", "report", singleton_lock={"on_conflict": policy})
            for policy in ("skip", "raise", "reject")
        }
        ends = {"skip": states.REVOKED, "raise": states.FAILURE, "reject": states.FAILURE}
        for policy, copy in copies.items():
            with pytest.raises((TaskRevokedError, LockConflict, Reject)):
                copy.get(timeout=LIMIT)
            until(lambda: copy.id in seen.tasks and seen.tasks[copy.id].state == ends[policy])  # noqa: B023
            assert shop.state_of(copy) == ends[policy]
        waiting = shop.send("exclusive", "report", singleton_lock={"on_conflict": "retry"})
        until(lambda: waiting.id in seen.tasks)
        assert seen.tasks[running.id].state == states.STARTED
        shop.app.control.revoke(running.id, terminate=True, signal="KILL")
        if pool == "prefork":
            assert waiting.get(timeout=LIMIT) == "report"
            until(lambda: seen.tasks[waiting.id].state == states.SUCCESS)
