"""The audit, as an operator runs it and as a worker logs it at its start."""

from __future__ import annotations

import json
import re

from tests.integration.conftest import Shop
from tests.integration.test_cli import of_shop
from tests.patience import LIMIT


def test_every_exclusive_task_has_a_verdict(shop: Shop) -> None:
    shown = of_shop(shop, "audit", "--json", singleton_lock_backend="redis://127.0.0.1:1")
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    verdicts = {line["task"].rpartition(".")[2]: line["verdict"] for line in lines if "verdict" in line}
    assert verdicts["exclusive"] == "ok"
    assert "plain" not in verdicts
    found = {(line["severity"], line["subject"]) for line in lines if "verdict" not in line}
    assert ("warning", "lock_name job") in found
    assert {severity for severity, _ in found} <= {"warning", "note"}


def test_exit_status_is_that_of_a_linter(shop: Shop) -> None:
    assert of_shop(shop, "audit").returncode == 0, "warnings only"
    assert of_shop(shop, "audit", "--strict").returncode == 1
    failed = of_shop(shop, "audit", singleton_lock_done_ttl=0)
    assert failed.returncode == 1
    assert "problem  singleton_lock_done_ttl: " in failed.stdout
    assert "problems: 1, warnings: 1, notes: " in failed.stdout
    wrong = of_shop(shop, "audit", singleton_lock_ttl=0)
    assert wrong.returncode == 1
    assert "allowed: a number of seconds from 1 to 86400" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_worker_logs_at_its_start_what_is_wrong_and_nothing_else(shop: Shop) -> None:
    (worker,) = shop.start("one")
    told = re.findall(r"WARNING.*singleton lock: (.*)", worker.log)
    assert [line.partition(":")[0] for line in told] == ["lock_name job"], "whose tasks have different limits"


def test_worker_starts_anyway(shop: Shop) -> None:
    shop.conf["singleton_lock_done_ttl"] = 0
    (worker,) = shop.start("one", pool="threads")
    assert "singleton lock: singleton_lock_done_ttl: finished messages are remembered for 0 s" in worker.log
    assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
