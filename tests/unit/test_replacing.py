"""`on_duplicate="replace"`: the newest message has the lock, and an older one that has not started never runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_singleton_lock import DuplicateResult, InvalidOption, LockSuperseded
from tests.bench import Bench, raises

#: More questions than a sender asks the lock server.
QUESTIONS = 7


def replaced(bench: Bench, body: Callable[[], Any] = lambda: "ran", **options: Any) -> Any:
    options = {"lock_scope": "until_executing", "on_duplicate": "replace", "lock_queue_ttl": 1000.0, **options}
    return bench.task(body, **options)


def test_newest_message_runs_and_older_ones_never(bench: Bench) -> None:
    task = replaced(bench)
    messages = [bench.send(task) for _ in range(3)]
    for message in messages:
        bench.deliver(message)
    *older, newest = messages
    assert bench.runs == [newest.id]
    for message in older:
        stored = bench.app.backend.get_task_meta(message.id)
        assert stored["status"] == "REVOKED"
        assert isinstance(stored["result"], LockSuperseded)
        assert isinstance(stored["result"], TaskRevokedError)
        bench.later(11.0)
        bench.deliver(message, redelivered=True)
    assert bench.runs == [newest.id]


def test_newest_message_has_the_lock_when_the_older_one_has_ended(bench: Bench) -> None:
    task = replaced(bench)
    older, _ = bench.send(task), bench.send(task)
    bench.deliver(older)
    task.on_duplicate = "existing"
    assert isinstance(task.delay(), DuplicateResult)


def test_message_that_has_started_is_not_superseded(bench: Bench) -> None:
    def body() -> str:
        if len(bench.runs) == 1:
            newer.append(bench.send(task))
        return "ran"

    newer: list[Any] = []
    task = bench.task(body, lock_scope="until_executing", on_duplicate="replace", acks_late=True)
    first = bench.send(task)
    assert bench.deliver(first) == "ran"
    assert bench.deliver(newer[0]) == "ran"


def test_two_sends_of_one_id_are_two_messages(bench: Bench) -> None:
    task = replaced(bench)
    _, second = (bench.send(task, task_id=bench.app.main) for _ in range(2))
    assert bench.deliver(second) == "ran"


def test_older_message_runs_if_the_newest_could_not_be_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    task = replaced(bench)
    older = bench.send(task)
    with monkeypatch.context() as broken, pytest.raises(OperationalError):
        broken.setattr(bench.app.amqp, "send_task_message", raises(OperationalError("no broker")))
        task.delay()
    assert bench.deliver(older) == "ran"
    task.on_duplicate = "existing"
    assert not isinstance(task.delay(), DuplicateResult)


def test_superseded_message_with_the_id_of_the_newest_stores_no_result(bench: Bench) -> None:
    task = replaced(bench)
    older, newest = (bench.send(task, task_id=bench.app.main) for _ in range(2))
    assert bench.deliver(newest) == "ran"
    assert bench.deliver(older) == "ran", "the result of the newest stays"
    assert len(bench.runs) == 1


@pytest.mark.parametrize("options", [{"lock_limit": 2}, {"lock_scope": "until_executed"}])
def test_replace_is_refused_if_nobody_knows_which_message_waits(bench: Bench, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="replace"):
        replaced(bench, **options).delay()
