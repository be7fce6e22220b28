"""Workers in separate containers, and what happens to containers."""

from __future__ import annotations

import pytest

from celery_singleton_lock import LockLost
from examples.containers.record import overlaps
from tests.smoke.engine import MISSING

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from tests.smoke.containers import LIMIT, TTL, Shop, nodes

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.timeout(300)]

#: Seconds, longer than anything in these tests takes.
FOR_EVER = 300.0

#: Options of a copy that is to run as soon as it may.
WAITING = {"wait": 120.0}


def test_copies_on_two_containers_run_one_after_the_other(shop: Shop) -> None:
    for queue in ("one", "two") * 2:
        shop.send(queue, "plain", 1.0, lock=False)
    for queue in ("one", "two") * 5:
        shop.send(queue, "report", 0.3, lock=WAITING)
    runs = shop.wait_for("report", ends=10)
    assert overlaps(runs) == []
    assert nodes(runs) == {"one", "two"}
    assert [run.fence for run in runs] == sorted({run.fence for run in runs})
    assert overlaps(shop.wait_for("plain", ends=4)), "without a lock they must overlap, or this test proves nothing"


def test_container_that_was_paused_past_its_lease_is_stopped_as_it_wakes(shop: Shop) -> None:
    # It checks for its end within a step that is long enough to be stopped in.
    result = shop.send("one", "report", FOR_EVER, step=2.0)
    shop.wait_for("report", starts=1)
    following = shop.send("two", "report", 8.0, lock=WAITING)
    shop.pause(shop.one)
    shop.wait_for("report", starts=2)
    shop.unpause(shop.one)
    stale, second = shop.wait_for("report", starts=2, ends=1)
    assert (stale.outcome, second.outcome) == ("aborted", "open")
    with pytest.raises(LockLost):
        result.get(timeout=LIMIT)
    assert following.get(timeout=LIMIT) == "report"
    late = [place for place in stale.places if place > second.places[0]]
    assert len(late) <= 2, "the step that it was about to record, and its end"
    assert second.fence > stale.fence
    assert len(shop.runs("report")) == 2


@pytest.mark.parametrize("worker_hostname", ["shop"])
def test_containers_that_share_a_host_name_do_not_free_each_others_locks(shop: Shop) -> None:
    """As with `network_mode: host`: neither sees the other's processes, and must not consider them dead."""
    shop.send("one", "report", 2 * TTL)
    shop.wait_for("report", starts=1)
    shop.send("two", "report", 0.1, lock=WAITING)
    first, second = shop.wait_for("report", ends=2)
    assert (first.worker, second.worker) == ("one@shop", "two@shop")
    assert overlaps([first, second]) == []
