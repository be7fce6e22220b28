"""`on_duplicate="replace"`: the newest message has the lock, and an older one that has not started never runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_singleton_lock import DuplicateResult, InvalidOption, LockSuperseded, LockUnavailable, clock
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.task import sending
from tests.bench import Bench, raises
from tests.inside import at_question

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


def test_older_message_never_runs_however_late_its_date(bench: Bench) -> None:
    task = replaced(bench, lock_queue_ttl=None)
    older = bench.send(task, countdown=200_000.0)
    Runtime.of(bench.app).confirmations.send_all()
    newest = bench.send(task)
    assert bench.deliver(newest) == "ran"
    bench.later(200_001.0)
    bench.deliver(older)
    assert bench.runs == [newest.id]


@pytest.mark.parametrize(("ahead", "behind"), [(0.0, 0.0), (50.0, 0.0), (0.0, -50.0)])
def test_newest_runs_though_the_sender_before_could_not_say_it_had_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ahead: float, behind: float
) -> None:
    """Whatever the clocks of both senders say."""
    task, store, wall = replaced(bench), Runtime.of(bench.app).store, clock.wall
    older, acquire = bench.send(task), store.acquire

    def unanswered(request: LockRequest) -> Any:
        if request.arrival is not None:
            raise LockUnavailable(store.server, "no answer")
        return acquire(request)

    with monkeypatch.context() as lost:
        lost.setattr(store, "acquire", unanswered)
        lost.setattr(sending, "clock", SimpleNamespace(**{**vars(clock), "wall": lambda: wall() + ahead}))
        unheard = bench.send(task)
    bench.later(1.0)
    with monkeypatch.context() as late:
        late.setattr(sending, "clock", SimpleNamespace(**{**vars(clock), "wall": lambda: wall() + behind}))
        newest = bench.send(task)
    bench.later(60.0)
    for message in (unheard, older, newest):
        bench.deliver(message)
    assert bench.runs[-1] == newest.id


@pytest.mark.parametrize("behind", [0.0, -500.0])
def test_newest_runs_though_the_oldest_was_sent_when_the_task_replaced_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, behind: float
) -> None:
    """That one is in no order: it runs as well."""
    task, wall = replaced(bench, on_duplicate="existing"), clock.wall
    oldest = bench.send(task)
    task.on_duplicate = "replace"
    older = bench.send(task)
    with monkeypatch.context() as late:
        late.setattr(sending, "clock", SimpleNamespace(**{**vars(clock), "wall": lambda: wall() + behind}))
        newest = bench.send(task)
    for message in (oldest, older, newest):
        bench.deliver(message)
    assert bench.runs == [oldest.id, newest.id]


@pytest.mark.parametrize("off", [0.0, -50.0, 50.0])
def test_one_of_two_runs_that_replace_a_message_at_the_same_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, off: float
) -> None:
    task, wall, sent = replaced(bench), clock.wall, []
    oldest = bench.send(task)
    monkeypatch.setattr(sending, "clock", SimpleNamespace(**{**vars(clock), "wall": lambda: wall() + off}))
    with at_question(bench.app, 1, lambda: sent.append(bench.send(task)), "after"):
        sent.append(bench.send(task))
    for message in (oldest, *sent):
        bench.deliver(message)
    assert bench.runs == [sent[-1].id]


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


def test_older_message_does_not_run_after_the_newest_when_it_is_delivered_again(bench: Bench) -> None:
    """Nobody can tell whether it had started; the newest did its work."""
    task = replaced(bench, acks_late=True)
    older, newest = bench.send(task), bench.send(task)
    assert bench.deliver(newest) == "ran"
    assert bench.deliver(older, redelivered=True) == "REVOKED"
    assert bench.runs == [newest.id]


def test_newest_counts_when_the_senders_clock_is_wrong(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    task = replaced(bench)
    first = bench.send(task)
    with monkeypatch.context() as behind:
        behind.setattr(clock, "wall", lambda: 1.0)
        second = bench.send(task)
    third = bench.send(task)
    assert bench.deliver(third) == "ran"
    for older in (second, first):
        assert bench.deliver(older) == "REVOKED"
    assert bench.runs == [third.id]


def test_newest_counts_when_the_servers_clock_was_set_back(bench: Bench) -> None:
    task = replaced(bench)
    bench.later(3600.0)
    first = bench.send(task)
    bench.later(-1800.0)
    second = bench.send(task)
    assert bench.deliver(second) == "ran"
    assert bench.deliver(first) == "REVOKED"
    assert bench.runs == [second.id]


def test_message_whose_sender_died_replaces_the_older_one_as_it_starts(bench: Bench) -> None:
    task = replaced(bench)
    older = bench.send(task)
    with suppress(SystemExit), at_question(bench.app, 2, raises(SystemExit())) as asked:
        task.delay()
    assert len(asked) == 2
    (newest,) = bench.queued()
    assert bench.deliver(newest) == "ran"
    assert bench.deliver(older) == "REVOKED"
    assert bench.runs == [newest.id]


def test_lock_of_a_message_that_starts_before_its_sender_says_so_ends(bench: Bench) -> None:
    task = replaced(bench)
    older = bench.send(task)
    with at_question(bench.app, 2, lambda: [bench.deliver(message) for message in bench.queued()]) as asked:
        newest = task.delay()
    assert len(asked) == 2
    assert newest.result == "ran"
    assert bench.deliver(older) == "REVOKED"
    task.on_duplicate = "existing"
    assert not isinstance(task.delay(), DuplicateResult)


@pytest.mark.parametrize("number", range(1, QUESTIONS))
def test_sender_may_die_at_any_question(bench: Bench, number: int) -> None:
    """The older message runs, or the newest: somebody does."""
    task = replaced(bench)
    older = bench.send(task)
    with suppress(SystemExit), at_question(bench.app, number, raises(SystemExit()), "after"):
        task.delay()
    for message in (older, *bench.queued()):
        bench.deliver(message)
    assert bench.runs


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
