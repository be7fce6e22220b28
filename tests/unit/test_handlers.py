"""A signal's handler may come at any line, and use what it has interrupted, as a cold shutdown does: it ends tasks."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest

from tests.bench import Bench
from tests.inside import do_at_line


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["send", pytest.param("run", marks=pytest.mark.slow)])
def test_handler_sends_and_runs_at_any_line(bench: Bench, what: str) -> None:
    for number in itertools.count(1):
        task, others = bench.task(lock_scope="until_executed"), bench.task(lock_scope="until_executed")
        assert task.name != others.name  # Celery makes them now.
        sent = bench.send(task) if what == "run" else None

        def handle(other: Any = others) -> None:
            assert other.apply_async().id
            assert other.apply().get() == "ran"

        where = do_at_line(number, handle)
        try:
            assert (sent and bench.deliver(sent)) == (sent and "ran"), where
            if sent is None:
                task.delay()
        finally:
            sys.settrace(None)
        assert len(bench.queued()) == (what == "send") + bool(where)
        if not where:
            break
    assert number > 100
