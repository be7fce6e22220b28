"""The main process's request, without a worker around it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import VERSION, Celery
from celery.app.task import Context
from celery.exceptions import Ignore, SoftTimeLimitExceeded
from celery.signals import task_revoked
from celery.worker import state
from celery.worker.request import Request
from celery.worker.state import revoked
from kombu.exceptions import EncodeError
from kombu.message import Message

from celery_singleton_lock import LockUnavailable, SingletonTask, clock
from celery_singleton_lock._celery import WorkerRequest
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.wake_ups import Place
from celery_singleton_lock.task import key_report
from celery_singleton_lock.task.delivery import OWNER, original_of
from celery_singleton_lock.task.execution import holder_of
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.message_identity import sending_of
from celery_singleton_lock.task.on_conflict import Expired, Skipped
from celery_singleton_lock.task.outcome import REPLACED, Outcome
from celery_singleton_lock.task.requeue import GoesOn
from celery_singleton_lock.worker.line import line_of
from celery_singleton_lock.worker.request import HELD, SingletonRequest, aside, children_of
from tests.patience import LIMIT, until

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


def hold(app: Celery, request: SingletonRequest) -> None:
    """As the child when it has the lock."""
    hold = begin(request)
    assert hold is not None
    found = Runtime.of(app).store.acquire(LockRequest(hold.key, hold.owner, ttl=60, holder=Holder()))
    assert isinstance(found, Lease)


def key_of(request: SingletonRequest) -> str:
    return str(request.task.lock_of(request.context, request.args, request.kwargs)[1])


def is_held(app: Celery, request: SingletonRequest) -> bool:
    expected = key_of(request)
    return any(key == expected for key, _ in Runtime.of(app).store.all_held(app.main))


def mark_of(app: Celery, request: SingletonRequest) -> bytes | None:
    found = Runtime.of(app).store.acquire(
        LockRequest(key_of(request), new_owner(), ttl=1, holder=holder_of(request.task, request.context), once=True)
    )
    return found.content if isinstance(found, Record) else None


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


@pytest.mark.parametrize("is_copy", [False, True], ids=["sent", "put back"])
def test_message_that_may_have_begun_does_not_expire_here(
    app: Celery, receive: Callable[..., SingletonRequest], is_copy: bool
) -> None:
    """Its process first asks whether an earlier delivery runs it."""
    header = {"retries": 0, "unavailable": 1, **({"redelivered": True} if is_copy else {})}
    request = receive(carries={"put_back": header}, expires="2020-01-01T00:00:00+00:00")
    assert request.revoked() is not is_copy


@pytest.mark.skipif(VERSION < (5, 7), reason="older versions do not send it again")
@pytest.mark.parametrize("carries", [None, {"sent": "a" * 32}])
def test_retry_of_a_message_whose_child_was_lost_belongs_to_the_same_sending(
    app: Celery,
    receive: Callable[..., SingletonRequest],
    monkeypatch: pytest.MonkeyPatch,
    carries: dict[str, str] | None,
) -> None:
    """Otherwise its body would run again when the message itself comes again, since its acknowledgement was lost."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(app, "send_task", lambda *_, **options: sent.append(options))
    request = receive(carries=carries)
    assert request._retry_worker_lost(WorkerLostError(), info(WorkerLostError()))
    (again,) = sent
    next_attempt = Context(id=again["task_id"], root_id=again["root_id"], **again["headers"])
    assert sending_of(next_attempt) == sending_of(request.context)


@pytest.mark.parametrize("eta", [None, "2100-01-01T00:00:00+00:00"])
def test_body_that_celery_cannot_read_is_left_to_the_child(
    app: Celery, receive: Callable[..., SingletonRequest], eta: str | None
) -> None:
    """It fails there; an error here would end the worker's consumer."""
    request = receive(embed=["forged"], eta=eta, carries={"put_back": {"retries": 0, "redelivered": True}})
    assert request.context.id == request.id


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


def test_each_delivery_has_its_own_owner_that_no_sender_can_choose(receive: Callable) -> None:
    first, second = receive(), receive()
    owners = {first.delivery_info[OWNER], second.delivery_info[OWNER]}
    assert len(owners) == 2
    assert "forged" not in owners
    assert first.request_dict["delivery_info"][OWNER] == first.delivery_info[OWNER]


def test_child_takes_the_lock_that_the_main_process_expects(app: Celery, receive: Callable) -> None:
    seen = []

    @app.task(base=SingletonTask, bind=True, shared=False)
    def job(self: Any, x: int) -> None:
        seen.append((self.lock.key, self.lock.owner))

    request = receive(job, 7)
    job.push_request(**request.request_dict, called_directly=False)
    try:
        job(7)
    finally:
        job.pop_request()
    hold = request.hold()
    assert seen == [(hold.key, hold.owner)]


@pytest.mark.parametrize(("limit", "slot"), [(1, 0), (2, None)])
def test_place_of_the_lock_is_known_once_the_child_has_it(
    app: Celery, receive: Callable, limit: int, slot: int | None
) -> None:
    """A child that waits may have left something of an attempt in the same place."""
    request = receive(make(app, lock_limit=limit))
    assert begin(request).slot is None
    key_report.send(key_report.End(request.delivery_info[OWNER], clock.now() + 20.0))
    assert request.hold().slot == slot


@pytest.mark.parametrize("error", [WorkerLostError("lost"), Terminated("TERM"), SystemExit(1)])
def test_loss_of_the_child_frees_its_lock(app: Celery, receive: Callable, error: BaseException) -> None:
    request = receive()
    hold(app, request)
    request.acknowledge()
    with suppress(EncodeError):  # Celery before 5.7 tries to store a SystemExit as JSON.
        request.on_failure(info(error))
    assert not is_held(app, request)


def test_lock_is_freed_before_the_message_goes_back(app: Celery, receive: Callable) -> None:
    request = receive(make(app, acks_late=True, reject_on_worker_lost=True))
    hold(app, request)
    held = []
    request.on_reject = lambda *_: held.append(is_held(app, request))
    request.on_failure(info(WorkerLostError("lost")))
    assert held == [False]
    assert mark_of(app, request) is None, "it will be carried out again"


def test_final_failure_is_recorded(app: Celery, receive: Callable) -> None:
    request = receive()
    begin(request)
    request.acknowledge()
    request.on_failure(info(WorkerLostError("lost")))
    assert (mark_of(app, request) or b"").startswith(b'["FAILURE"')


def test_child_that_dies_after_storing_its_success_has_not_failed(
    app: Celery, receive: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a task that has joined it, for example, would consider it dead, and run."""
    monkeypatch.setattr(Request, "_success_was_stored", lambda _: {"result": 7}, raising=False)
    request = receive()
    begin(request)
    request.acknowledge()
    request.on_failure(info(WorkerLostError("lost")))
    assert mark_of(app, request) is None


class TestHasPassedItsLockOn:
    """What goes on has the message's id, and may have the lock that it brought."""

    @pytest.fixture
    def key(self, app: Celery) -> str:
        return key_of_queue(key_of_text(app.main, "job", "1"))

    @pytest.fixture
    def ended(self, app: Celery, receive: Callable[..., SingletonRequest], key: str) -> Callable[..., SingletonRequest]:
        """Makes a request with a lock, of a task whose child has recorded its end."""

        def ended(task: Any, how: Outcome) -> SingletonRequest:
            store, owner = Runtime.of(app).store, new_owner()
            store.acquire(LockRequest(key, owner, ttl=600, holder=Holder()))
            brought = [task.name, key, owner, 600.0, 1, "until_executed"]
            request = receive(task, carries={"queue": brought})
            request.on_accepted(1, time.monotonic())
            store.remember(begin(request).key, how.record_of(holder_of(task, request.context), 60.0))
            return request

        return ended

    @pytest.mark.parametrize("error", [WorkerLostError("lost"), SystemExit(1)])
    @pytest.mark.parametrize("late", [True, False])
    @pytest.mark.parametrize(("how", "has_lock"), [(Outcome("RETRY", settled=True), False), (Outcome("RETRY"), True)])
    def test_message_that_was_retried_before_its_child_was_lost_has_not_failed(
        self, app: Celery, ended: Callable, key: str, how: Outcome, has_lock: bool, late: bool, error: BaseException
    ) -> None:
        request = ended(make(app, acks_late=late, reject_on_worker_lost=True), how)
        record = mark_of(app, request)
        request.on_failure(info(error))
        assert app.backend.get_state(request.id) == "PENDING"
        assert request.acknowledged
        assert mark_of(app, request) == record
        until(lambda: bool(Runtime.of(app).store.held(key)) is has_lock)

    @pytest.mark.parametrize("how", [Outcome("RETRY"), Outcome("IGNORED", REPLACED)])
    @pytest.mark.parametrize("end", ["cancelled", "cancelled greenlet", "terminated", "failed"])
    def test_main_process_leaves_the_lock_to_what_goes_on(
        self, app: Celery, ended: Callable, key: str, how: Outcome, end: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A failure may be that of a hook, which comes before the process ends the lock itself."""
        request = ended(make(app, before_start=lambda *_: None), how)
        pool, freed = SimpleNamespace(terminate_job=lambda *_: None), list[object]()
        monkeypatch.setattr("celery_singleton_lock.worker.request.end_brought", lambda *brought: freed.append(brought))
        if end in ("cancelled", "terminated"):
            children_of[app] = SimpleNamespace(assign=lambda *_: None, forget=lambda *_: True)
            (request.cancel if end == "cancelled" else request.terminate)(pool)
            request.on_failure(info(Terminated(15)))
        elif end == "cancelled greenlet":
            request.cancel(pool)
        else:
            request.acknowledge()
            request.on_failure(info(ValueError("raised when its retry was sent")), return_ok=True)
        assert freed == []
        assert Runtime.of(app).store.held(key)


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
    request.on_failure(info(error), return_ok=True)
    done = threading.Event()
    aside.do(done.set)
    assert done.wait(LIMIT)
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


def test_failure_before_the_report_of_the_key_is_recorded(app: Celery, receive: Callable) -> None:
    request = receive()
    request.acknowledge()
    request.on_failure(info(WorkerLostError("lost")))
    until(lambda: (mark_of(app, request) or b"").startswith(b'["FAILURE"'))


def test_failure_without_an_acknowledgement_is_not_recorded(app: Celery, receive: Callable) -> None:
    """The broker will deliver it again."""
    request = receive(make(app, acks_late=True, acks_on_failure_or_timeout=False))
    request.on_timeout(soft=False, timeout=1)
    assert mark_of(app, request) is None


def test_strangers_lock_is_not_freed(app: Celery, receive: Callable) -> None:
    request = receive()
    hold = begin(request)
    Runtime.of(app).store.acquire(LockRequest(hold.key, new_owner(), ttl=60, holder=Holder()))
    request.on_failure(info(WorkerLostError("lost")))
    found = Runtime.of(app).store.acquire(LockRequest(hold.key, new_owner(), ttl=60, holder=Holder()))
    assert isinstance(found, Held)


def test_failure_that_the_child_reports_does_not_free_its_lock(app: Celery, receive: Callable) -> None:
    request = receive()
    hold(app, request)
    request.on_failure(info(ValueError("x")), return_ok=True)
    assert is_held(app, request)


@pytest.mark.parametrize("headers", [{"singleton_lock": False}, {"singleton_lock": {"nonsense": 1}}])
def test_call_without_a_lock_has_no_hold(receive: Callable, headers: dict[str, Any]) -> None:
    request = receive(None, **headers)
    assert request.hold() is None
    request.on_failure(info(WorkerLostError("lost")))


def test_lock_key_that_raises_in_the_main_process_is_not_an_error(app: Celery, receive: Callable) -> None:
    def raises(arguments: dict[str, Any]) -> str:
        raise RuntimeError("only in the child")

    request = receive(make(app, lock_key=raises))
    assert request.hold() is None
    request.on_failure(info(WorkerLostError("lost")))


def test_revoked_retry_frees_its_kept_lock(app: Celery, receive: Callable) -> None:
    request = receive(make(app, lock_retain_on_retry=True), retries=1)
    store = Runtime.of(app).store
    first = store.acquire(LockRequest(key_of(request), new_owner(), ttl=60, holder=Holder()))
    store.free(first, reservation=Reservation(holder_of(request.task, request.context), 60))
    assert not request.revoked()
    assert is_held(app, request)
    request._already_revoked = True
    assert request.revoked()
    until(lambda: not is_held(app, request))


def test_retry_that_ended_with_its_child_frees_its_kept_lock(app: Celery, receive: Callable) -> None:
    """The end of the previous attempt may only have been noticed while this one was waiting for it."""
    request = receive(make(app, lock_retain_on_retry=True), retries=1)
    store = Runtime.of(app).store
    first = store.acquire(LockRequest(key_of(request), new_owner(), ttl=60, holder=Holder()))
    store.free(first, reservation=Reservation(holder_of(request.task, request.context), 60))
    request.on_accepted(4_000_000, 0.0)
    request.acknowledge()
    request.on_failure(info(WorkerLostError("lost")))
    until(lambda: not is_held(app, request))


def test_no_user_code_runs_in_the_consumers_loop(app: Celery, receive: Callable) -> None:
    threads = set()

    def noted(arguments: dict[str, Any]) -> str:
        threads.add(threading.current_thread().name)
        return "same"

    task = make(app, lock_key=noted, lock_retain_on_retry=True)
    request = receive(task, retries=1)
    request.on_accepted(4_000_000, 0.0)
    assert request.hold() is None
    assert request.is_stopped_when_lost
    request.on_timeout(soft=False, timeout=1)
    request.acknowledge()
    request.on_failure(info(WorkerLostError("lost")))
    revoked = receive(task, retries=1)
    revoked._already_revoked = True
    assert revoked.revoked()
    until(lambda: threads)
    assert threads == {"singleton-lock-aside"}


def test_report_of_another_delivery_is_not_used(receive: Callable) -> None:
    first, second = receive(), receive()
    begin(second)
    assert first.hold() is None


def test_inspect_does_not_show_the_owner(receive: Callable) -> None:
    shown = receive().info()
    assert not [name for name in shown["delivery_info"] if name.startswith("singleton")]
    assert shown["delivery_info"]["routing_key"] == "celery"


class Eventer:
    """Records the events that are sent."""

    enabled = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


@pytest.mark.parametrize(("error", "expired"), [(Skipped("held"), False), (Expired("expired"), True)])
def test_skipped_copy_is_announced_like_a_revoked_task(receive: Callable, error: Skipped, expired: bool) -> None:
    request = receive()
    request._eventer = eventer = Eventer()
    got = []

    @task_revoked.connect
    def note(sender: Any, **fields: Any) -> None:
        got.append((sender, {name: fields[name] for name in ("terminated", "signum", "expired")}))

    request.on_failure(info(error), return_ok=True)
    fields = {"terminated": False, "signum": None, "expired": expired}
    assert eventer.sent == [("task-revoked", {"uuid": request.id, **fields})]
    assert got == [(request.task, fields)]


def test_copy_that_goes_on_elsewhere_is_not_announced(receive: Callable) -> None:
    request = receive()
    request._eventer = eventer = Eventer()
    request.on_failure(info(Ignore("put back")), return_ok=True)
    assert eventer.sent == []


@pytest.mark.parametrize("tag", [[], {}, 7, ["x"]], ids=repr)
def test_consumer_tag_of_a_sender_is_ignored(app: Celery, receive: Callable[..., SingletonRequest], tag: Any) -> None:
    """On Redis the message contains its delivery info: a list in it stopped the consumer."""
    task = make(app)
    message = Message(
        body=[[], {}, {}],
        headers={"id": "id", "task": task.name},
        delivery_info={"exchange": "", "routing_key": "celery", "consumer_tag": tag},
    )
    request = SingletonRequest(message, app=app, task=task, decoded=True, hostname="w@host")
    assert original_of(request.context).queue == "celery"


def test_end_of_an_unreadable_message_is_recorded(
    app: Celery, receive: Callable[..., SingletonRequest], caplog: pytest.LogCaptureFixture
) -> None:
    """Its third part is not a dictionary, and its child died before it reported that: the consumer raised TypeError."""
    request = receive(make(app), embed=[1])
    begin(request)
    request.acknowledged = True
    request._record(WorkerLostError("lost"), settled=True)
    assert mark_of(app, request) is not None
    assert "cannot be recorded" not in caplog.text


@pytest.mark.parametrize("late", [True, False])
def test_cancelled_message_is_not_acknowledged(
    app: Celery, receive: Callable[..., SingletonRequest], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Celery considers a greenlet that it has killed a success."""
    acknowledged: list[bool] = []
    monkeypatch.setattr(WorkerRequest, "cancel", lambda *_, **__: None)
    monkeypatch.setattr(WorkerRequest, "acknowledge", lambda _: acknowledged.append(True), raising=False)
    request = receive(make(app, acks_late=late))
    request.cancel(None)
    request.acknowledge()
    assert acknowledged == [True] * (not late)


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
@pytest.mark.parametrize("late", [True, False])
def test_cancelled_message_that_is_not_delivered_again_frees_what_it_brought(
    app: Celery, receive: Callable[..., SingletonRequest], late: bool, pool: str
) -> None:
    """By a cold shutdown, say. Its process may have had no time to make the lock last no longer than itself."""
    store, task = Runtime.of(app).store, make(app, acks_late=late)
    key, owner = key_of_queue(key_of_text(app.main, "job", "1")), new_owner()
    store.acquire(LockRequest(key, owner, ttl=600, holder=Holder()))
    if pool == "prefork":
        children_of[app] = SimpleNamespace(assign=lambda *_: None, forget=lambda *_: True)
    request = receive(task, carries={"queue": [task.name, key, owner, 600.0, 1, "until_executed"]})
    request.on_accepted(1, time.monotonic())
    request.cancel(SimpleNamespace(terminate_job=lambda *_: None))
    if pool == "prefork":
        assert store.held(key)  # It may have ended, and go on as a copy: its process will report that.
        request.on_failure(info(Terminated(15)))
    if late:
        assert store.held(key)
    else:
        until(lambda: not store.held(key), "the lock is free")


def test_cancelled_greenlet_frees_what_it_brought_if_the_result_backend_fails(
    app: Celery, receive: Callable[..., SingletonRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cold shutdown it always does: the hub of greenlets runs the signal's handler, and cannot wait."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("Impossible to call blocking function in the event loop callback")

    store, task = Runtime.of(app).store, make(app)
    key, owner = key_of_queue(key_of_text(app.main, "job", "1")), new_owner()
    store.acquire(LockRequest(key, owner, ttl=600, holder=Holder()))
    request = receive(task, carries={"queue": [task.name, key, owner, 600.0, 1, "until_executed"]})
    request.on_accepted(1, time.monotonic())
    monkeypatch.setattr(task.backend, "mark_as_retry", fail)
    with pytest.raises(AssertionError):
        request.cancel(SimpleNamespace(terminate_job=lambda *_: None))
    until(lambda: not store.held(key), "the lock is free", seconds=10)


@pytest.mark.parametrize("has_ended", [False, True])
def test_cancelled_message_that_has_ended_is_not_stored_as_one_that_goes_on(
    app: Celery, receive: Callable[..., SingletonRequest], has_ended: bool
) -> None:
    """Its child has ended it, and Celery has not read that yet; the copy that comes is dropped."""
    request = receive(make(app, acks_late=True))
    request.on_accepted(1, time.monotonic())
    holds = begin(request)
    app.backend.store_result(request.id, ValueError("as told"), "FAILURE")
    if has_ended:
        ended = Outcome("FAILURE", settled=True).record_of(holder_of(request.task, request.context), 60)
        Runtime.of(app).store.remember(holds.key, ended)
    request.cancel(SimpleNamespace(terminate_job=lambda *_: None))
    assert app.backend.get_state(request.id) == ("FAILURE" if has_ended else "RETRY")
    request.on_failure(info(Terminated(15)))
    assert app.backend.get_state(request.id) == ("FAILURE" if has_ended else "RETRY")
    assert request not in state.active_requests


def test_silent_lock_server_is_asked_once_whether_cancelled_messages_have_ended(
    app: Celery, receive: Callable[..., SingletonRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(key: str, message: str) -> None:
        asked.append(key)
        raise LockUnavailable("test", "told to fail")

    store = Runtime.of(app).store
    monkeypatch.setattr(store, "recorded", ask)
    requests = [receive(make(app, acks_late=True)) for _ in range(2)]
    for request in requests:
        begin(request)
        assert not request.has_ended()
    assert len(asked) == 1


OF_A_SHUTDOWN = pytest.param(
    {"emit_retry": False}, marks=pytest.mark.skipif(VERSION < (5, 6), reason="older versions always store RETRY")
)


@pytest.mark.parametrize("options", [{}, OF_A_SHUTDOWN], ids=["lost", "shut down"])
def test_message_is_cancelled_where_nobody_can_ask_whether_it_has_ended(
    app: Celery, receive: Callable[..., SingletonRequest], monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    """In a cold shutdown of a pool of greenlets: their hub runs the signal's handler, and cannot wait."""
    asked: list[str] = []

    def ask(key: str, message: str) -> None:
        asked.append(key)
        raise AssertionError("Impossible to call blocking function in the event loop callback")

    monkeypatch.setattr(Runtime.of(app).store, "recorded", ask)
    request = receive(make(app, acks_late=True))
    request.on_accepted(1, time.monotonic())
    begin(request)
    request.cancel(SimpleNamespace(terminate_job=lambda *_: None), **options)
    assert request.was_cancelled
    assert bool(asked) is options.get("emit_retry", True), "nothing is stored, so it does not matter"


def test_message_that_no_pool_can_cancel_is_acknowledged_when_it_ends(
    app: Celery, receive: Callable[..., SingletonRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    acknowledged: list[bool] = []
    monkeypatch.setattr(WorkerRequest, "cancel", refuse)
    monkeypatch.setattr(WorkerRequest, "acknowledge", lambda _: acknowledged.append(True), raising=False)
    request = receive(make(app, acks_late=True))
    with pytest.raises(NotImplementedError):
        request.cancel(None)
    request.acknowledge()
    assert acknowledged == [True]


class TestTwoDeliveriesInOneWorker:
    """Celery knows only the newest delivery of an id, and none once that has ended."""

    @pytest.fixture
    def run(self, app: Celery, receive: Callable[..., SingletonRequest]) -> Iterator[SingletonRequest]:
        task = make(app, acks_late=True)
        self.receive_copy = lambda: receive(task)
        request = receive(task)
        state.task_reserved(request)
        request.on_accepted(1, time.monotonic())
        yield request
        state.reset_state()
        revoked.discard(request.id)

    @pytest.fixture
    def copy(self, run: SingletonRequest) -> SingletonRequest:
        request = self.receive_copy()
        state.task_reserved(request)
        return request

    def test_run_is_found_by_its_id_after_a_copy_has_ended(self, run: SingletonRequest, copy: SingletonRequest) -> None:
        copy.on_accepted(2, time.monotonic())
        copy.on_failure(info(Ignore()), return_ok=True)
        assert state.requests.get(run.id) is run

    def test_run_is_found_by_its_id_after_a_copy_was_revoked(
        self, run: SingletonRequest, copy: SingletonRequest
    ) -> None:
        revoked.add(copy.id)
        assert copy.revoked()
        assert state.requests.get(run.id) is run

    def test_run_is_found_by_its_id_after_a_copy_has_reached_a_hard_time_limit(
        self, run: SingletonRequest, copy: SingletonRequest
    ) -> None:
        copy.on_accepted(2, time.monotonic())
        copy.on_timeout(soft=False, timeout=1.0)
        assert state.requests.get(run.id) is run

    @pytest.mark.parametrize("first", ["run", "copy"])
    def test_each_delivery_is_terminated_once(self, run: SingletonRequest, copy: SingletonRequest, first: str) -> None:
        """Even if Celery finds both by their stamps, and terminates both."""
        copy.on_accepted(2, time.monotonic())
        terminated: list[int] = []
        pool = SimpleNamespace(terminate_job=lambda pid, _: terminated.append(pid))
        for request in (run, copy) if first == "run" else (copy, run):
            request.terminate(pool, "TERM")
        assert sorted(terminated) == [1, 2]

    def test_request_without_a_lock_is_left_to_celery(
        self, run: SingletonRequest, copy: SingletonRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A plain task may have replaced itself by an exclusive one, under the same id."""
        monkeypatch.setattr(copy, "others_at_work", lambda: [SimpleNamespace(id=copy.id), run])
        copy.terminate(SimpleNamespace(terminate_job=lambda *_: None), "TERM")
        assert run.was_terminated

    def test_copy_that_has_not_begun_passes_the_termination_on(
        self, run: SingletonRequest, copy: SingletonRequest
    ) -> None:
        terminated: list[int] = []
        copy.terminate(SimpleNamespace(terminate_job=lambda pid, _: terminated.append(pid)), "TERM")
        assert terminated == [1]
        assert run.was_terminated
