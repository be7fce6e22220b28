"""`celery locks list` and `show`, as an operator runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock.diagnosis.held import GONE
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_text
from tests.integration.beats import APP as BEAT_APP
from tests.integration.beats import studio
from tests.integration.conftest import LONG, Shop, until
from tests.integration.operators import EXCLUSIVE, ask, locks, of_shop
from tests.patience import LIMIT
from tests.redis_server import RedisServer


def listed(shop: Shop, *arguments: str) -> list[dict[str, Any]]:
    shown = ask(shop, "list", "--json", *arguments)
    assert shown.exit_code == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


class TestList:
    def test_shows_holders(self, shop: Shop) -> None:
        (worker,) = shop.start("one")
        result = shop.send("exclusive", "report", LONG)
        (run,) = shop.record.wait_for(starts=1)
        (line,) = listed(shop)
        assert line["task_id"] == result.id
        assert (line["name"], line["label"]) == ("job", "job='report'"), "its lock_name"
        assert (line["node"], line["pid"]) == (worker.name, run.pid)
        assert 0 <= line["held_for"] < 60
        assert 0 < line["expires_in"] <= line["ttl"] == 6.0
        assert (line["waiters"], line["scope"], line["left_behind"]) == (0, "while_executing", False)
        titles, row = ask(shop, "list").stdout.splitlines()
        assert titles.split() == ["TASK", "LABEL", "HOLDER", "WORKER", "FOR", "WAITING"]
        assert row.split()[:4] == ["job", "job='report'", result.id[:8], worker.name]
        *_, key = ask(shop, "list", "--keys").stdout.split()
        assert key == line["key"]
        assert "label    job='report'" in ask(shop, "show", line["key"]).stdout
        shop.record.let_end("report")
        result.get(timeout=LIMIT)
        nothing = ask(shop, "list")
        assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "No lock is held.\n")

    def test_shows_only_what_is_asked_for(self, shop: Shop) -> None:
        (worker,) = shop.start("one")
        shop.send("exclusive", "report", 30.0)
        shop.record.wait_for(starts=1)
        assert len(listed(shop, "--task", EXCLUSIVE, "--node", "one@*", "--older-than", "0")) == 1
        assert listed(shop, "--older-than", "1000") == []
        worker.kill()

    def test_shows_waiters(self, shop: Shop) -> None:
        shop.start("one", concurrency=3)
        first, *_ = [shop.send("waiting", "report", 20.0) for _ in range(3)]
        shop.record.wait_for(starts=1)
        until(lambda: [line["waiters"] for line in listed(shop)] == [2])
        del first

    def test_shows_the_beats(self, own_redis: RedisServer, tmp_path: Path) -> None:
        with studio(own_redis, own_redis, tmp_path) as beats:
            both = beats.start("first", "second")
            until(lambda: len(beats.seen()) == 2)
            shown = locks("list", "--json", app=BEAT_APP, env=beats.environment())
            lines = [json.loads(line) for line in shown.stdout.splitlines()]
            assert {line["name"] for line in lines} == {f"beat:{BEAT_APP}"}
            assert {line["pid"] for line in lines} == {beat.process.pid for beat in both}
            _, *rows = locks("list", app=BEAT_APP, env=beats.environment()).stdout.splitlines()
            assert [row.split()[1] for row in rows] == ["beat", "beat"]

    @pytest.mark.slow
    def test_a_hundred_thousand_locks_are_listed_in_small_steps(self, own_redis: RedisServer, shop_on: Any) -> None:
        shop = shop_on(own_redis)
        with own_redis.client(2) as client:
            # That many keys with a value like this package's, and as many keys that are not locks.
            value = new_owner() + Holder("task", 0, "node", 1, 1.0).dumps(30.0)
            make = """for i = ARGV[2] + 1, ARGV[2] + 10000 do
                local key = 'singleton_lock:1:{job:' .. string.format('%032d', i) .. '}'
                redis.call('SET', key .. ':run', ARGV[1], 'PX', 600000)
                redis.call('SET', key .. ':fence', i, 'PX', 600000) end"""
            for begin in range(0, 100_000, 10_000):
                client.eval(make, 0, value, begin)
            client.config_resetstat()
            client.config_set("slowlog-log-slower-than", 0)
            client.config_set("slowlog-max-len", 1)
            shown = ask(shop, "list", "--json")
            assert shown.exit_code == 0, shown.stderr
            assert len(shown.stdout.splitlines()) == 100_000
            used = {
                name.removeprefix("cmdstat_"): stats["calls"] for name, stats in client.info("commandstats").items()
            }
        # No command that looks at all keys, or at many keys in one go, is among them; the other commands belong to the
        # connections and to this test.
        ours = {"scan", "get", "pttl", "time", "hvals"}
        others = {"hello", "auth", "select", "client", "config", "info", "slowlog"}
        assert {name.partition("|")[0] for name in used} - others == ours
        assert used["scan"] >= 200_000 / 500, "so that each looks at 500 keys"
        assert used["get"] < 101_000


class TestShow:
    def test_shows_all_about_a_key_and_a_call(self, redis_server: RedisServer, shop_on: Any) -> None:
        shop = shop_on(redis_server, singleton_lock_ttl=60.0)
        (worker,) = shop.start("one")
        first = shop.send("exclusive", "report", 0.01)
        first.get(timeout=LIMIT)
        second = shop.send("exclusive", "report", 30.0)
        run = shop.record.wait_for(starts=2)[-1]
        shown = ask(shop, "show", "--json", EXCLUSIVE, "report")
        assert shown.exit_code == 0, shown.stderr
        told = json.loads(shown.stdout)
        (line,) = told["held"]
        assert (line["task_id"], line["node"], line["pid"]) == (second.id, worker.name, run.pid)
        assert (told["fence"], told["waiters"]) == (run.fence, 0)
        (done,) = told["done"]
        assert (done["task_id"], done["attempt"], done["state"]) == (first.id, 1, "SUCCESS")
        assert 0 <= done["ended_ago"] < LIMIT
        assert 3600 - LIMIT < done["known_for"] + done["ended_ago"] <= 3600
        for_people = ask(shop, "show", f"{told['key']}:run").stdout
        assert f"held by  task {second.id} on {worker.name} (pid {run.pid})" in for_people
        assert f"fence    {run.fence}" in for_people
        (of_first,) = re.findall(rf"done     task {first.id}: (.*)", for_people)
        assert re.fullmatch(r"SUCCESS \d+ s ago; no copy of it runs for (59|60) min more", of_first)
        worker.kill()
        until(lambda: f"; {GONE}" in ask(shop, "show", told["key"]).stdout)
        left = ask(shop, "list")
        assert f" {second.id[:8]}  (gone) {worker.name} " in left.stdout
        assert left.stderr == f"(gone) {GONE}.\n"
        assert [line["left_behind"] for line in listed(shop)] == [True]

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (["tests.integration.app.exclusive_", "x"], "did you mean 'tests.integration.app.exclusive'"),
            (["tests.integration.app.plain", "x"], "is not exclusive"),
            ([EXCLUSIVE], "missing a required argument: 'job'"),
            ([EXCLUSIVE, "a", "b", "c", "d"], "too many positional arguments"),
            (["other:1:{job:x}"], "is not the key of a lock of this app"),
        ],
    )
    def test_wrong_target_is_an_error(self, shop: Shop, words: list[str], reason: str) -> None:
        shown = ask(shop, "show", *words)
        assert shown.exit_code == 2
        assert reason in shown.stderr

    def test_value_of_another_type_is_reported(self, shop: Shop) -> None:
        key = key_of_text("singleton_lock", "job", "x")
        with shop.locks() as client:
            client.rpush(f"{key}:run", "x")
            client.expire(f"{key}:run", 60)
        shown = ask(shop, "show", key)
        assert shown.exit_code == 1
        assert f"the value at {key}:run is not a lock: WRONGTYPE" in shown.stderr


def test_locks_that_cannot_be_seen_are_an_error(shop: Shop) -> None:
    for backend, reason in (("memory://", "belong to one process"), ("redis://127.0.0.1:1", "lock server")):
        shown = ask(shop, "list", singleton_lock_backend=backend)
        assert shown.exit_code == 1
        assert reason in shown.stderr


def test_program_has_the_commands_and_reports_errors_without_a_traceback(shop: Shop) -> None:
    told = of_shop(shop, "--help").stdout
    assert all(command in told for command in ("list", "show", "release", "clear"))
    refused = of_shop(shop, "list", singleton_lock_backend="redis://127.0.0.1:1")
    assert refused.returncode == 1
    assert "Error: lock server redis://127.0.0.1:1" in refused.stderr
    assert "-> start it, or correct host, port and TLS (rediss://) in singleton_lock_backend" in refused.stderr
    assert "Traceback" not in refused.stderr
