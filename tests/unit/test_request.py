"""The main process's request beside the line and the children of a worker."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import Celery
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from celery.worker.state import revoked
from kombu.message import Message

from celery_singleton_lock import SingletonTask, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.wake_ups import Place
from celery_singleton_lock.task import key_report
from celery_singleton_lock.task.delivery import OWNER
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.requeue import GoesOn
from celery_singleton_lock.worker.line import line_of
from celery_singleton_lock.worker.request import HELD, SingletonRequest, children_of
from tests.inside import finish_aside
from tests.patience import until

_numbers = itertools.count()


@pytest.fixture
def receive(app: Celery) -> Callable[..., SingletonRequest]:
    """Makes a request for a task from a message, as the consumer does."""

    def receive(
        task: Any = None,
        *args: Any,
        embed: Any = {},  # noqa: B006
        redelivered: bool = False,
        carries: Any = None,
        **headers: Any,
    ) -> SingletonRequest:
        task = task or make(app)
        name, identity = task.name, f"{app.main}-id"
        if carries is not None:
            headers[HEADER] = {"id": identity, **carries}
        made = Message(
            body=([list(args), {}, embed]),
            headers={"id": identity, "task": name, "retries": 0, "lang": "py", **headers},
            properties={"delivery_info": {OWNER: "forged"}, "correlation_id": identity},
            delivery_info={"exchange": "", "routing_key": "celery", "redelivered": redelivered, OWNER: "forged"},
            content_type="application/json",
            content_encoding="utf-8",
        )
        return SingletonRequest(made, app=app, task=task, decoded=True, hostname="worker@host")

    return receive


def make(app: Celery, **options: Any) -> Any:
    @app.task(base=SingletonTask, shared=False, name=f"job{next(_numbers)}", **options)
    def job(x: int = 0) -> None: ...

    return job


def begin(request: SingletonRequest) -> Hold:
    """As the child that carries it out: it reports the lock that it is about to ask for."""
    options, key, _ = request.task.lock_of(request.context, request.args, request.kwargs)
    owner = request.delivery_info[OWNER]
    key_report.send(key_report.Report(owner, key, options.ttl, options.limit, owner, ""))
    hold = request.hold()
    assert hold is not None
    return hold


class Waiting:
    """A line that only records calls."""

    def __init__(self) -> None:
        self.parked: list[tuple[SingletonRequest, str, Place]] = []
        self.given_back: list[str] = []
        self.given_back_if_free: list[tuple[str, int]] = []
        self.begun: list[tuple[str, bool]] = []
        self.is_woken = True

    def park(self, request: SingletonRequest, key: str, place: Place) -> bool:
        self.parked.append((request, key, place))
        return self.is_woken

    def give_back(self, key: str) -> None:
        self.given_back.append(key)

    def give_back_if_free(self, key: str, limit: int) -> None:
        self.given_back_if_free.append((key, limit))

    def has_begun(self, key: str, *, wakes: bool) -> None:
        self.begun.append((key, wakes))


@pytest.fixture
def line(app: Celery) -> Waiting:
    line = Waiting()
    line_of[app] = line  # type: ignore[assignment]
    return line


def put_back_for(app: Celery, key: str, since: float = 1000.0) -> dict[str, Any]:
    """Headers of a copy that was put back for this lock."""
    header = {"retries": 0, "conflict": 1, "unavailable": 0, "given_up": [], "waits": [key, 1], "since": since}
    return {"carries": {"put_back": header}, "eta": "2100-01-01T00:00:00+00:00"}


class TestLine:
    def test_copy_that_waits_for_a_lock_is_in_line(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting
    ) -> None:
        key = key_of_text(app.main, "job", "1")
        request = receive(**put_back_for(app, key))
        assert line.parked == [(request, key, Place(1000.0, 1))]

    def test_other_messages_are_not_in_line(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting
    ) -> None:
        headers = put_back_for(app, key_of_text(app.main, "job", "1"))
        receive()
        receive(eta=headers["eta"])
        receive(**{**headers, "eta": None})
        receive(**put_back_for(app, key_of_text("others", "job", "1")))
        assert line.parked == []

    @pytest.mark.parametrize(("timeout", "longest"), [(3600, HELD), (60, 30)])
    def test_copy_that_will_be_woken_is_held_for_longer(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting, timeout: int, longest: float
    ) -> None:
        """Each look of its own would take a slot; but it is held no longer than the broker waits."""
        app.conf.broker_transport_options = {"visibility_timeout": timeout}
        soon = datetime.fromtimestamp(clock.wall() + 1, timezone.utc)
        copy = {**put_back_for(app, key_of_text(app.main, "job", "1")), "eta": soon.isoformat()}
        began = clock.wall()
        assert began + longest <= receive(**copy).eta.timestamp() <= clock.wall() + longest
        line.is_woken = False
        assert receive(**copy).eta == soon

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_follower_that_comes_again_looks_soon(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting, redelivered: bool
    ) -> None:
        """It may have the lock for which it waits: its process died after it had taken it."""
        soon = datetime.fromtimestamp(clock.wall() + 1, timezone.utc)
        copy = {**put_back_for(app, key_of_text(app.main, "job", "1")), "eta": soon.isoformat()}
        copy["carries"]["put_back"]["leader"] = [b"other".hex(), "0" * 32, 1.0, None]
        assert (receive(redelivered=redelivered, **copy).eta == soon) is redelivered

    @pytest.mark.parametrize("is_woken", [True, False])
    def test_expiring_copy_ends_at_once(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting, is_woken: bool
    ) -> None:
        line.is_woken = is_woken
        expires = datetime.fromtimestamp(clock.wall() + 5, timezone.utc)
        copy = put_back_for(app, key_of_text(app.main, "job", "1"))
        request = receive(**copy, expires=expires.isoformat())
        assert expires < request.eta < expires + timedelta(seconds=1)
        assert receive(eta=copy["eta"], expires=expires.isoformat()).eta > request.eta, (
            "not if the sender has delayed it"
        )

    @pytest.mark.parametrize("eta", ["0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59.999999+00:00"])
    @pytest.mark.parametrize("expires", ["0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59.999999+00:00"])
    def test_extreme_times_are_not_an_error(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting, eta: str, expires: str
    ) -> None:
        line.is_woken = False
        copy = put_back_for(app, key_of_text(app.main, "job", "1"))
        assert receive(**{**copy, "eta": eta, "expires": expires}).eta is not None

    def test_copy_that_was_begun_does_not_wait_any_more(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting
    ) -> None:
        request = receive(**put_back_for(app, key_of_text(app.main, "job", "1")))
        assert not request.has_begun
        request.on_accepted(1, clock.now())
        assert request.has_begun

    @pytest.mark.parametrize(
        ("scope", "wakes"),
        [
            ("until_executed", True),
            ("until_and_while_executing", True),
            ("until_executing", False),
            (None, False),
        ],
    )
    def test_line_is_told_whether_a_copy_that_was_woken_wakes_another_one(
        self,
        app: Celery,
        receive: Callable[..., SingletonRequest],
        line: Waiting,
        scope: str | None,
        wakes: bool,
    ) -> None:
        """As it takes the lock."""
        key, task = key_of_text(app.main, "job", "1"), make(app)
        fields = [task.name, key_of_queue(key), new_owner(), 60.0, 1, scope]
        copy = put_back_for(app, key)
        if scope is not None:
            copy["carries"]["queue"] = fields
        request = receive(task, **copy)
        request.is_woken = True
        request.on_accepted(1, clock.now())
        assert line.begun == [(key, wakes)]

    def test_copy_that_was_woken_and_revoked_lets_the_next_one_begin(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting
    ) -> None:
        """It was woken, and has no use for the lock."""
        key = key_of_text(app.main, "job", "1")
        request = receive(**put_back_for(app, key))
        request.is_woken = True
        assert not request.revoked()
        assert line.given_back_if_free == []
        revoked.add(request.id)
        try:
            assert request.revoked()
        finally:
            revoked.discard(request.id)
        assert line.given_back_if_free == [(key, 1)]
        assert request.has_begun

    @pytest.mark.parametrize("has_asked", [False, True])
    @pytest.mark.parametrize("error", [ValueError("before_start"), WorkerLostError("killed"), Ignore("skipped")])
    def test_copy_that_was_woken_and_fails_before_it_asks_lets_the_next_one_begin(
        self,
        app: Celery,
        receive: Callable[..., SingletonRequest],
        line: Waiting,
        error: Exception,
        has_asked: bool,
    ) -> None:
        """Or whose process is gone. If the lock was taken meanwhile, its holder wakes the next one."""
        key = key_of_text(app.main, "job", "1")
        request = receive(**put_back_for(app, key))
        request.is_woken = True
        if has_asked:
            begin(request)
        request.on_failure(info(error))
        assert line.given_back_if_free == ([] if has_asked and isinstance(error, ValueError) else [(key, 1)])
        assert line.given_back == []

    @pytest.mark.parametrize(
        "waits_for",
        [
            {"joins": ["other", "other", 0, 0, 1.0, False]},
            {"leader": [b"other".hex(), "0" * 32, 1.0, None]},
            {"arrived": 7},
        ],
        ids=["joins", "follows", "newest"],
    )
    def test_copy_that_ends_without_the_lock_lets_the_next_one_begin_also_if_the_lock_is_held(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting, waits_for: dict[str, Any]
    ) -> None:
        """The next one needs no lock either. The wake-up of this one's end may come before its start is reported."""
        key = key_of_text(app.main, "job", "1")
        copy = put_back_for(app, key)
        copy["carries"]["put_back"] |= waits_for
        request = receive(**copy)
        request.is_woken = True
        request.on_accepted(1, clock.now())
        assert line.begun == [(key, True)]
        request.on_failure(info(Ignore("already done")))
        assert line.given_back == [key]
        assert line.given_back_if_free == []

    def test_copy_that_was_woken_and_is_put_back_wakes_nobody(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting
    ) -> None:
        request = receive(**put_back_for(app, key_of_text(app.main, "job", "1")))
        request.is_woken = True
        request.on_failure(info(GoesOn("put back")))
        assert line.given_back == line.given_back_if_free == []

    @pytest.mark.parametrize("error", [ValueError("before_start"), WorkerLostError("killed")])
    def test_copy_that_was_not_woken_and_fails_wakes_nobody(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting, error: Exception
    ) -> None:
        receive(**put_back_for(app, key_of_text(app.main, "job", "1"))).on_failure(info(error))
        assert line.given_back == line.given_back_if_free == []

    def test_copy_that_is_revoked_while_it_waits_wakes_nobody(
        self, app: Celery, receive: Callable[..., SingletonRequest], line: Waiting
    ) -> None:
        """If a thousand expire together, each would make another copy look at a lock that is held."""
        request = receive(**put_back_for(app, key_of_text(app.main, "job", "1")))
        revoked.add(request.id)
        try:
            assert request.revoked()
        finally:
            revoked.discard(request.id)
        assert line.given_back == line.given_back_if_free == []
        assert request.has_begun


def info(error: BaseException) -> ExceptionInfo:
    try:
        raise error
    except type(error):
        return ExceptionInfo()


@pytest.mark.parametrize(("limit", "slot"), [(1, 0), (2, None)])
def test_place_of_the_lock_is_known_once_the_child_has_it(
    app: Celery, receive: Callable, limit: int, slot: int | None
) -> None:
    """A child that waits may have left something of an attempt in the same place."""
    request = receive(make(app, lock_limit=limit))
    assert begin(request).slot is None
    key_report.send(key_report.End(request.delivery_info[OWNER], clock.now() + 20.0))
    assert request.hold().slot == slot


def test_message_that_was_revoked_before_a_child_began_with_it_is_in_no_child(
    app: Celery, receive: Callable[..., SingletonRequest]
) -> None:
    """Its child is gone, and the main process takes it: that one was waited for in vain, for a second, in the loop."""
    store, assigned = Runtime.of(app).store, []
    children_of[app] = SimpleNamespace(assign=lambda pid, _: assigned.append(pid), forget=lambda *_: True)
    key, owner = key_of_queue(key_of_text(app.main, "job", "1")), new_owner()
    store.acquire(LockRequest(key, owner, ttl=600, holder=Holder()))
    task = make(app)
    request = receive(task, carries={"queue": [task.name, key, owner, 600.0, 1, "until_executed"]})
    request.on_accepted(os.getpid(), time.monotonic())
    request.on_failure(info(Terminated(0)))
    assert not assigned
    until(lambda: not store.held(key), "the lock is free")


@pytest.mark.parametrize("late", [True, False])
def test_cancelled_message_of_a_child_frees_what_it_brought_when_that_is_gone(
    app: Celery, receive: Callable[..., SingletonRequest], late: bool
) -> None:
    """It may have ended, and go on as a copy: its process reports that."""
    store, task = Runtime.of(app).store, make(app, acks_late=late)
    key, owner = key_of_queue(key_of_text(app.main, "job", "1")), new_owner()
    store.acquire(LockRequest(key, owner, ttl=600, holder=Holder()))
    children_of[app] = SimpleNamespace(assign=lambda *_: None, forget=lambda *_: True)
    request = receive(task, carries={"queue": [task.name, key, owner, 600.0, 1, "until_executed"]})
    request.on_accepted(1, time.monotonic())
    request.cancel(SimpleNamespace(terminate_job=lambda *_: None))
    assert store.held(key)
    request.on_failure(info(Terminated(15)))
    until(lambda: bool(store.held(key)) is late, "the lock is free")


@pytest.mark.parametrize(("error", "is_freed"), [(SoftTimeLimitExceeded(), True), (ValueError("its own"), False)])
def test_soft_time_limit_before_the_task_is_called_frees_what_the_message_brought(
    app: Celery, receive: Callable[..., SingletonRequest], error: Exception, is_freed: bool
) -> None:
    """A process that was called frees it itself."""
    store, task, owner = Runtime.of(app).store, make(app)._get_current_object(), new_owner()
    key = key_of_queue(key_of_text(app.main, "job", "1"))
    store.acquire(LockRequest(key, owner, ttl=600, holder=Holder()))
    request = receive(task, carries={"queue": [task.name, key, owner, 600.0, 1, "until_executed"]})
    request.on_accepted(1, time.monotonic())
    request.acknowledge()
    if not is_freed:
        begin(request)
    request.on_failure(info(error), return_ok=True)
    finish_aside()
    assert bool(store.held(key)) is not is_freed


def test_late_copy_does_not_shorten_the_lock_that_a_retry_needs_for_longer(
    app: Celery, receive: Callable[..., SingletonRequest]
) -> None:
    runtime, task, key, owner = Runtime.of(app), make(app), key_of_queue(key_of_text(app.main, "job", "1")), new_owner()
    runtime.store.acquire(LockRequest(key, owner, ttl=3600, holder=Holder()))
    brought = [task.name, key, owner, 60.0, 1, "until_executed"]
    receive(task, redelivered=True, carries={"queue": brought})
    assert runtime.confirmations.write() is None
    (held,) = runtime.store.held(key)
    assert held.remaining > 60
