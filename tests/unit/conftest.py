"""Fixtures that several unit tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from celery import Celery

from celery_singleton_lock.task import decide
from tests.bench import Bench

_numbers = itertools.count()


@pytest.fixture
def app(request: pytest.FixtureRequest) -> Celery:
    """An app whose broker, results and locks are in memory, with its own keys."""
    name = f"{request.module.__name__.rpartition('_')[2]}{next(_numbers)}"
    app = Celery(name, set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.singleton_lock_prefix = app.main
    return app


@pytest.fixture
def bench(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(app, monkeypatch)
    yield bench
    bench.close()


@pytest.fixture
def settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the first execution had had the time to store its result."""
    monkeypatch.setattr(decide, "SETTLING", 0.0)
