"""Calls that are duplicates are counted, also those of a program that ends at once: real workers, real senders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.integration.conftest import Shop
from tests.integration.operators import environment_of, of_shop
from tests.patience import LIMIT
from tests.programs import ROOT
from tests.redis_server import RedisServer

#: Calls of each task beyond the first.
CLICKS = 119


def click(shop: Shop, times: int = CLICKS, **conf: Any) -> subprocess.CompletedProcess[str]:
    """Not a program of `tests.programs`: those end without what Python does at the end."""
    environment = {**os.environ, **environment_of(shop)}
    environment["TEST_CONF"] = json.dumps({**json.loads(environment["TEST_CONF"]), **conf})
    command = [sys.executable, "-m", "tests.integration.clicks", str(times)]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=LIMIT)


def duplicates(shop: Shop) -> dict[str, dict[str, int]]:
    lines = map(json.loads, of_shop(shop, "stats", "--json").stdout.splitlines())
    return {line["task"]: line["duplicates"] for line in lines if line.get("duplicates")}


def test_duplicates_are_counted_by_what_the_caller_got(shop: Shop) -> None:
    shop.start("one", app="tests.integration.queued_app")
    done = click(shop)
    assert done.returncode == 0, done.stderr
    assert duplicates(shop) == {
        "queued.until_executed": {"existing": CLICKS, "follow": 1},
        "queued.skips": {"skip": CLICKS},
        "queued.raises": {"raise": CLICKS},
        "queued.newest": {"replace": CLICKS},
    }
    shown = of_shop(shop, "stats").stdout
    assert f"duplicates {CLICKS} (skip)" in shown
    page = shop.record.path.parent / "timeline.html"
    assert of_shop(shop, "timeline", "--output", str(page)).returncode == 0
    assert f"{CLICKS} duplicate, not sent (existing)" in page.read_text()
    shop.record.let_end("report")


def test_sender_writes_once_for_all_its_duplicates(shop: Shop) -> None:
    with shop.locks() as client:
        before = client.info("commandstats")
        assert click(shop, 20).returncode == 0
        after = client.info("commandstats")
    written = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after}
    assert written["cmdstat_xadd"] == 4 * 20 + 1
    assert written["cmdstat_hlen"] == 1  # As at the end of each write.


def test_sender_ends_though_nothing_can_be_written(shop: Shop, own_redis: RedisServer) -> None:
    """The journal's keys are forbidden; what the callers get is the same."""
    with own_redis.client() as client:
        rights = ("~singleton_lock:1:*", "+@all")
        client.execute_command("ACL", "SETUSER", "sender", "on", ">secret", *rights)
    done = click(shop, 2, singleton_lock_backend=f"redis://sender:secret@127.0.0.1:{own_redis.port}/2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
