"""A record says that everything was sent once it was, and not if the result backend is away as a message ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task import ends, requeue
from celery_singleton_lock.task.ends import End
from tests.unit.deliveries import id_for, make, request_of

pytestmark = [
    pytest.mark.usefixtures("settled_at_once"),
    pytest.mark.filterwarnings("ignore:Exception raised outside body"),
]

#: The methods by which Celery stores the end of a task in a result backend.
TELLING = ("mark_as_done", "mark_as_failure")


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The headers of the messages that are put back."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(requeue, "_send", lambda task, reason, delay, header: sent.append(header))
    return sent


@contextmanager
def backend_away(task: Any, error: BaseException) -> Iterator[None]:
    """The backend fails; whether the error leaves Celery's tracer depends on Celery's version."""

    def away(*_: Any, **__: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch, suppress(type(error)):
        for asked in TELLING:
            patch.setattr(task.backend, asked, away)
        yield


def trace(task: Any, **carries: Any) -> None:
    """Carry out the message of a task as a worker does."""
    build_tracer(task.name, task, app=task.app)(id_for(task), (), {}, request_of(task, carries=carries))


@pytest.mark.parametrize(("body", "state"), [(lambda: 1, "SUCCESS"), (lambda: 1 / 0, "FAILURE")])
@pytest.mark.parametrize("acks_late", [True, False])
def test_copy_that_comes_reports_an_end_that_could_not_be_reported(
    app: Celery, put_back: list[dict[str, Any]], body: Any, state: str, acks_late: bool
) -> None:
    task, runs = make(app, body, acks_late=acks_late)
    with backend_away(task, ConnectionError("away")):
        trace(task)
    Runtime.of(app).records.send_all()
    trace(task)
    assert app.AsyncResult(id_for(task)).state == state
    assert len(runs) == 1
    assert put_back == []


@pytest.mark.parametrize(
    ("policy", "is_kept"),
    [("join", True), (lambda task, met: "join", True), ("skip", False)],
    ids=["join", "maybe", "no"],
)
def test_value_is_kept_for_copies_that_join(app: Celery, policy: Any, is_kept: bool) -> None:
    """They may look after the result backend has dropped it."""
    task, _ = make(app, lambda: "value", on_conflict=policy)
    trace(task)
    runtime = Runtime.of(app)
    runtime.records.send_all()
    (record,) = runtime.store.inspect(task.lock_key_of()).records
    recorded, _ = ends.read(record)
    assert recorded.settled
    assert (ends.end_of(recorded) == End("value")) is is_kept
