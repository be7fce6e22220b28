"""The doctor offline, as an operator runs it and what a worker logs at its start."""

from __future__ import annotations

import re

from tests.integration.conftest import Shop
from tests.integration.test_cli import of_shop


def test_exit_status_is_that_of_a_linter(shop: Shop) -> None:
    assert of_shop(shop, "doctor", "--offline").returncode == 0, "warnings only"
    assert of_shop(shop, "doctor", "--offline", "--strict").returncode == 1
    failed = of_shop(shop, "doctor", "--offline", singleton_lock_done_ttl=0)
    assert failed.returncode == 1
    assert "problem  singleton_lock_done_ttl: " in failed.stdout
    assert "problems: 1, warnings: 1, notes: " in failed.stdout
    wrong = of_shop(shop, "doctor", "--offline", singleton_lock_ttl=0)
    assert wrong.returncode == 1
    assert "allowed: a number of seconds from 1 to 86400" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_worker_logs_at_its_start_what_is_wrong_and_nothing_else(shop: Shop) -> None:
    (worker,) = shop.start("one")
    told = re.findall(r"WARNING.*singleton lock: (.*)", worker.log)
    assert [line.partition(":")[0] for line in told] == ["lock_name job"], "whose tasks have different limits"
