"""What optional libraries receive."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry, generate_latest

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.contrib.prometheus import LockCollector
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.journal import counts
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.worker import bootstep
from tests.redis_server import RedisServer

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "dashboard.json"


@pytest.fixture
def app(books: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Celery:
    store = MemoryStore()
    monkeypatch.setattr("celery_singleton_lock.runtime.open_store", lambda settings: store)
    app = Celery("contrib", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_backend = "redis://127.0.0.1:1/0"
    return app


def page_of(app: Celery) -> str:
    registry = CollectorRegistry()
    registry.register(LockCollector(app))
    return generate_latest(registry).decode()


def test_prometheus_gets_every_metric(app: Celery) -> None:
    writer = Runtime.of(app).journal
    for kind in ("run", "skip", "stand-by", "free"):
        writer.add(Entry(kind, "shop.report", "p:1:{shop.report:1}", "id", "node", 1, 0.0, 2.0, outcome="SUCCESS"))
    writer.write()
    writer.add(Entry("skip", "shop\n.bill\x1b", "p:1:{shop\n.bill:1}\n", "id", "node", 1, 0.0, 2.0))
    writer.write()
    page = page_of(app)
    assert all(line.startswith(("#", "singleton_lock_")) for line in page.splitlines()), "whatever the texts"
    assert 'singleton_lock_runs_total{outcome="SUCCESS",task="shop.report"} 1.0' in page
    assert 'singleton_lock_conflicts_total{policy="skip",task="shop.report"} 1.0' in page
    assert 'singleton_lock_held_seconds_count{task="shop.report"} 1.0' in page
    assert 'singleton_lock_held_seconds_sum{task="shop.report"} 2.0' in page
    assert 'singleton_lock_refused_in_a_row{lock="shop.report"} 1.0' in page
    for counter in counts.COUNTERS:
        assert f"# TYPE singleton_lock_{counter.name}_total counter" in page
    for name in counts.TIMES:
        assert f"# TYPE singleton_lock_{name}_seconds summary" in page


def test_lock_of_a_message_is_not_counted_as_held(app: Celery) -> None:
    runtime = Runtime.of(app)
    key = key_of_text(runtime.settings.prefix, "shop.queued", "1")
    for name in (key, key_of_queue(key)):
        runtime.store.acquire(LockRequest(name, new_owner(), ttl=30.0, holder=Holder("id")))
    page = page_of(app)
    assert 'singleton_lock_held_now{lock="shop.queued"} 1.0' in page
    assert 'singleton_lock_queued_now{lock="shop.queued"} 1.0' in page


def test_prometheus_shows_that_the_server_does_not_answer(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise LockUnavailable("redis", "closed")

    monkeypatch.setattr(type(Runtime.of(app).store), "all_held", refuse)
    lines = [line for line in page_of(app).splitlines() if not line.startswith("#")]
    assert lines == ["singleton_lock_up 0.0"]


def test_dashboard_shows_metrics_that_exist(app: Celery) -> None:
    Runtime.of(app).journal.write()
    known = set(re.findall(r"# TYPE (\w+)", page_of(app)))
    asked = set(re.findall(r"singleton_lock_\w+", DASHBOARD.read_text()))
    assert len(asked) > 8
    assert {re.sub(r"_(sum|count)$", "", name) for name in asked} <= known
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_observer_with_a_missing_library_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    observers = [EntryPoint("absent", "no_such_library", bootstep.OBSERVERS), *entry_points(group=bootstep.OBSERVERS)]
    monkeypatch.setattr(bootstep, "entry_points", lambda *, group: observers)
    bootstep.observe()
    assert [observer.name for observer in observers] == ["absent", "opentelemetry", "sentry"]


def test_observer_of_a_library_that_does_not_fit_lets_the_worker_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As an old one that lacks what we import, or is broken: sentry_sdk may be installed, and not be used."""
    misfit = EntryPoint("misfit", "celery_singleton_lock.errors:no_such_name", bootstep.OBSERVERS)
    monkeypatch.setattr(bootstep, "entry_points", lambda *, group: [misfit])
    bootstep.observe()
    assert "observer misfit cannot be used: AttributeError" in caplog.text


def test_span_has_the_attributes_of_the_lock(app: Celery) -> None:
    bootstep.observe()  # As a worker does.

    @app.task(base=SingletonTask, name="traced")
    def traced() -> None:
        """Nothing."""

    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("run") as span:
        traced.apply().get()
    found: Any = span.attributes  # type: ignore[attr-defined]
    assert found["celery.singleton_lock.key"] == traced.lock_key_of()
    assert found["celery.singleton_lock.fence"] >= 1
    assert 0 <= found["celery.singleton_lock.waited"] <= found["celery.singleton_lock.held"] + 60
    assert trace.get_current_span().is_recording() is False
    traced.apply().get()  # Without a span nothing happens.
