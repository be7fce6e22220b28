"""As `test_refusal`, where only a look at the inside shows it: whoever rewrites that brings these along."""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext, suppress
from pkgutil import resolve_name
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Retry

from celery_singleton_lock import Aborted, LockConflict, LockLost, LockUnavailable
from celery_singleton_lock.heartbeat import GONE
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.task import refusal, requeue
from celery_singleton_lock.task.abort import Body
from celery_singleton_lock.task.execution import holder_of
from celery_singleton_lock.task.running import progress_of
from tests.unit.deliveries import deliver, id_for, make, request_of

pytestmark = pytest.mark.usefixtures("settled_at_once")


def hold(task: Any) -> Lease:
    """Hold the lock as another task."""
    asked = LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other"))
    other = Runtime.of(task.app).store.acquire(asked)
    assert isinstance(other, Lease)
    return other


def lose(task: Any) -> None:
    """Lose the lock within a body."""
    Runtime.of(task.app).store.free(task.lock)
    task.lock.lose("could not be renewed")
    task.lock.check()


def does_not_answer(*_: object, **__: object) -> Any:
    raise LockUnavailable("the server", "silent")


def sends(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The headers of the messages that are put back from now on."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(requeue, "_send", lambda task, reason, delay, header: sent.append(header))
    return sent


class TestHasBegun:
    """A message that has begun waits, whatever the policy."""

    @pytest.mark.parametrize(
        "request_",
        [
            {"retries": 1},
            {"delivery_info": {"redelivered": True}},
            {"carries": {"put_back": {"retries": 0, "conflict": 3, "redelivered": True}}},
        ],
    )
    def test_message_that_may_have_begun_waits(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch, request_: dict[str, Any]
    ) -> None:
        sent = sends(monkeypatch)
        task, runs = make(app, lambda: 1, acks_late=True, on_conflict="raise", lock_conflict_retries=0)
        hold(task)
        with pytest.raises(requeue.GoesOn):
            deliver(task, **request_)
        assert (len(sent), runs) == (1, [])
        assert "waits" in sent[0]


class TestEndWithoutABody:
    """This is the message's end: a copy that is delivered while the first one waits does not run afterwards."""

    def test_failure_of_a_conflict_policy_is_the_end(self, app: Celery) -> None:
        def decide(task: Any, conflict: object) -> str:
            raise RuntimeError("a fault of the policy")

        task, runs = make(app, lambda: 1, on_conflict=decide, acks_late=True)
        other = hold(task)
        with pytest.raises(RuntimeError, match="policy"):
            deliver(task)
        Runtime.of(app).store.free(other)
        with pytest.raises(RuntimeError, match="policy"):
            deliver(task)
        assert runs == []

    def test_conflict_that_a_policy_raises_is_the_end(self, app: Celery) -> None:
        def decide(task: Any, conflict: LockConflict) -> str:
            raise conflict

        task, runs = make(app, lambda: 1, on_conflict=decide, acks_late=True)
        other = hold(task)
        with pytest.raises(LockConflict):
            deliver(task)
        Runtime.of(app).store.free(other)
        with pytest.raises(LockConflict):
            deliver(task)
        assert runs == []

    def test_body_that_turns_its_loss_into_another_error_leaves_the_end_to_its_copy(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A copy already runs: its end is the message's."""

        def lose() -> None:
            store = Runtime.of(app).store
            store.free(task.lock)
            task.lock.lose("deleted")
            holder = holder_of(task, task.request)
            assert isinstance(store.acquire(LockRequest(task.lock.key, "c" * 32, ttl=60.0, holder=holder)), Lease)
            try:
                task.lock.check()
            except LockLost:
                raise ValueError from None

        task, runs = make(app, lose, acks_late=True)
        with pytest.raises(Ignore):
            deliver(task)
        assert len(runs) == 1

    def test_loss_of_the_lock_is_the_end(self, app: Celery) -> None:
        task, runs = make(app, lambda: lose(task), acks_late=True)
        for _ in range(2):
            with pytest.raises(LockLost):
                deliver(task)
        assert len(runs) == 1

    def test_body_that_is_struck_just_as_it_ends_is_not_struck_again(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`Aborted` comes before the end of the body is noted. The next one would hit the question about the loss."""
        wanted: list[bool] = []

        def end_late() -> None:
            progress_of(task.request).body.struck = True
            task.lock.lose(GONE)

        def interrupted(body: Body, *_: object) -> None:
            raise Aborted

        def held(*_: object, **__: object) -> list[Held]:
            wanted.extend(body.wants_abort for body in bodies)
            return []

        task, runs = make(app, end_late, acks_late=True)
        bodies: list[Body] = []
        enter = Body.__enter__
        monkeypatch.setattr(Body, "__enter__", lambda body: bodies.append(body) or enter(body))
        monkeypatch.setattr(Body, "__exit__", interrupted)
        monkeypatch.setattr(Runtime.of(app).store, "held", held)
        with pytest.raises(LockLost):
            deliver(task)
        assert len(runs) == 1
        assert wanted
        assert not any(wanted)

    def test_lost_lock_that_still_exists_is_not_a_copy(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        """It could be neither renewed nor freed: the lock is its own, and not held by a copy that runs."""

        def lose() -> None:
            task.lock.lose("could not be renewed")
            task.lock.check()

        task, runs = make(app, lose, acks_late=True)
        monkeypatch.setattr(Runtime.of(app).store, "free", lambda *_, **__: False)
        with pytest.raises(LockLost):
            deliver(task)
        assert len(runs) == 1

    def test_loss_that_cannot_be_recorded_is_reported_at_once_and_recorded_later(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task, runs = make(app, lambda: lose(task), acks_late=True)
        with monkeypatch.context() as silent, pytest.raises(LockLost):
            silent.setattr(Runtime.of(app).store, "refuse", does_not_answer)
            deliver(task)
        with pytest.raises(LockLost):
            deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("moment", ["sending", "sent"])
    def test_run_that_is_stopped_while_it_retries_has_retried(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        """Its next attempt runs: a LockLost as well would be another end."""

        def retry() -> None:
            try:
                task.retry(countdown=100.0)
            finally:
                lose_and_strike(moment == "sent")

        def lose_and_strike(is_now: bool) -> None:
            if is_now:
                Runtime.of(app).store.free(task.lock)
                task.lock.lose("deleted")
                progress_of(task.request).body.strike()
                time.sleep(0)

        task, _ = make(app, retry, acks_late=True)
        signature = task.signature_from_request

        def sign(*args: Any, **options: Any) -> Any:
            lose_and_strike(moment == "sending")
            return signature(*args, **options)

        monkeypatch.setattr(task, "signature_from_request", sign)
        with pytest.raises(Retry):
            deliver(task)
        with pytest.raises(Ignore, match="retried"):
            deliver(task)


class Interrupted(Exception):
    """Like a soft time limit, at any line."""


def holds(app: Celery) -> list[str]:
    return [held.owner for _, held in Runtime.of(app).store.all_held(app.main)]


def interrupts(*_: object, **__: object) -> Any:
    raise Interrupted


def interrupted_once(path: str) -> Any:
    """What is found there, which the first call interrupts before it has done anything."""
    found, times = resolve_name(path), itertools.count()

    def once(*arguments: Any, **options: Any) -> Any:
        return interrupts() if next(times) == 0 else found(*arguments, **options)

    return once


class TestInterrupted:
    """Outside of the body: the message has one end, and no lock is left behind."""

    def is_interrupted(self, task: Any) -> None:
        with pytest.raises(Interrupted):
            deliver(task)

    def has_ended(self, task: Any, runs: list[str]) -> None:
        """Nothing holds the lock, and a copy ends in the same way without a body."""
        assert holds(task.app) == []
        self.is_interrupted(task)
        assert runs == []

    def test_owner_that_an_earlier_delivery_gave_up_is_not_a_copy(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task, runs = make(app, lambda: 1)
        given_up = "a" * 32
        carries = {"put_back": {"retries": 0, "given_up": [given_up]}}
        task.push_request(**request_of(task, carries=carries))
        holder = holder_of(task, task.request)
        task.pop_request()
        Runtime.of(app).store.acquire(LockRequest(task.lock_key_of(), given_up, ttl=60.0, holder=holder))
        monkeypatch.setattr(Runtime.of(app).store, "acquire", interrupts)
        with pytest.raises(Interrupted):
            deliver(task, carries=carries)
        assert holds(app) == []
        assert runs == []

    @pytest.mark.parametrize("place", ["drop_if_expired", "acquire"])
    def test_interruption_with_the_lock(self, app: Celery, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        """Between the answer and the first line that would clean up."""
        task, runs = make(app, lambda: 1, acks_late=True)
        acquire = Runtime.of(app).store.acquire

        def granted(*arguments: Any, **options: Any) -> Any:
            found = acquire(*arguments, **options)
            if place == "acquire":
                raise Interrupted
            return found

        with monkeypatch.context() as patched:
            patched.setattr(Runtime.of(app).store, "acquire", granted)
            if place == "drop_if_expired":
                patched.setattr(refusal, place, interrupts)
            self.is_interrupted(task)
        self.has_ended(task, runs)

    def test_interruption_right_before_the_body(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        task, runs = make(app, lambda: 1, acks_late=True)
        with monkeypatch.context() as patched:
            patched.setattr("celery_singleton_lock.task.run.Body", interrupts)
            self.is_interrupted(task)
        self.has_ended(task, runs)

    @pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
    @pytest.mark.parametrize(
        "place",
        [
            "task.abort.Body.end",
            "heartbeat.Heartbeat.stop",
            "task.execution.Execution.record",
            "task.run._for_nobody",
            "task.run._for_next_attempt",
            "task.outcome.ended_by",
            "stores.memory.MemoryStore.free",
        ],
    )
    @pytest.mark.usefixtures("settled_at_once")
    def test_interruption_after_the_body_comes_too_late(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch, place: str, fails: bool
    ) -> None:
        """The message ends as the body has ended: here, and where a copy comes."""

        def body() -> int:
            if fails:
                raise ZeroDivisionError
            return 1

        task, runs = make(app, body, acks_late=True)
        with monkeypatch.context() as patched:
            patched.setattr(f"celery_singleton_lock.{place}", interrupted_once(f"celery_singleton_lock.{place}"))
            for _ in range(2):
                with pytest.raises(ZeroDivisionError) if fails else nullcontext():
                    assert deliver(task) == 1
                assert holds(app) == []
        assert len(runs) == 1

    @pytest.mark.parametrize("is_silent", [False, True], ids=["answers", "silent"])
    def test_interruption_as_the_loss_of_the_lock_is_recorded(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch, is_silent: bool
    ) -> None:
        """A lock is lost just when its server is slow to answer."""
        task, runs = make(app, lambda: lose(task), acks_late=True)
        store = Runtime.of(app).store
        refuse, times = does_not_answer if is_silent else store.refuse, itertools.count()

        def interrupted_once(*arguments: Any, **options: Any) -> Any:
            return interrupts() if next(times) == 0 else refuse(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(store, "refuse", interrupted_once)
            with pytest.raises(LockLost):
                deliver(task)
        with pytest.raises(LockLost):
            deliver(task)
        assert len(runs) == 1

    @pytest.mark.parametrize("scope", ["until_executing", "until_executed"])
    def test_interruption_as_the_lock_is_freed_that_a_message_brought(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch, scope: str
    ) -> None:
        place = "celery_singleton_lock.task.queued.Queued._what_it_is"
        monkeypatch.setattr(place, interrupted_once(place))
        task, _ = make(app, lambda: 1, acks_late=True, lock_scope=scope)
        key, owner = key_of_queue(task.lock_key_of()), new_owner()
        Runtime.of(app).store.acquire(LockRequest(key, owner, ttl=600.0, holder=Holder()))
        with pytest.raises(Interrupted) if scope == "until_executing" else nullcontext():
            deliver(task, carries={"queue": [task.name, key, owner, 600.0, 1, scope]})
        assert holds(app) == []

    @pytest.mark.parametrize("policy", ["retry", "skip"])
    def test_interruption_during_a_refusal(self, app: Celery, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
        task, runs = make(app, lambda: 1, acks_late=True, on_conflict=policy)
        other = Runtime.of(app).store.acquire(
            LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other"))
        )
        assert isinstance(other, Lease)
        with monkeypatch.context() as patched:
            patched.setattr("celery_singleton_lock.task.on_conflict.end", interrupts)
            with suppress(Interrupted, Ignore):
                deliver(task)
        Runtime.of(app).store.free(other)
        with pytest.raises((Interrupted, Ignore)):
            deliver(task)
        assert runs == []


def test_loss_of_another_lock_in_the_body_is_a_failure(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure is recorded with the release, so that a waiting copy finds it."""

    def lose_another() -> None:
        raise LockLost("inner", "deleted")

    task, runs = make(app, lose_another, acks_late=True)
    marks: list[object] = []
    release = Runtime.of(app).store.free

    def noted(lease: Lease, **options: Any) -> bool:
        marks.append(options["record"])
        return release(lease, **options)

    monkeypatch.setattr(Runtime.of(app).store, "free", noted)
    for _ in range(2):
        with pytest.raises(LockLost):
            deliver(task)
    assert len(runs) == 1
    assert marks[0] is not None


def test_failure_of_a_policy_does_not_overwrite_the_result_of_the_holder(app: Celery) -> None:
    """Both have the same id, and the holder stores the result."""

    def decide(task: Any, conflict: object) -> str:
        raise RuntimeError("a fault of the policy")

    task, runs = make(app, lambda: 1, on_conflict=decide)
    store = Runtime.of(app).store
    other = store.acquire(
        LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder(id_for(task), sending="another"))
    )
    assert isinstance(other, Lease)
    with pytest.raises(Ignore):
        deliver(task)
    assert task.backend.get_state(id_for(task)) == "PENDING"
    assert runs == []


def test_copy_stores_an_end_that_could_not_be_stored_before(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded by then. While the result backend is away, the message is put back, which settles nothing."""
    task, _ = make(app, lambda: 1, on_conflict="skip", acks_late=True)
    runtime, put_back = Runtime.of(app), []
    other = LockRequest(task.lock_key_of(), "o" * 32, ttl=60.0, holder=Holder("other"))
    assert isinstance(runtime.store.acquire(other), Lease)
    monkeypatch.setattr(requeue, "_send", lambda *message: put_back.append(message))

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        for asked in ("mark_as_failure", "get_state"):
            patch.setattr(task.backend, asked, away)
        _trace(task)
    assert len(put_back) == 1
    runtime.record_writer.write()
    _trace(task)
    assert app.AsyncResult(id_for(task)).state == "REVOKED"


@pytest.mark.parametrize("acks_late", [False, True])
def test_refusal_is_remembered_as_long_as_a_run(app: Celery, *, acks_late: bool) -> None:
    """A broker may also deliver again what it should know to be acknowledged: if the acknowledgement was lost."""
    task, runs = make(app, lambda: 1, on_conflict="skip", acks_late=acks_late)
    store, held = Runtime.of(app).store, hold(task)
    with pytest.raises(Ignore):
        deliver(task)
    store.free(held)
    task.push_request(id=id_for(task), retries=0)
    holder = holder_of(task, task.request)
    task.pop_request()
    found = store.acquire(LockRequest(task.lock_key_of(), "c" * 32, ttl=60.0, holder=holder, once=True))
    assert isinstance(found, Record)
    assert found.seconds == pytest.approx(Runtime.of(app).settings.done_ttl, abs=60.0)
    assert runs == []


def test_execution_that_waits_for_the_lock_server_asks_each_time_as_another(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server did not answer may still be under way: under that owner nothing may be taken any more."""
    monkeypatch.setattr(requeue, "try_to_put_back", lambda *_, **__: None)  # The broker does not answer, either.
    task, runs = make(app, lambda: 1)
    store, owners = Runtime.of(app).store, list[str]()
    acquire = store.acquire

    def answers_the_third(request: LockRequest) -> Any:
        owners.append(request.owner)
        assert request.owner not in request.given_up
        assert {*owners[:-1]} <= {*request.given_up}
        return acquire(request) if len(owners) == 3 else does_not_answer()

    monkeypatch.setattr(store, "acquire", answers_the_third)
    deliver(task)
    assert len({*owners}) == len(owners) == 3
    assert len(runs) == 1


def _trace(task: Any) -> None:
    """Carry out its message as a worker does."""
    request = {"id": id_for(task), "called_directly": False, "is_eager": False, "delivery_info": {}, "retries": 0}
    build_tracer(task.name, task, app=task.app)(id_for(task), (), {}, request)
