"""A message is sent again until the broker has it, and counts how often it was put back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError, OperationalError

from celery_singleton_lock import SingletonTask, clock
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.keys.key import key_of_text
from celery_singleton_lock.stores.wake_ups import Place
from celery_singleton_lock.task import requeue
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.requeue import (
    MAX_GIVEN_UP,
    back_off,
    given_up,
    put_back,
    put_back_count,
    waits_for,
)
from celery_singleton_lock.task.running import progress_of
from tests.patience import sleepless

_numbers = itertools.count()


def request_with(header: object, retries: int = 0) -> Any:
    return Context({HEADER: {"id": "the id", "put_back": header}}, retries=retries, id="the id")


def test_counts_belong_to_one_attempt_and_one_reason() -> None:
    request = request_with({"retries": 2, "conflict": 3, "unavailable": 1}, retries=2)
    assert (put_back_count(request, "conflict"), put_back_count(request, "unavailable")) == (3, 1)
    request.retries = 3
    assert (put_back_count(request, "conflict"), put_back_count(request, "unavailable")) == (0, 0)


@pytest.mark.parametrize(
    "header", [None, [0, 3], "x", {}, {"retries": 0, "conflict": -1}, {"retries": 0, "conflict": True}, {"conflict": 3}]
)
def test_forged_header_counts_as_never_put_back(header: object) -> None:
    assert put_back_count(request_with(header), "conflict") == 0
    assert given_up(request_with(header)) == ()


def test_given_up_owners_are_checked_and_bounded() -> None:
    owners = [new_owner() for _ in range(20)]
    header = {"retries": 0, "given_up": ["x", 1, owners[0].upper(), f"{owners[0]}\n", *owners]}
    assert given_up(request_with(header)) == tuple(owners[-MAX_GIVEN_UP:])


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


def test_back_off_doubles_up_to_its_bound() -> None:
    for count, most in enumerate((1, 2, 4, 8, 8, 8)):
        assert most / 2 <= back_off(count, at_most=8) <= most
    assert back_off(10**6) <= 60


@pytest.mark.parametrize(
    "error", [OperationalError("x"), ValueError("x"), EncodeError("x"), OSError("x"), SoftTimeLimitExceeded()], ids=repr
)
def test_message_is_sent_again_after_any_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
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
    task.push_request(id="the id", retries=1, **{HEADER: {"id": "the id", "put_back": {"retries": 1, "conflict": 4}}})
    owner = progress_of(task.request).gives_up = new_owner()
    with pytest.raises(Ignore, match="put back"):
        put_back(task, reason="unavailable")
    assert sent == [{"retries": 1, "conflict": 4, "unavailable": 1, "given_up": [owner]}]


#: Why it was put back.
HELD = ": another task has its lock"


@pytest.mark.parametrize(
    ("backend", "carried", "logged"),
    [
        ("redis://localhost", requeue.Carried(requeue.Waits(KEY, 1)), f"put back, waits for the lock{HELD}"),
        ("redis://localhost", requeue.Carried(requeue.Waits(KEY, 1), arrived=1), f"put back, due in 3.0 s{HELD}"),
        ("redis://localhost", requeue.AS_BEFORE, f"put back, due in 3.0 s{HELD}"),
        ("memory://", requeue.Carried(requeue.Waits(KEY, 1)), f"put back, due in 3.0 s{HELD}"),
    ],
)
def test_log_says_when_the_copy_begins(
    monkeypatch: pytest.MonkeyPatch, backend: str, carried: requeue.Carried, logged: str
) -> None:
    """When its lock is free; or when it is due, if it looks by itself, or nobody can be woken."""
    app = Celery(f"requeue{next(_numbers)}", set_as_current=False, broker="memory://")
    app.conf.singleton_lock_backend = backend

    @app.task(base=SingletonTask, shared=False, name="job")
    def task() -> None: ...

    monkeypatch.setattr(requeue, "_send", lambda *_: None)
    message = (b"[[], {}, {}]", "application/json", "utf-8", {}, "", "celery", "celery", True)
    task.push_request(id="the id", properties={"singleton_lock_original": message})
    with pytest.raises(requeue.GoesOn) as caught:
        put_back(task, reason="conflict", delay=3.0, carried=carried)
    assert requeue.GoesOn.read(repr(caught.value)) == logged


def test_copy_of_a_message_that_may_have_begun_says_so(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a copy says so, too; a retry is another attempt."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(requeue, "_send", lambda task, reason, delay, header: sent.append(header))

    @app.task(base=SingletonTask, shared=False, name=f"job{next(_numbers)}")
    def task() -> None: ...

    def copy_of(**request: Any) -> dict[str, Any]:
        task.push_request(id="the id", **request)
        with pytest.raises(requeue.GoesOn):
            put_back(task, reason="unavailable")
        task.pop_request()
        return sent[-1]

    assert "redelivered" not in copy_of(delivery_info={"redelivered": False})
    header = copy_of(delivery_info={"redelivered": True})
    assert header["redelivered"] is True
    assert copy_of(**{HEADER: {"id": "the id", "put_back": header}})["redelivered"] is True
    assert "redelivered" not in copy_of(retries=1, **{HEADER: {"id": "the id", "put_back": header}})


@pytest.mark.parametrize("nonsense", [1, "yes", [True], {}, None])
def test_forged_header_does_not_mean_that_it_has_begun(nonsense: object) -> None:
    assert not requeue.may_have_begun(request_with({"retries": 0, "redelivered": nonsense}))
