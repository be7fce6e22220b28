"""Our header: where it is read, what counts as one, and what it is when a message goes on."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.task import header
from celery_singleton_lock.task.message import HEADER, carried_by, carried_in
from celery_singleton_lock.task.turn import turn_of
from tests.unit.deliveries import bound, carried_out

OURS = {"id": "the id", "sent": "a" * 32}


@pytest.mark.parametrize("inner", [{}, {"x": "y"}, {HEADER: {"id": "the id", "sent": "b" * 32}}])
def test_it_is_read_at_the_top_level_whatever_is_inside(inner: dict[str, Any]) -> None:
    message = {"id": "the id", HEADER: OURS, "headers": inner}
    assert carried_in(message) == OURS
    assert carried_by(Context(message)) == OURS


@pytest.mark.parametrize("headers", [{"headers": {HEADER: OURS}}, {HEADER: {**OURS, "id": "another"}}, {HEADER: None}])
def test_header_elsewhere_or_of_another_message_has_no_effect(headers: dict[str, Any]) -> None:
    message = {"id": "the id", **headers}
    assert carried_in(message) == carried_by(Context(message)) == {}


@pytest.mark.parametrize("call", [{"wait": 5}, False, "nonsense", {}])
def test_header_without_an_id_is_a_call_that_somebody_wrote_by_hand(call: object) -> None:
    assert carried_in({"id": "the id", HEADER: call}) == {"call": call}


def test_message_without_an_id_has_none() -> None:
    assert carried_in({HEADER: {"id": None, "sent": "a" * 32}}) == {}


def test_next_attempt_carries_the_same_but_was_not_put_back() -> None:
    put_back = {"retries": 0, "conflict": 3, "arrived": 7, "waits": ["key", 1]}
    message = {**OURS, "call": {"wait": 5}, "queue": ["lock"], "put_back": put_back}
    request = Context({"id": "the id", HEADER: message})
    assert header.of_next_attempt(request) == {**message, "put_back": {"arrived": 7}}


@pytest.fixture
def task(app: Celery) -> Any:
    return bound(app)


@pytest.fixture
def sent(app: Celery, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The headers of what is sent."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(app, "send_task", lambda *_, headers, **__: found.append(headers))
    return found


def test_plain_send_carries_the_id_and_the_name_of_its_sending_only(task: Any, sent: list[dict[str, Any]]) -> None:
    task.apply_async(task_id="the id")
    (headers,) = sent
    assert headers.keys() == {HEADER}
    assert headers[HEADER].keys() == {"id", "sent"}
    assert headers[HEADER]["id"] == "the id"


@pytest.mark.parametrize("task_id", ["another", "the id"])
def test_headers_of_another_message_are_not_taken_over(task: Any, sent: list[dict[str, Any]], task_id: str) -> None:
    """A body passed the headers of its message on; or a program sends a message again that it has kept."""
    copied = {HEADER: {**OURS, "call": {"wait": 5}, "put_back": {"retries": 0}}, "x": "y"}
    task.apply_async(task_id=task_id, headers=copied)
    (headers,) = sent
    assert headers["x"] == "y"
    assert headers[HEADER].keys() == {"id", "sent"}
    assert headers[HEADER]["sent"] != OURS["sent"]


@pytest.mark.parametrize("inner", [None, {"user": 7}, {HEADER: {"id": "the id", "sent": "b" * 32}}])
@pytest.mark.parametrize("retries", [0, 1])
def test_what_celery_makes_of_a_request_goes_on(
    task: Any, sent: list[dict[str, Any]], inner: dict[str, Any] | None, retries: int
) -> None:
    """Celery takes the inner headers along; a retry of a worker's main process is sent by no task."""
    message = {"id": "the id", "args": (), "kwargs": {}, HEADER: {**OURS, "call": {"wait": 5}}}
    request = Context(message if inner is None else {**message, "headers": inner})
    task.signature_from_request(request, retries=retries).apply_async()
    (headers,) = sent
    assert headers.pop(HEADER) == {**OURS, "call": {"wait": 5}}
    assert headers == {name: value for name, value in (inner or {}).items() if name != HEADER}


def test_body_that_sends_its_message_again_sends_a_new_one_with_the_same_options(
    task: Any, sent: list[dict[str, Any]]
) -> None:
    request = Context({"id": "the id", "args": (), "kwargs": {}, HEADER: {**OURS, "call": {"wait": 5}}})
    with carried_out(task, request):
        turn_of(request).in_body = True
        task.signature_from_request(request).apply_async()
    assert sent[0][HEADER]["call"] == {"wait": 5}
    assert sent[0][HEADER]["sent"] != OURS["sent"]


def test_options_of_a_retry_replace_those_of_the_call(task: Any, sent: list[dict[str, Any]]) -> None:
    request = Context({"id": "the id", "args": (), "kwargs": {}, HEADER: {**OURS, "call": {"wait": 5}}})
    task.signature_from_request(request, retries=1).apply_async(singleton_lock={"wait": 7})
    assert sent[0][HEADER] == {**OURS, "call": {"wait": 7}}


@pytest.mark.parametrize("always_eager", [True, False])
def test_eager_call_has_its_options(app: Celery, always_eager: bool) -> None:
    app.conf.task_always_eager = always_eager
    found: list[Any] = []

    @app.task(base=SingletonTask, shared=False, bind=True, name="eager")
    def eager(self: Any) -> None:
        found.append(carried_by(self.request).get("call"))

    (eager.apply_async if always_eager else eager.apply)(singleton_lock={"wait": 5}, headers={"headers": {"user": 7}})
    assert found == [{"wait": 5}]


class TestStripped:
    @pytest.fixture(autouse=True)
    def not_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(header, "_reported", [])

    @pytest.mark.parametrize(
        ("headers", "words"),
        [
            ({"headers": {HEADER: OURS}}, "in its inner headers"),
            ({"retries": 1}, "it is a retry"),
        ],
    )
    def test_it_is_said_once(self, caplog: pytest.LogCaptureFixture, headers: dict[str, Any], words: str) -> None:
        for _ in range(3):
            header.report_if_stripped({"id": "the id", "task": "shop.job", **headers})
        (said,) = caplog.messages
        assert words in said
        assert "shop.job[the id]" in said

    @pytest.mark.parametrize(
        "headers", [{}, {"retries": 0}, {"headers": None}, {"headers": {HEADER: {**OURS, "id": "another"}}}]
    )
    def test_message_of_a_program_without_our_code_is_fine(
        self, caplog: pytest.LogCaptureFixture, headers: dict[str, Any]
    ) -> None:
        header.report_if_stripped({"id": "the id", "task": "shop.job", **headers})
        assert caplog.messages == []
