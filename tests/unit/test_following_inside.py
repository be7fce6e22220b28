"""As `test_following`, where only a look at the inside shows it: whoever rewrites that brings these along."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.task import leader, redelivery, requeue
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.joined import Joined
from celery_singleton_lock.task.leader import Leader
from celery_singleton_lock.task.queue_lock import lock_in
from celery_singleton_lock.task.queued import Queued
from celery_singleton_lock.task.running import progress_of
from tests.patience import LIMIT
from tests.unit.deliveries import carried_out, deliver, make

pytestmark = pytest.mark.usefixtures("settled_at_once")

SCOPES = ("until_executed", "until_executing", "until_and_while_executing")


class Line:
    """Messages of one task: the first has the lock, and the others follow it."""

    def __init__(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = app
        self.carried: dict[str, dict[str, Any]] = {}
        self.put_back: list[dict[str, Any]] = []
        self.body: Callable[[], Any] = lambda: "ran"
        self.first = f"first-{app.main}"

        def send(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
            self.carried[options["task_id"]] = options["headers"][HEADER]
            return AsyncResult(options["task_id"], backend=app.backend, app=app)

        def send_again(task: Any, reason: str, delay: float, header: dict[str, Any]) -> None:
            self.put_back.append(header)
            self.carried[task.request.id] |= {"put_back": header}

        monkeypatch.setattr(app, "send_task", send)
        monkeypatch.setattr(requeue, "_send", send_again)

    def begin(self, followers: int = 1, **options: Any) -> None:
        options = {"lock_scope": "until_executed", "lock_queue_ttl": 100.0, **options}
        self.task, self.runs = make(self.app, lambda: self.body(), **options)
        self.task.apply_async(task_id=self.first)
        for number in range(followers):
            self.task.apply_async(task_id=self.id(number), root_id="the root")
            assert self.lock(number).follows.task_id == self.first

    def id(self, number: int) -> str:
        return f"follower-{number}-{self.app.main}"

    def lock(self, number: int) -> Any:
        task_id = self.id(number)
        return lock_in(self.carried[task_id], self.app, self.task.name)

    def deliver_first(self, **request: Any) -> Any:
        return deliver(self.task, id=self.first, carries=self.carried[self.first], **request)

    def follower(self, number: int = 0, **request: Any) -> Any:
        task_id = self.id(number)
        return deliver(self.task, id=task_id, carries=self.carried[task_id], root_id="the root", **request)

    def is_put_back(self, number: int = 0, **request: Any) -> dict[str, Any]:
        with pytest.raises(requeue.GoesOn):
            self.follower(number, **request)
        return self.put_back[-1]

    @property
    def store(self) -> Any:
        return Runtime.of(self.app).store

    @property
    def key(self) -> str:
        return key_of_queue(self.task.lock_key_of())

    def lose(self) -> None:
        """The lock of the first message ends without a record."""
        for held in self.store.held(self.key):
            self.store.free(held.hold(self.key, ttl=1.0))

    def queued(self) -> list[str | None]:
        return [held.holder.task_id for held in self.store.held(self.key)]


class Meanwhile:
    """A copy that is carried out just as a follower asks for the queue lock. Its body runs until `end`, or has ended by
    then if it `has_ended`.
    """

    def __init__(
        self, line: Line, deliver: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, *, has_ended: bool
    ) -> None:
        acquire, began = line.store.acquire, threading.Event()
        self._goes_on = threading.Event()
        self._running = threading.Thread(target=deliver)

        def late(request: LockRequest) -> Any:
            if request.key == line.key:
                monkeypatch.setattr(line.store, "acquire", acquire)
                self._running.start()
                assert began.wait(LIMIT)
                if has_ended:
                    self.end()
            return acquire(request)

        line.body = lambda: began.set() or self._goes_on.wait(LIMIT)
        monkeypatch.setattr(line.store, "acquire", late)

    def end(self) -> None:
        self._goes_on.set()
        self._running.join()


@pytest.fixture
def line(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(app, monkeypatch)


def fail(error: BaseException) -> Callable[[], Any]:
    def body() -> None:
        raise error

    return body


def lose_answer(monkeypatch: pytest.MonkeyPatch, line: Line, call: str) -> None:
    """The lock server carries out requests for the lock of the queue, but its answers are lost."""
    method = getattr(line.store, call)

    def lost(*args: Any, **options: Any) -> Any:
        found = method(*args, **options)
        if line.key in (args[0], getattr(args[0], "key", None)):
            raise LockUnavailable("the server", "silent")
        return found

    monkeypatch.setattr(line.store, call, lost)


@pytest.mark.parametrize("scope", SCOPES)
class TestEnds:
    def test_follower_waits_in_line_for_the_lock_of_its_leader(self, line: Line, scope: str) -> None:
        line.begin(lock_scope=scope)
        header = line.is_put_back()
        assert header["waits"] == [line.key, 1]
        assert header["leader"] == line.lock(0).follows.header()
        assert line.runs == []

    @pytest.mark.parametrize("end", [Reject("as told"), Ignore()])
    def test_follower_runs_if_its_leader_ends_without_a_result(self, line: Line, scope: str, end: Exception) -> None:
        line.begin(followers=2, lock_scope=scope)
        line.body = fail(end)
        with pytest.raises(type(end)):
            line.deliver_first()
        line.body = lambda: "ran"
        assert [line.follower(number) for number in range(2)] == ["ran"] * 2
        assert len(line.runs) == 2

    @pytest.mark.parametrize("ran", [False, True])
    def test_copy_of_a_follower_that_has_just_ended_passes_its_wake_up_on(
        self, line: Line, scope: str, monkeypatch: pytest.MonkeyPatch, ran: bool
    ) -> None:
        """The end is on record, and not stored, since the worker has died. So the copy looks for it later."""
        line.begin(lock_scope=scope)
        line.is_put_back()
        if ran:
            line.lose()
        else:
            line.deliver_first()
        assert line.follower() == "ran"
        monkeypatch.setattr(redelivery, "SETTLING", 10.0)
        woken: list[str] = []
        monkeypatch.setattr(line.store, "wake", woken.append)
        assert "waits" not in line.is_put_back()
        assert woken == [line.key]

    def test_follower_that_runs_passes_the_wake_up_for_its_leaders_run_on(
        self, line: Line, scope: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise nobody does: its run has another lock."""
        line.begin(lock_scope=scope)

        def body() -> None:
            line.is_put_back()
            raise Ignore

        line.body = body
        with pytest.raises(Ignore):
            line.deliver_first()
        key, _ = line.put_back[-1]["waits"]
        woken: list[str] = []
        monkeypatch.setattr(line.store, "wake", woken.append)
        line.body = lambda: "ran"
        assert line.follower() == "ran"
        assert woken == ([key] if scope == "until_executing" else [])

    def test_copy_of_a_running_follower_passes_its_wake_up_on_unless_that_has_the_lock(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, scope: str
    ) -> None:
        """It has no use for the lock, which was freed as the follower's body started."""
        line.begin(lock_scope=scope)
        line.is_put_back()
        line.lose()
        woken: list[str] = []

        def body() -> None:
            monkeypatch.setattr(line.store, "wake", woken.append)
            with pytest.raises(requeue.GoesOn):
                line.follower()

        line.body = body
        line.follower()
        assert woken == ([] if scope == "until_executed" else [line.key])

    def test_leader_that_has_lost_its_lock_wakes_its_followers_behind_the_next_message(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, scope: str
    ) -> None:
        line.begin(lock_scope=scope)
        line.is_put_back()
        line.lose()
        line.task.apply_async(task_id="next")
        assert line.queued() == ["next"]
        woken: list[str] = []
        monkeypatch.setattr(line.store, "wake", woken.append)
        line.deliver_first()
        assert woken == [line.key]
        assert line.follower() == "ran"
        assert line.runs == [line.first]
        assert line.queued() == ["next"]

    def test_leader_that_has_its_lock_leaves_the_waking_to_the_lock_server(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, scope: str
    ) -> None:
        line.begin(lock_scope=scope)
        monkeypatch.delattr(type(line.store), "wake")
        line.deliver_first()
        assert line.runs == [line.first]

    def test_leader_may_start_just_as_a_follower_takes_its_lock(
        self, line: Line, scope: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line.begin(lock_scope=scope)
        acquire = line.store.acquire

        def late(request: LockRequest) -> Any:
            if request.key == line.key:
                monkeypatch.setattr(line.store, "acquire", acquire)
                line.deliver_first()
            return acquire(request)

        line.lose()
        monkeypatch.setattr(line.store, "acquire", late)
        assert line.follower() == "ran"
        assert line.runs == [line.first]
        assert line.queued() == []

    @pytest.mark.parametrize("copy", ["runs", "has ended"])
    def test_copy_may_start_just_as_a_follower_takes_the_lock(
        self, line: Line, scope: str, copy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy has led, and has freed the lock as its body started: nobody would free it again."""
        line.begin(lock_scope=scope)
        line.lose()
        meanwhile = Meanwhile(line, line.follower, monkeypatch, has_ended=copy == "has ended")
        if copy == "runs":
            with pytest.raises(requeue.GoesOn):
                line.follower()
        else:
            assert line.follower() is True
        assert line.queued() == ([line.id(0)] if copy == "runs" and scope == "until_executed" else [])
        meanwhile.end()
        assert line.runs == [line.id(0)]
        assert line.queued() == []


@pytest.mark.parametrize("scope", ["until_executing", "until_and_while_executing"])
def test_copy_may_start_and_retry_just_as_a_follower_takes_the_lock(
    line: Line, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message goes on, but its next attempt knows nothing of this lock."""
    line.begin(lock_scope=scope)
    acquire = line.store.acquire

    def late(request: LockRequest) -> Any:
        if request.key == line.key:
            monkeypatch.setattr(line.store, "acquire", acquire)
            line.body = fail(Retry())
            with pytest.raises(Retry):
                line.follower()
        return acquire(request)

    line.lose()
    monkeypatch.setattr(line.store, "acquire", late)
    with pytest.raises(Ignore, match="retried"):
        line.follower()
    assert line.runs == [line.id(0)]
    assert line.queued() == []


@pytest.mark.parametrize("scope", ["until_executing", "until_and_while_executing"])
@pytest.mark.parametrize("copy", ["runs", "has ended"])
def test_leader_that_died_may_come_again_just_as_a_follower_takes_its_lock(
    line: Line, scope: str, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower knows the leader's run, and has found nobody under its lock."""
    line.begin(lock_scope=scope, acks_late=True)
    line.body = fail(SystemExit())
    with pytest.raises(SystemExit):
        line.deliver_first()
    meanwhile = Meanwhile(line, line.deliver_first, monkeypatch, has_ended=copy == "has ended")
    if copy == "runs":
        line.is_put_back()
        meanwhile.end()
    assert line.follower() is True
    assert line.runs == [line.first, line.first]
    assert line.queued() == []


@pytest.mark.parametrize("next_attempt", ["waits", "has ended"])
def test_copy_may_retry_with_the_lock_just_as_a_follower_takes_it(
    line: Line, next_attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt has the lock, and frees it as it ends; afterwards nobody would."""
    line.begin(lock_scope="until_executed")
    acquire, original = line.store.acquire, dict(line.carried[line.id(0)])

    def retry() -> None:
        with carried_out(line.task, line.task.request):
            line.task.retry(countdown=0)

    def late(request: LockRequest) -> Any:
        if request.key == line.key:
            monkeypatch.setattr(line.store, "acquire", acquire)
            line.body = retry
            with pytest.raises(Retry):
                line.follower()
            line.body = lambda: "ran"
            if next_attempt == "has ended":
                assert line.follower(retries=1) == "ran"
                assert line.queued() == []
            line.carried[line.id(0)] = original
        return acquire(request)

    line.lose()
    monkeypatch.setattr(line.store, "acquire", late)
    with pytest.raises(requeue.GoesOn, match="retried"):
        line.follower()
    assert line.queued() == ([line.id(0)] if next_attempt == "waits" else [])


@pytest.mark.parametrize("call", ["recorded", "refuse"])
def test_copy_that_gets_no_answer_keeps_no_lock_that_was_freed(
    line: Line, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message has retried, and the next attempt has ended, just as the copy asks for the lock."""
    line.begin(lock_scope="until_executed")
    acquire, original, away = line.store.acquire, dict(line.carried[line.id(0)]), pytest.MonkeyPatch()

    def retry() -> None:
        with carried_out(line.task, line.task.request):
            line.task.retry(countdown=0)

    def late(request: LockRequest) -> Any:
        if request.key != line.key:
            return acquire(request)
        monkeypatch.setattr(line.store, "acquire", acquire)
        line.body = retry
        with pytest.raises(Retry):
            line.follower()
        line.body = lambda: "ran"
        assert line.follower(retries=1) == "ran"
        line.carried[line.id(0)] = original
        found = acquire(request)
        lose_answer(away, line, call)
        return found

    line.lose()
    monkeypatch.setattr(line.store, "acquire", late)
    with pytest.raises(requeue.GoesOn):
        line.follower()
    away.undo()
    with pytest.raises(requeue.GoesOn, match="retried"):
        line.follower()
    assert line.queued() == []


@pytest.mark.parametrize("scope", ["until_executing", "until_and_while_executing"])
@pytest.mark.parametrize("copy", ["runs", "has ended"])
def test_leader_that_died_may_come_again_as_a_follower_meets_another_one(
    line: Line, scope: str, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has the leader's lock, and gives it back."""

    def dies() -> None:
        line.is_put_back(0)
        line.is_put_back(1)
        raise SystemExit

    line.begin(followers=2, lock_scope=scope, acks_late=True)
    line.body = dies
    with pytest.raises(SystemExit):
        line.deliver_first()
    acquire = line.store.acquire

    def meets(request: LockRequest) -> Any:
        if request.key != line.key:
            return acquire(request)
        met = []

        def leads(other: LockRequest) -> Any:
            found = acquire(other)
            if other.key == line.key:
                met.append(acquire(request))
            return found

        monkeypatch.setattr(line.store, "acquire", leads)
        meanwhile.append(Meanwhile(line, line.deliver_first, monkeypatch, has_ended=copy == "has ended"))
        if copy == "runs":
            line.is_put_back(0)
        else:
            assert line.follower(0) is True
        monkeypatch.setattr(line.store, "acquire", acquire)
        return met.pop()

    meanwhile: list[Meanwhile] = []
    monkeypatch.setattr(line.store, "acquire", meets)
    if copy == "runs":
        line.is_put_back(1)
        meanwhile[0].end()
    assert line.follower(1) is True
    assert line.runs == [line.first, line.first]
    assert line.queued() == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_copy_frees_the_lock_that_its_message_has_not_passed_on(
    line: Line, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes on has another lock; the first worker has died before it could free this one."""

    def body() -> None:
        progress_of(line.task.request).is_replaced = is_replaced
        raise Ignore if is_replaced else Retry

    line.begin(followers=0)
    line.body = body
    with monkeypatch.context() as dies:
        dies.setattr(Queued, "_free", lambda _: fail(SystemExit())())
        with pytest.raises(SystemExit):
            line.deliver_first()
    assert line.queued() == [line.first]
    with pytest.raises(Ignore):
        line.deliver_first()
    assert line.queued() == []


class TestLooks:
    @pytest.mark.parametrize("scope", ["until_executed", "until_and_while_executing"])
    @pytest.mark.parametrize("waits", ["in line", "in its slot", "not"])
    def test_message_that_has_waited_wakes_followers_of_the_run_before(
        self, line: Line, scope: str, monkeypatch: pytest.MonkeyPatch, waits: str
    ) -> None:
        """The end of that run may have woken this message alone, and followers do not need the lock that it takes."""
        line.begin(lock_scope=scope, on_conflict="retry", lock_wait=LIMIT if waits == "in its slot" else 0)
        key = line.task.lock_key_of()
        lease = line.store.acquire(LockRequest(key, new_owner(), ttl=100.0, holder=Holder("the one before")))
        if waits == "in its slot":
            threading.Timer(0.1, line.store.free, [lease]).start()
        elif waits == "in line":
            with suppress(requeue.GoesOn):
                line.deliver_first()
        if waits != "in its slot":
            line.store.free(lease)
        woken: list[str] = []
        monkeypatch.setattr(line.store, "wake", woken.append)
        line.deliver_first()
        assert line.runs == [line.first]
        assert woken == ([] if waits == "not" else [key])

    @pytest.mark.parametrize("is_in_line", [False, True])
    @pytest.mark.parametrize("copy", ["is dropped", "stands by", "has ended"])
    def test_copy_in_line_of_a_message_that_has_begun_wakes_followers_of_the_run_before(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, copy: str, is_in_line: bool
    ) -> None:
        """Whoever has the lock now has woken this copy, and wakes nobody else before it ends."""
        line.begin(on_conflict="retry", acks_late=copy == "stands by")
        key = line.task.lock_key_of()
        lease = line.store.acquire(LockRequest(key, new_owner(), ttl=100.0, holder=Holder("the one before")))
        with suppress(requeue.GoesOn):
            line.deliver_first()
        line.store.free(lease)
        woken: list[str] = []

        def deliver_copy() -> None:
            before = len(woken)
            if not is_in_line:
                del line.carried[line.first]["put_back"]
            with suppress(Ignore):
                line.deliver_first()
            assert (key in woken[before:]) == is_in_line

        monkeypatch.setattr(line.store, "wake", woken.append)
        line.body = deliver_copy if copy != "has ended" else lambda: None
        line.deliver_first()
        if copy == "has ended":
            deliver_copy()
        assert line.runs == [line.first]

    def test_lock_is_renewed_while_the_server_is_slow_to_wake_followers(
        self, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line.begin(on_conflict="retry", lock_ttl=1.0)
        key = line.task.lock_key_of()
        lease = line.store.acquire(LockRequest(key, new_owner(), ttl=100.0, holder=Holder("the one before")))
        with suppress(requeue.GoesOn):
            line.deliver_first()
        line.store.free(lease)
        monkeypatch.setattr(line.store, "wake", lambda _: clock.sleep(1.2))
        assert line.deliver_first() == "ran"

    def test_follower_that_takes_the_lock_of_the_run_before_wakes_nobody(
        self, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others in line follow it from then on, or find out when it ends."""
        line.begin(on_conflict="retry")
        line.lose()
        lease = line.store.acquire(
            LockRequest(line.task.lock_key_of(), new_owner(), ttl=100.0, holder=Holder("the one before"))
        )
        with suppress(requeue.GoesOn):
            line.follower()
        line.store.free(lease)
        woken: list[str] = []
        monkeypatch.setattr(line.store, "wake", woken.append)
        line.follower()
        assert woken == []

    @pytest.mark.parametrize("policy", ["retry", "raise", "run"])
    def test_silent_lock_server_is_handled_as_the_policy_says(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, policy: str
    ) -> None:
        line.begin(on_unavailable=policy)

        def silent(*_: object, **__: object) -> Any:
            raise LockUnavailable("the server", "silent")

        with monkeypatch.context() as away:
            for method in ("held", "recorded", "acquire"):
                away.setattr(line.store, method, silent)
            if policy == "retry":
                assert line.is_put_back()["unavailable"] == 1
            elif policy == "raise":
                with pytest.raises(LockUnavailable):
                    line.follower()
            else:
                assert line.follower() == "ran"
        if policy == "retry":
            line.deliver_first()
            assert line.follower() == "ran"
            assert line.runs == [line.first]

    def test_follower_that_missed_the_answer_to_its_acquire_runs_later(
        self, line: Line, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line.begin()
        line.lose()
        acquire = line.store.acquire

        def lost(request: LockRequest) -> Any:
            acquire(request)
            raise LockUnavailable("the server", "silent")

        with monkeypatch.context() as away:
            away.setattr(line.store, "acquire", lost)
            line.is_put_back()
        assert line.follower() == "ran"
        assert line.queued() == []

    @pytest.mark.parametrize("scope", SCOPES)
    @pytest.mark.parametrize("call", ["acquire", "refuse"])
    def test_follower_that_missed_an_answer_still_leads_the_others(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, scope: str, call: str
    ) -> None:
        """The others follow it nevertheless."""
        line.begin(followers=2, lock_scope=scope)
        line.lose()
        with monkeypatch.context() as away:
            lose_answer(away, line, call)
            line.is_put_back(0)
        assert [line.follower(number) for number in range(2)] == ["ran"] * 2
        assert line.runs == [line.id(0)]
        assert line.queued() == []

    @pytest.mark.parametrize("scope", SCOPES)
    def test_leader_may_start_when_a_follower_misses_an_answer(
        self, line: Line, monkeypatch: pytest.MonkeyPatch, scope: str
    ) -> None:
        line.begin(lock_scope=scope)
        line.lose()
        with monkeypatch.context() as away:
            lose_answer(away, line, "acquire")
            line.is_put_back()
        line.deliver_first()
        assert line.follower() == "ran"
        assert line.runs == [line.first]
        assert line.queued() == []

    def test_lock_by_time_outlives_its_leader(self, line: Line, app: Celery) -> None:
        """Such a lock says nothing about the message."""
        line.begin(lock_scope="until_expired")
        assert "waits" not in line.is_put_back()
        line.body = lambda: "of the first"
        app.backend.store_result(line.first, line.deliver_first(), "SUCCESS")
        assert line.queued() == [line.first]
        assert line.follower() == "of the first"
        assert len(line.runs) == 1

    def test_lock_by_time_of_a_revoked_leader_passes_to_a_follower(self, line: Line, app: Celery) -> None:
        """The lock goes on: without it, nobody would see that a follower runs."""
        line.begin(followers=3, lock_scope="until_expired")
        for number in range(3):
            line.is_put_back(number)
        app.backend.mark_as_revoked(line.first, "revoked")
        line.body = lambda: [line.is_put_back(number)["leader"] for number in (1, 2)]
        assert len(line.follower(0)) == 2
        assert line.runs == [line.id(0)]
        assert line.queued() == [line.id(0)]

    def test_follower_runs_after_a_lock_by_time_has_ended(self, line: Line) -> None:
        line.begin(lock_scope="until_expired")
        line.lose()
        assert line.follower() == "ran"
        assert line.queued() == [line.id(0)]

    def test_follower_returns_a_large_value_again(self, line: Line, app: Celery) -> None:
        """Its worker died before the result of the follower was stored: that of the leader still has the value."""
        line.begin()
        line.body = lambda: "x" * 10_000
        line.deliver_first()
        line.is_put_back()
        app.backend.store_result(line.first, "x" * 10_000, "SUCCESS")
        assert line.follower() == "x" * 10_000
        assert line.follower() == "x" * 10_000
        assert line.runs == [line.first]


class TestRunsLikeAnyOther:
    def test_follower_joins_a_leader_that_has_outlived_its_lock(self, line: Line) -> None:
        line.begin()

        def body() -> str:
            line.lose()
            assert "joins" in line.is_put_back()
            return "after all"

        line.body = body
        assert line.deliver_first() == "after all"
        line.body = lambda: "ran"
        assert line.follower() == "after all"
        assert len(line.runs) == 1

    @pytest.mark.parametrize("forged", [None, 1, "text", [], ["zz"] * 4, [1, 2, 3, 4], ["", "", 0, None], {"a": 1}])
    def test_forged_header_is_ignored(self, line: Line, forged: object) -> None:
        line.begin()
        task_id = line.id(0)
        line.carried[task_id]["queue"][-1] = forged
        assert line.lock(0).follows is None
        assert line.follower() == "ran"

    def test_foreign_record_is_ignored(self, line: Line) -> None:
        line.begin()
        its = line.lock(0).follows
        for said in (["a", "b"], [line.task.name, "key", ["x", "y", 0, 0, 0, False]], [1, 2, 3]):
            line.store.remember(line.key, leader.record(leader.named(its.token), said, 60.0))
            line.store.remember(line.key, leader.record(its.heirs_name, said, 60.0))
            line.is_put_back()
        line.lose()
        assert line.follower() == "ran"

    def test_circular_heirs_do_not_wait_forever(self, line: Line) -> None:
        line.begin()
        one = line.lock(0).follows
        other = Leader("other", new_owner(), 0.0)
        line.lose()
        for its, heir in ((one, other), (other, one)):
            line.store.remember(line.key, leader.record(its.heirs_name, heir.header(), 60.0))
        assert line.follower() == "ran"


def test_attempts_at_a_redlock_have_the_same_token() -> None:
    owner = new_owner()
    assert leader.token_of(owner) == leader.token_of(owner[:-4] + "0000")


@pytest.mark.parametrize("run", [None, "run"])
def test_header_is_read_as_it_was_written(run: str | None) -> None:
    joined = Joined("id", "5" * 32, 0, 0, 0.0)
    its = Leader("the idé", new_owner(), 5.0, None if run is None else leader.RunIdentity("job", "key", joined))
    assert Leader.read(its.header()) == its
    assert "the id" not in str(its.header())
