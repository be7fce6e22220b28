from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery

from celery_singleton_lock.runtime import in_memory
from celery_singleton_lock.web import watch
from tests.redis_server import RedisServer
from tests.web.scenes import app_in_memory


@pytest.fixture
def app(books: RedisServer) -> Iterator[Celery]:
    with in_memory():
        yield app_in_memory()


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request sees everything that was done before it."""
    monkeypatch.setattr(watch, "FRESH", 0.0)
    monkeypatch.setattr(watch, "SPARING", 0.0)
