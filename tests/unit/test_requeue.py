"""A message is sent again until the broker has it, and says how often that was."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError, OperationalError

from celery_singleton_lock import SingletonTask, clock
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task import requeue
from celery_singleton_lock.task.original import PUT_BACK_HEADER
from celery_singleton_lock.task.requeue import (
    MAX_GIVEN_UP,
    back_off,
    given_up,
    put_back,
    put_back_count,
)
from celery_singleton_lock.task.running import progress_of
from tests.patience import sleepless

_numbers = itertools.count()


def request_with(header: object, retries: int = 0) -> Any:
    return SimpleNamespace(headers={PUT_BACK_HEADER: header}, retries=retries, id="the id")


def test_counts_are_of_one_attempt_and_one_reason() -> None:
    request = request_with({"retries": 2, "conflict": 3, "unavailable": 1}, retries=2)
    assert (put_back_count(request, "conflict"), put_back_count(request, "unavailable")) == (3, 1)
    request.retries = 3
    assert (put_back_count(request, "conflict"), put_back_count(request, "unavailable")) == (0, 0)


@pytest.mark.parametrize(
    "header", [None, [0, 3], "x", {}, {"retries": 0, "conflict": -1}, {"retries": 0, "conflict": True}, {"conflict": 3}]
)
def test_what_others_wrote_counts_as_never(header: object) -> None:
    assert put_back_count(request_with(header), "conflict") == 0
    assert given_up(request_with(header)) == ()


def test_given_up_owners_are_checked_and_bounded() -> None:
    owners = [new_owner() for _ in range(20)]
    header = {"retries": 0, "given_up": ["x", 1, owners[0].upper(), f"{owners[0]}\n", *owners]}
    assert given_up(request_with(header)) == tuple(owners[-MAX_GIVEN_UP:])


def test_back_off_doubles_up_to_its_bound() -> None:
    for count, most in enumerate((1, 2, 4, 8, 8, 8)):
        assert most / 2 <= back_off(count, at_most=8) <= most
    assert back_off(10**6) <= 60


@pytest.mark.parametrize(
    "error", [OperationalError("x"), ValueError("x"), EncodeError("x"), OSError("x"), SoftTimeLimitExceeded()], ids=repr
)
def test_whatever_goes_wrong_it_is_sent_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    app = Celery(f"requeue{next(_numbers)}", set_as_current=False, broker="memory://")

    @app.task(base=SingletonTask, shared=False, name="job")
    def task() -> None: ...

    errors = iter([error, error])
    sent: list[dict[str, Any]] = []

    def send(_: Any, reason: str, delay: float, header: dict[str, Any]) -> None:
        for one in errors:
            raise one
        sent.append(header)

    monkeypatch.setattr(requeue, "_send", send)
    monkeypatch.setattr(clock, "sleep", sleepless())
    task.push_request(id="the id", retries=1, headers={PUT_BACK_HEADER: {"retries": 1, "conflict": 4}})
    owner = progress_of(task.request).gives_up = new_owner()
    with pytest.raises(Ignore, match="put back"):
        put_back(task, reason="unavailable")
    assert sent == [{"retries": 1, "conflict": 4, "unavailable": 1, "given_up": [owner]}]
