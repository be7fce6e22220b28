from __future__ import annotations

import threading

from celery_singleton_lock.background import Later
from tests.patience import LIMIT, until


def test_work_that_comes_meanwhile_is_done_next() -> None:
    calls, went_in, may_go_on = [0], threading.Event(), threading.Event()

    def work() -> None:
        calls[0] += 1
        went_in.set()
        assert may_go_on.wait(LIMIT)

    it = Later("a", work)
    it.want()
    assert went_in.wait(LIMIT)
    it.want()
    may_go_on.set()
    until(lambda: calls == [2])
