"""Result, callbacks and next steps of a message arrive even if the result backend is away as it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock import ResultLost
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.task import outcome, requeue, settling
from celery_singleton_lock.task.outcome import End
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
def test_copy_reports_an_end_that_could_not_be_reported(
    app: Celery, put_back: list[dict[str, Any]], body: Any, state: str, acks_late: bool
) -> None:
    task, runs = make(app, body, acks_late=acks_late)
    with backend_away(task, ConnectionError("away")):
        trace(task)
    assert [header["untold"] for header in put_back] == [1]
    trace(task, put_back=put_back[0])
    assert app.AsyncResult(id_for(task)).state == state
    assert len(runs) == 1
    assert len(put_back) == 1


def test_nothing_is_put_back_if_everything_was_reported(app: Celery, put_back: list[dict[str, Any]]) -> None:
    task, _ = make(app, lambda: 1)
    trace(task)
    assert put_back == []


def test_stopped_process_sends_nothing(app: Celery, put_back: list[dict[str, Any]]) -> None:
    """The worker decides whether its message comes again."""
    task, _ = make(app, lambda: 1)
    with backend_away(task, KeyboardInterrupt()):
        trace(task)
    assert put_back == []


def test_report_that_can_never_be_delivered_is_dropped(
    app: Celery, put_back: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    task, runs = make(app, lambda: 1)
    header: dict[str, Any] = {}
    for _ in range(settling.MOST_TRIES + 1):
        with backend_away(task, ConnectionError("away")):
            trace(task, **header)
        header = {"put_back": put_back[-1]}
    assert len(put_back) == settling.MOST_TRIES
    assert "cannot be sent" in caplog.text
    assert len(runs) == 1


@pytest.mark.parametrize("is_held", [False, True])
def test_body_does_not_run_again_even_if_its_end_is_forgotten(
    app: Celery, put_back: list[dict[str, Any]], is_held: bool
) -> None:
    """The lock server came back empty, or the record has expired."""
    task, runs = make(app, lambda: 1, acks_late=True)
    with backend_away(task, ConnectionError("away")):
        trace(task)
    store: Any = Runtime.of(app).store
    store._records.clear()
    other = LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other"))
    if is_held:
        assert isinstance(store.acquire(other), Lease)
    trace(task, put_back=put_back[0])
    assert isinstance(app.AsyncResult(id_for(task)).result, ResultLost)
    found = store.acquire(other)
    assert isinstance(found, Lease)
    store.free(found)
    # The message itself may also come again.
    trace(task)
    assert isinstance(app.AsyncResult(id_for(task)).result, ResultLost)
    assert len(runs) == 1


def test_copy_does_not_ask_a_result_backend_forever(app: Celery, put_back: list[dict[str, Any]]) -> None:
    """Otherwise its record would end, and its body run again."""
    task, runs = make(app, lambda: 1)
    with backend_away(task, ConnectionError("away")):
        trace(task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task.backend, "get_state", lambda _: 1 / 0)
        for _ in range(settling.MOST_TRIES):
            trace(task, put_back=put_back[-1])
    assert [header["untold"] for header in put_back] == [*range(1, settling.MOST_TRIES + 1)]
    assert len(runs) == 1


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
    runtime.record_writer.write()
    (record,) = runtime.store.inspect(task.lock_key_of()).records
    recorded, _ = outcome.read(record)
    assert recorded.settled
    assert (outcome.end_of(recorded) == End("value")) is is_kept
