"""`celery locks explain`, as an operator runs it."""

from __future__ import annotations

import json

from tests.integration.conftest import Shop
from tests.integration.test_cli import of_shop

TASK = "tests.integration.app.exclusive"


def test_explains_a_call_and_names_the_holder(shop: Shop) -> None:
    (worker,) = shop.start("one")
    result = shop.send("exclusive", "report", 60.0)
    (run,) = shop.record.wait_for(starts=1)
    shown = of_shop(shop, "explain", "--json", TASK, "report", "seconds=1.5")
    (line,) = map(json.loads, shown.stdout.splitlines())
    assert [f"{line['key']}:run"] == shop.held()
    assert line["counts"] == {"job": {"value": "'report'", "serialized": "s6:report"}}
    (holder,) = line["held_by"]
    assert (holder["task_id"], holder["node"], holder["pid"]) == (result.id, worker.name, run.pid)
    for_people = of_shop(shop, "explain", TASK, "report").stdout
    assert line["key"] in for_people
    assert f"held by    task {result.id} on {worker.name} (pid {run.pid})" in for_people
    assert 'lock_key   ["job"]' in for_people
    assert "lock_wait" not in for_people, "it was not set"
    wrong = of_shop(shop, "explain", TASK, "report", "tenant=7")
    assert (wrong.returncode, "got an unexpected keyword argument 'tenant'" in wrong.stderr) == (2, True)
    assert "lock_ttl = 6.0  from the setting singleton_lock_ttl" in for_people
