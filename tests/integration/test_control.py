"""`celery inspect locks` and `celery control release_lock`, answered by real workers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from celery_singleton_lock import LockLost
from celery_singleton_lock.keys.key import key_of_text
from tests.integration.conftest import LONG, Shop, until
from tests.integration.operators import celery, environment_of
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

#: Seconds of leases.
TTL = 6.0

#: The pools that answer while they run a task: `solo` does not.
POOLS = ("prefork", *(pytest.param(pool, marks=pytest.mark.slow) for pool in ("gevent", "threads", "eventlet")))


def start(shop: Shop, *names: str, **options: Any) -> None:
    """Start workers and wait until they answer: they are ready a moment before they listen."""
    for worker in shop.start(*names, **options):
        until(lambda worker=worker: answers(shop, worker.name))


def answers(shop: Shop, node: str) -> bool:
    """Whether a worker answers. An earlier test may have cut a connection of this process."""
    with suppress(ConnectionError):
        return bool(shop.app.control.ping([node], timeout=1.0, limit=1))
    return False


def key_of(shop: Shop) -> str:
    """The key of the only lock that is held."""
    (key,) = shop.held()
    return key.removesuffix(":run")


def inspected(shop: Shop, node: str = "one@test") -> Any:
    inspect = shop.app.control.inspect(destination=[node], timeout=LIMIT, limit=1)
    return inspect.locks()[node]


def inspected_once(shop: Shop, count: int, node: str = "one@test") -> Any:
    """The locks that a worker holds, once there are so many: its main process may learn of a run after the record."""
    until(lambda: len(inspected(shop, node)) == count)
    return inspected(shop, node)


def released(shop: Shop, key: str, node: str = "one@test") -> dict[str, str]:
    (reply,) = shop.app.control.release_lock(key, destination=[node], reply=True, timeout=LIMIT, limit=1)
    told: dict[str, str] = reply[node]
    return told


@pytest.mark.parametrize("pool", POOLS)
def test_worker_lists_the_locks_that_it_holds(shop: Shop, pool: str) -> None:
    start(shop, "one", pool=pool, concurrency=3)
    assert inspected(shop) == []
    holding = shop.send("exclusive", "report", 60.0)
    (begun,) = shop.record.wait_for(starts=1)
    shop.send("waiting", "report")
    shop.send("plain", "report", 60.0)
    shop.record.wait_for(starts=2)
    (told,) = inspected_once(shop, 1)
    assert (told["task_id"], told["task"]) == (holding.id, "tests.integration.app.exclusive")
    assert (told["key"], told["pid"], told["ttl"]) == (key_of(shop), begun.pid, TTL)
    assert told["label"] == "job='report'"
    assert 0 <= told["held_for"] < 60


@pytest.mark.parametrize("pool", POOLS)
def test_task_is_stopped_before_its_lock_is_free_for_others(shop: Shop, pool: str) -> None:
    start(shop, "one", "two", pool=pool)
    stopped = shop.send("exclusive", "report", 60.0)
    shop.record.wait_for(starts=1)
    following = [shop.send("waiting", "report", 0.5) for _ in range(2)]
    nodes: list[str] = []
    # The main process may learn after the record that a run has begun.
    until(lambda: nodes.extend(name for name in ("one@test", "two@test") if inspected(shop, name)) or nodes)
    told = released(shop, f"{key_of(shop)}:run", nodes[0])
    assert f"task {stopped.id} is stopped within a second" in told["ok"]
    with pytest.raises(LockLost, match="an operator has released it"):
        stopped.get(timeout=LIMIT)
    assert [result.get(timeout=LIMIT) for result in following] == ["report"] * 2
    runs = shop.record.runs("report")
    assert runs[0].task_id == stopped.id
    assert overlaps(runs) == []
    until(lambda: shop.held() == [])


def test_task_that_is_only_warned_goes_on(shop: Shop) -> None:
    start(shop, "one")
    warned = shop.send("warned", "report", LONG)
    shop.record.wait_for(starts=1)
    inspected_once(shop, 1)
    told = released(shop, key_of(shop))
    assert f"task {warned.id} goes on" in told["ok"]
    shop.record.wait_for(starts=1, job="lost")
    shop.record.let_end("report")
    assert warned.get(timeout=LIMIT) == "report"
    assert [run.task_id for run in shop.record.runs("lost")] == [warned.id]
    until(lambda: shop.held() == [])


def test_lock_is_free_after_one_ttl_though_the_worker_dies_meanwhile(shop: Shop) -> None:
    start(shop, "one")
    shop.send("exclusive", "report", 60.0)
    shop.record.wait_for(starts=1)
    inspected_once(shop, 1)
    assert "is stopped" in released(shop, key_of(shop))["ok"]
    shop.workers[0].kill()
    until(lambda: shop.held() == [])


def test_lock_that_is_not_held_here_is_reported(shop: Shop) -> None:
    start(shop, "one")
    key = key_of_text("singleton_lock", "job", "x")
    assert released(shop, key) == {"ok": "no task of this worker holds it"}
    assert released(shop, "")["error"].startswith("which lock?")
    for wrong in ("report", f"other:1:{{job:{'0' * 32}}}", f"{key}:other"):
        assert "is not a key of this app" in released(shop, wrong)["error"]


def test_worker_says_that_the_lock_server_does_not_answer(
    own_redis: RedisServer, redis_server: RedisServer, shop_on: Any
) -> None:
    shop = shop_on(redis_server, locks=own_redis)
    start(shop, "one")
    shop.send("warned", "report", 60.0)
    shop.record.wait_for(starts=1)
    inspected_once(shop, 1)
    key = key_of(shop)
    own_redis.kill()
    for told in (inspected(shop), released(shop, key)):
        assert told["error"].startswith("lock server redis://127.0.0.1")


def test_programs_list_the_commands(shop: Shop) -> None:
    for command in (("inspect", "locks"), ("control", "release_lock <key>")):
        assert command[1] in celery(command[0], "--list", env=environment_of(shop)).stdout


def test_program_refuses_what_cannot_be_a_key(shop: Shop) -> None:
    start(shop, "one")
    of_another_app = f"elsewhere:1:{{job:{'0' * 32}}}"
    for wrong in ("report", "{job:12}", f"singleton_lock:1:{{job:{'0' * 32}}}:other", of_another_app):
        answer = celery("control", "release_lock", wrong, env=environment_of(shop))
        assert answer.returncode == 2
        assert "is not the key of a lock" in answer.stderr
        assert "Traceback" not in answer.stderr
    for key in (f"singleton_lock:1:{{job:{'0' * 32}}}", f"singleton_lock:1:{{job:{'0' * 32}}}:run"):
        answer = celery("control", "release_lock", key, env=environment_of(shop))
        assert (answer.returncode, "no task of this worker holds it" in answer.stdout) == (0, True), answer
