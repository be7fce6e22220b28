"""`celery locks release` and `clear` on real workers' locks: those of dead workers are freed, others only by force."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock.diagnosis import verdict
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest, Reservation
from celery_singleton_lock.stores.store import Store
from tests.integration.conftest import LONG, Shop, until
from tests.integration.operators import APP, EXCLUSIVE, ask, environment_of, program
from tests.patience import LIMIT
from tests.programs import ROOT
from tests.redis_server import RedisServer
from tests.unit.test_verdict import over

UNTIL_EXECUTED = f"{APP}.until_executed"
REPORT = (EXCLUSIVE, "report")
KEY = key_of_text("singleton_lock", "made", "1")


@pytest.fixture
def store(shop: Shop) -> Store:
    return open_url(shop.conf["singleton_lock_backend"])


def taken(store: Store, *, key: str = KEY, ttl: float = 60.0, **options: Any) -> Lease:
    """Take a lock for an unknown process that renews nothing."""
    lease = store.acquire(
        LockRequest(key, new_owner(), ttl=ttl, holder=Holder("made-up", node="gone@elsewhere", pid=7, **options))
    )
    assert isinstance(lease, Lease)
    return lease


class TestLiving:
    def test_lock_of_a_living_holder_is_not_freed(self, shop: Shop) -> None:
        shop.start("one")
        result = shop.send("exclusive", "report", LONG)
        shop.record.wait_for(starts=1)
        refused = ask(shop, "release", *REPORT, "--yes")
        assert refused.exit_code == 1
        assert f"task {result.id} on one@test" in refused.stdout
        assert "alive" in refused.stdout
        several = ask(shop, "clear", "--node", "one@*", "--yes", "--json")
        assert several.exit_code == 1
        assert json.loads(several.stdout)["freed"] is False
        shop.record.let_end("report")
        assert result.get(timeout=LIMIT) == "report", "nothing was done to it"

    def test_holder_that_is_freed_by_force_notices_and_stops(self, shop: Shop) -> None:
        shop.start("one")
        result = shop.send("exclusive", "report", 60.0)
        shop.record.wait_for(starts=1)
        freed = ask(shop, "release", *REPORT, "--force", "--yes")
        assert (freed.exit_code, freed.stdout.split()[0]) == (0, "freed")
        shop.record.wait_for(ends=1, job="report")
        until(lambda: [run.task_id for run in shop.record.runs("lost")] == [result.id])
        with pytest.raises(Exception, match="no longer has it"):
            result.get(timeout=LIMIT)
        assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"


class TestDead:
    def test_lock_of_a_process_that_is_over_is_freed_at_once(self, redis_server: RedisServer, shop_on: Any) -> None:
        shop = shop_on(redis_server, singleton_lock_ttl=60.0)
        (worker,) = shop.start("one")
        shop.send("exclusive", "report", 60.0)
        shop.record.wait_for(starts=1)
        worker.kill()
        freed = ask(shop, "clear", "--task", EXCLUSIVE, "--yes", "--json")
        assert freed.exit_code == 0, freed.stderr
        (told,) = map(json.loads, freed.stdout.splitlines())
        assert (told["node"], told["freed"], told["why"]) == ("one@test", True, "the process that held it is gone")
        assert shop.held() == []

    def test_worker_that_runs_the_task_says_so_at_once(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its renewals are twenty minutes apart: watching for one would take that long."""
        monkeypatch.setattr(verdict, "ASKED_FOR", LIMIT)  # It is answered at once, unless the machine is busy.
        shop.start("one")
        shop.send("exclusive", "report", 60.0, singleton_lock={"ttl": 3600.0})
        (run,) = shop.record.wait_for(starts=1)
        until(lambda: shop.app.control.inspect(timeout=LIMIT, limit=1).locks()["one@test"])
        refused = ask(shop, "clear", "--task", EXCLUSIVE, "--yes")
        assert refused.exit_code == 1
        assert f"on one@test (pid {run.pid}): its holder is alive and renews it" in refused.stdout
        assert "Watching" not in refused.stderr
        assert len(shop.held()) == 1

    def test_lock_that_is_not_renewed_in_time_is_freed(self, shop: Shop, store: Store) -> None:
        taken(store, ttl=30.0)
        with shop.locks() as client:
            client.pexpire(f"{KEY}:run", 5000)
        freed = ask(shop, "release", KEY, "--yes")
        assert freed.exit_code == 0, freed.stderr
        assert "Watching for a renewal, for" in freed.stderr
        assert freed.stdout.rstrip().endswith("on gone@elsewhere (pid 7): it was not renewed in time")
        assert shop.held() == []

    def test_only_the_locks_of_dead_processes_are_freed(self, shop: Shop, store: Store) -> None:
        dead, kept = (key_of_text("singleton_lock", "made", text) for text in "12")
        taken(store, key=dead, process=over())
        store.free(taken(store, key=kept), reservation=Reservation(Holder("next", 1, "gone@elsewhere"), 60.0))
        cleared = ask(shop, "clear", "--node", "gone@*", "--yes", "--json")
        assert cleared.exit_code == 1
        told = {line["key"]: line for line in map(json.loads, cleared.stdout.splitlines())}
        assert {key: line["freed"] for key, line in told.items()} == {dead: True, kept: False}
        assert told[kept]["why"].startswith("it is kept for a while on purpose")
        assert shop.held() == [f"{kept}:run"]
        assert ask(shop, "clear", "--node", "gone@*", "--yes", "--force").exit_code == 0
        assert shop.held() == []


class TestAsking:
    def test_nothing_is_freed_without_a_yes(self, shop: Shop, store: Store) -> None:
        taken(store)
        for answer in ("n\n", ""):
            asked = ask(shop, "release", KEY, "--force", answer=answer)
            assert asked.exit_code == 1
            assert "Free this lock even if the holder may be alive?" in asked.stderr
            assert "gone@elsewhere" in asked.stderr, "it is shown first"
            assert asked.stdout == ""
        assert len(shop.held()) == 1
        assert ask(shop, "release", KEY, "--force", answer="y\n").exit_code == 0
        assert shop.held() == []

    def test_lock_that_changed_hands_before_the_answer_is_not_freed(
        self, shop: Shop, store: Store, tmp_path: Path
    ) -> None:
        lease, said = taken(store), tmp_path / "said"
        with (
            said.open("w") as errors,
            subprocess.Popen(
                program("locks", "release", KEY, "--force"),
                cwd=ROOT,
                env={**os.environ, **environment_of(shop)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as asking,
        ):
            until(lambda: "[y/N]" in said.read_text())
            store.free(lease)
            other = taken(store)
            answer, _ = asking.communicate("y\n", timeout=LIMIT)
        assert asking.returncode == 1
        assert "it has changed hands meanwhile" in answer
        assert store.renew([other], timeout=1) == [True]

    def test_lock_that_is_not_held_is_reported(self, shop: Shop) -> None:
        nothing = ask(shop, "release", KEY, "--yes")
        assert nothing.exit_code == 1
        assert f"{KEY} is not held" in nothing.stderr

    def test_clear_asks_about_a_name_that_is_mistyped(self, shop: Shop) -> None:
        mistyped = ask(shop, "clear", "--task", EXCLUSIVE[:-1], "--yes")
        assert mistyped.stderr == "No such lock is held.\n"
        for name in (EXCLUSIVE, "a.lock.outside.of.tasks", EXCLUSIVE[:-1] + "*"):
            assert ask(shop, "clear", "--task", name, "--yes").stderr == "No such lock is held.\n"

    def test_clear_needs_a_filter(self, shop: Shop) -> None:
        assert ask(shop, "clear", "--yes").exit_code == 2


def test_lock_of_a_message_is_left_until_it_ends_by_itself(shop: Shop) -> None:
    key = key_of_queue(key_of_text("singleton_lock", UNTIL_EXECUTED, "1"))
    lease = taken(open_url(shop.conf["singleton_lock_backend"]), key=key, ttl=3600.0)
    for words in (["release", key], ["clear", "--task", UNTIL_EXECUTED]):
        left = ask(shop, *words, "--yes")
        assert left.exit_code == 1
        assert "it ends by itself in 59 min: its message may still come; --force frees it now" in left.stdout
    assert ask(shop, "clear", "--task", UNTIL_EXECUTED, "--yes", "--force").exit_code == 0
    assert not open_url(shop.conf["singleton_lock_backend"]).free(lease)
