"""`celery locks`, as an operator runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery_singleton_lock.testing import RedisServer
from tests.integration.beats import APP, studio
from tests.integration.conftest import Shop, until
from tests.integration.workers import ROOT, environment


def locks(*arguments: str, app: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", app, "locks", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def of_shop(shop: Shop, *arguments: str, **conf: Any) -> subprocess.CompletedProcess[str]:
    env = environment({**shop.conf, **conf}, events=shop.events, record=shop.record.path)
    return locks(*arguments, app="tests.integration.app", env=env)


def test_list_shows_who_holds_what(shop: Shop) -> None:
    (worker,) = shop.start("one")
    result = shop.send("exclusive", "report", 300.0)
    (run,) = shop.record.wait_for(starts=1)
    shown = of_shop(shop, "list", "--json")
    (line,) = map(json.loads, shown.stdout.splitlines())
    assert line["task_id"] == result.id
    assert line["name"] == "job", "its lock_name"
    assert (line["node"], line["pid"]) == (worker.name, run.pid)
    assert 0 <= line["held_for"] < 60
    assert 0 < line["expires_in"] <= 2.0
    for_people = of_shop(shop, "list").stdout
    assert f"task {result.id} on {worker.name} (pid {run.pid})" in for_people
    assert line["key"] in for_people
    shop.app.control.revoke(result.id, terminate=True)
    until(lambda: not shop.held())
    assert of_shop(shop, "list").stdout == ""


def test_list_shows_the_leader_of_beat(own_redis: RedisServer, tmp_path: Path) -> None:
    with studio(own_redis, own_redis, tmp_path) as beats:
        first, _ = beats.start("first", "second")
        shown = locks("list", "--json", app=APP, env=beats.environment())
        (line,) = map(json.loads, shown.stdout.splitlines())
        assert line["name"] == f"beat:{APP}"
        assert line["pid"] == first.process.pid
        assert f"beat:{APP}  leader on beat@" in locks("list", app=APP, env=beats.environment()).stdout


def test_list_of_values_that_are_not_ours(shop: Shop) -> None:
    with shop.locks() as client:
        client.set("singleton_lock:1:{foreign:x}:run", "somebody", ex=60)
        client.set("singleton_lock:no-braces:run", "x" * 40, ex=60)
        client.rpush("singleton_lock:1:{list:x}:run", "x")
        client.expire("singleton_lock:1:{list:x}:run", 60)
    shown = of_shop(shop, "list")
    assert shown.returncode == 0, shown.stderr
    assert "foreign  unknown, expires in" in shown.stdout


def test_what_cannot_be_listed_is_said(shop: Shop) -> None:
    for backend, reason in (("memory://", "each process of its own"), ("redis://127.0.0.1:1", "no lock from")):
        shown = of_shop(shop, "list", singleton_lock_backend=backend)
        assert shown.returncode == 1
        assert reason in shown.stderr
        assert "Traceback" not in shown.stderr


def test_help_is_there(shop: Shop) -> None:
    assert "list" in of_shop(shop, "--help").stdout
    assert "--json" in of_shop(shop, "list", "--help").stdout
