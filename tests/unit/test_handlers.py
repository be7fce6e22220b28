"""A signal's handler may come at any line, and use what it has interrupted, as a cold shutdown does: it ends tasks."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
from celery import Celery

from tests.bench import Bench
from tests.inside import do_at_line


@pytest.mark.slow
def test_handler_sends_and_runs_at_any_line_of_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in itertools.count(1):
        # Its own each time: what is made when it is first needed is made under the handler, too.
        app = Celery(f"handlers{number}", set_as_current=False, broker="memory://", backend="cache+memory://")
        app.conf.singleton_lock_prefix = app.main
        bench = Bench(app, monkeypatch)
        task, others = bench.task(lock_scope="until_executed"), bench.task(lock_scope="until_executed")
        assert task.name != others.name  # Celery makes them now.

        def handle(other: Any = others) -> None:
            assert other.apply_async().id
            assert other.apply().get() == "ran"

        where = do_at_line(number, handle)
        try:
            assert task.delay().id
        finally:
            sys.settrace(None)
        assert len(bench.queued()) == 1 + bool(where)
        bench.close()
        if not where:
            break
    assert number > 100
