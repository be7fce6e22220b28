"""Where a message that was put back waits: for which lock, and since when."""

from __future__ import annotations

from typing import Any

import pytest
from celery.app.task import Context

from celery_singleton_lock import clock
from celery_singleton_lock.keys.key import key_of_text
from celery_singleton_lock.stores.wake_ups import Place
from celery_singleton_lock.task import requeue
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.requeue import waits_for


def request_with(header: object, retries: int = 0) -> Any:
    return Context({HEADER: {"id": "the id", "put_back": header}}, retries=retries, id="the id")


KEY = key_of_text("app", "job", "1")


def test_place_in_line_dates_from_the_first_conflict() -> None:
    header = {"retries": 0, "conflict": 3, "waits": [KEY, 2], "since": 1000.5}
    assert waits_for(request_with(header), "app") == (KEY, Place(1000.5, 2))


@pytest.mark.parametrize(
    "waits",
    [
        None,
        KEY,
        [],
        [KEY],
        [KEY, 1, 1],
        [KEY, 0],
        [KEY, True],
        [KEY, 10**6],
        [KEY, "1"],
        [1, 1],
        [["x"], 1],
        [f"{KEY}:wake", 1],
        [KEY.replace("app", "other"), 1],
        [KEY.replace("job", "j" * 1000), 1],
        [KEY.replace("job", "\ud800"), 1],
        [KEY.replace("job", "\n"), 1],
    ],
)
def test_foreign_lock_is_not_waited_for(waits: object) -> None:
    """Otherwise a process would take elements from foreign lists."""
    assert waits_for(request_with({"retries": 0, "waits": waits, "since": 1.0}), "app") is None
    assert waits_for(request_with({"retries": 0, "waits": [KEY, 1], "since": 1.0}, retries=1), "app") is None


@pytest.mark.parametrize("since", [None, "x", -1, 0, float("nan"), float("inf"), 10**15, True])
def test_invalid_time_means_a_new_place_in_line(monkeypatch: pytest.MonkeyPatch, since: object) -> None:
    monkeypatch.setattr(clock, "wall", lambda: 5000.0)
    header = {"retries": 0, "waits": [KEY, 1], "since": since}
    assert waits_for(request_with(header), "app") == (KEY, Place(5000.0, 1))


def test_place_in_line_is_kept_whatever_the_reason_to_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent lock server in between costs no copy its place, though no copy waits for a lock meanwhile."""
    now = [1000.0]
    monkeypatch.setattr(clock, "wall", lambda: now[0])
    request = request_with(None)
    waits = requeue.Waits(KEY, 1)
    for reason, waited, expected in (("conflict", waits, Place(1000.0, 1)), ("unavailable", None, None)):
        known = requeue._known_of_next(request, reason, requeue.Carried(waited))  # type: ignore[arg-type]
        request = request_with(known)
        assert waits_for(request, "app") == (expected and (KEY, expected))
        now[0] += 1
    request = request_with(requeue._known_of_next(request, "conflict", requeue.Carried(waits)))
    assert waits_for(request, "app") == (KEY, Place(1000.0, 1))


def test_seconds_in_line_count_from_the_first_conflict_of_this_attempt() -> None:
    header = {"retries": 0, "conflict": 3, "since": 1000.5}
    assert requeue.seconds_in_line(request_with(header), 1003.0) == 2.5
    assert requeue.seconds_in_line(request_with(header), 1000.0) == 0, "the clock of another host is ahead"
    assert requeue.seconds_in_line(request_with(header, retries=1), 1003.0) == 0
    for since in (None, "x", -1, 0, float("nan"), float("inf"), True):
        assert requeue.seconds_in_line(request_with({**header, "since": since}), 1003.0) == 0
    assert requeue.seconds_in_line(request_with(None), 1003.0) == 0
