"""What operators see of real workers: counts, warnings, events."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import clock
from celery_singleton_lock.journal_entry import CRASHED, LOST
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.store import Journal
from tests.integration.conftest import LONG, POOLS, Shop, until
from tests.integration.events import watching
from tests.integration.operators import of_shop
from tests.integration.workers import environment
from tests.patience import LIMIT
from tests.programs import ROOT

TASK = "tests.integration.app.exclusive"


def stats(shop: Shop) -> dict[str, dict[str, Any]]:
    shown = of_shop(shop, "stats", "--json")
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    return {line["task"]: line for line in lines if "task" in line}


def journal(shop: Shop) -> Journal:
    return open_url(shop.conf["singleton_lock_backend"], {}).journal("singleton_lock", size=100)


@pytest.mark.parametrize("pool", POOLS)
def test_counts_of_a_worker_are_complete_when_it_has_ended(shop: Shop, pool: str) -> None:
    (worker,) = shop.start("one", pool=pool, concurrency=1 if pool == "solo" else 2)
    for _ in range(3):
        shop.send("exclusive", "report", 0.01).get(timeout=LIMIT)
    if pool != "solo":
        running = shop.send("exclusive", "other", LONG)
        (run,) = shop.record.wait_for(starts=1, job="other")
        for _ in range(2):
            with pytest.raises(TaskRevokedError):
                shop.send("exclusive", "other").get(timeout=LIMIT)
        held = clock.now() - run.start
        shop.record.let_end("other")
        running.get(timeout=LIMIT)
    shop.send("failing", "report").get(timeout=LIMIT, propagate=False)
    assert worker.terminate() == 0
    found = stats(shop)
    line = found[TASK]
    assert line["runs"] == {"SUCCESS": 3 if pool == "solo" else 4}
    assert line["conflicts"] == ({} if pool == "solo" else {"skip": 2})
    assert found["tests.integration.app.failing"]["runs"] == {"FAILURE": 1}
    assert line["held"] >= (0.03 if pool == "solo" else held)
    assert (line["losses"], line["takeovers"]) == (0, 0)
    shown = of_shop(shop, "stats").stdout
    assert re.search(rf"^{TASK} +{3 if pool == 'solo' else 4} \(SUCCESS\) ", shown, re.MULTILINE)


def test_message_that_waits_meets_a_held_lock_once(shop: Shop) -> None:
    """However often its copies look; in the log, too."""
    (worker,) = shop.start("one", concurrency=2)
    shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    waits = shop.send("patient", "report", singleton_lock={"conflict_retries": 10_000})
    until(lambda: worker.log.count(f"{waits.id}] put back") >= 3)
    shop.record.let_end("report")
    waits.get(timeout=LIMIT)
    assert len(re.findall(rf"INFO/.*{waits.id}\] on_conflict=retry", worker.log)) == 1
    assert worker.terminate() == 0
    assert stats(shop)["tests.integration.app.patient"]["conflicts"] == {"retry": 1}


def test_killed_child_and_lost_lock(shop: Shop) -> None:
    (worker,) = shop.start("one")
    killed = shop.send("exclusive", "report", 300.0)
    (run,) = shop.record.wait_for(starts=1)
    os.kill(run.pid, signal.SIGKILL)
    until(lambda: not shop.held())
    where = f"task {TASK}[{killed.id}] on one@test (pid {run.pid})"
    until(lambda: f"(job='report'): freed for a process that ended without freeing it: {where}" in worker.log)
    shop.send("exclusive", "report", 300.0)
    shop.record.wait_for(starts=2)
    (key,) = shop.held()
    with shop.locks() as client:
        client.delete(key)
    shop.record.wait_for(starts=2, ends=1)
    assert worker.terminate() == 0
    found = stats(shop)
    assert found[TASK]["losses"] == 1
    assert found[TASK]["runs"] == {CRASHED: 1, LOST: 1}
    assert found[TASK]["takeovers"] == 1
    crash = next(entry for entry in journal(shop).entries(since=0.0) if entry.kind == "free")
    assert (crash.task_id, crash.node, crash.pid, crash.label) == (killed.id, "one@test", run.pid, "job='report'")
    assert crash.ended > crash.began


def test_conflict_and_loss_are_events(shop: Shop) -> None:
    got: list[dict[str, Any]] = []
    with watching(shop, got.append):
        shop.start("one", arguments=("-E",))
        running = shop.send("exclusive", "report", 300.0)
        shop.record.wait_for(starts=1)
        copy = shop.send("exclusive", "report")
        with pytest.raises(TaskRevokedError):
            copy.get(timeout=LIMIT)
        (key,) = shop.held()
        with shop.locks() as client:
            client.delete(key)
        until(lambda: {"lock-conflict", "lock-lost"} <= {event["type"] for event in got})
    (conflict,) = [event for event in got if event["type"] == "lock-conflict"]
    assert (conflict["uuid"], conflict["holder"], conflict["policy"]) == (copy.id, running.id, "skip")
    assert (conflict["name"], conflict["hostname"]) == (TASK, "one@test")
    (lost,) = [event for event in got if event["type"] == "lock-lost"]
    assert lost["uuid"] == running.id


def test_exporter_serves_prometheus(shop: Shop) -> None:
    (worker,) = shop.start("one")
    shop.send("exclusive", "report", 0.01).get(timeout=LIMIT)
    assert worker.terminate() == 0
    shop.start("two")
    shop.send("exclusive", "report", 300.0)
    shop.record.wait_for(starts=2)
    env = {**os.environ, **environment(shop.conf, events=shop.events, record=shop.record.path)}
    command = [sys.executable, "-m", "celery", "-A", "tests.integration.app", "locks", "exporter", "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, env={**env, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, text=True
    ) as exporter:
        try:
            assert exporter.stdout is not None
            url = exporter.stdout.readline().split()[-1]
            page = urllib.request.urlopen(url, timeout=LIMIT).read().decode()
        finally:
            exporter.send_signal(signal.SIGINT)
        assert exporter.wait(LIMIT) == 0
    assert "singleton_lock_up 1.0" in page
    assert f'singleton_lock_runs_total{{outcome="SUCCESS",task="{TASK}"}} 1.0' in page
    assert 'singleton_lock_held_now{lock="job"} 1.0' in page
    assert f'singleton_lock_held_seconds_count{{task="{TASK}"}} 1.0' in page
