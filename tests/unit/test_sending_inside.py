"""As `test_sending`, where only a look at the inside shows it: whoever rewrites that brings these along."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery, group, states
from celery.app.task import Context
from celery.exceptions import Reject, Retry, WorkerLostError
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from celery_singleton_lock import (
    DuplicateResult,
    DuplicateTask,
    InvalidKey,
    InvalidOption,
    LockUnavailable,
    SingletonTask,
    in_bulk,
    lock_duplicate,
)
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.keys.key import key_of_queue
from celery_singleton_lock.options.rules import SCOPES, WHILE_EXECUTING
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task import header, outcome, queue_lock, sending
from celery_singleton_lock.task.execution import Execution
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.outcome import Outcome
from celery_singleton_lock.task.queue_lock import lock_in, lock_of
from celery_singleton_lock.task.running import progress_of
from tests.unit.deliveries import carried_out

QUEUED = tuple(scope for scope in SCOPES if scope != WHILE_EXECUTING)


class Sent:
    """An app, and the headers of the messages that it has sent."""

    def __init__(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        self.app = app
        self.headers: list[dict[str, Any]] = []
        self.fails_with: BaseException | None = None

        def send(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> AsyncResult:
            if self.fails_with is not None:
                raise self.fails_with
            self.headers.append(options.get("headers") or {})
            return AsyncResult(options.get("task_id") or "some id", backend=app.backend, app=app)

        monkeypatch.setattr(app, "send_task", send)

    def task(self, **options: Any) -> Any:
        options = {"lock_scope": "until_executed", "lock_queue_ttl": 100.0, **options}

        @self.app.task(base=SingletonTask, name="job", shared=False, **options)
        def job(number: int = 0) -> int:
            return number

        return job

    @property
    def store(self) -> Any:
        return Runtime.of(self.app).store

    def confirm(self) -> None:
        Runtime.of(self.app).confirmations.send_all()

    def lock(self, headers: dict[str, Any]) -> Any:
        """The lock that a message carries, whatever its id."""
        return lock_in(headers[HEADER], self.app, "job")

    def held(self, task: Any, *args: Any) -> list[Any]:
        return list(self.store.inspect(key_of_queue(task.lock_key_of(*args))).held)


@pytest.fixture
def sent(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(app, monkeypatch)


def test_worker_with_another_prefix_says_so_once(
    sent: Sent, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, the prefix may follow the result backend's, which a program that only sends may not have."""
    monkeypatch.setattr(queue_lock, "_reported", [])
    job = sent.task()
    job.delay(1)
    worker = Celery("worker", set_as_current=False, broker="memory://")
    worker.conf.update(singleton_lock_backend="memory://", singleton_lock_prefix="shop:singleton_lock")
    for _ in range(2):
        assert lock_in(sent.headers[0][HEADER], worker, "job") is None
    assert caplog.text.count("Set the same singleton_lock_prefix where tasks are sent and where they run") == 1
    assert key_of_queue(job.lock_key_of(1)) in caplog.text


class connected:
    def __init__(self, signal: Any, receiver: Callable[..., None]) -> None:
        self.signal, self.receiver = signal, receiver

    def __enter__(self) -> None:
        self.signal.connect(self.receiver, weak=False)

    def __exit__(self, *_: object) -> None:
        self.signal.disconnect(self.receiver)


class TestCanvas:
    """Something waits for each part, so it is sent nevertheless, and follows the message that has the lock."""

    def test_part_with_an_option_of_another_package_goes_on(self, sent: Sent, caplog: pytest.LogCaptureFixture) -> None:
        """It was sent before the package was replaced: an error would fail the step before it."""
        job = sent.task()
        request = Context(id="step", root_id="step", headers={}, delivery_info={})
        with carried_out(job, request):
            job.apply_async((1,), once={"graceful": True}, root_id="step", parent_id="step")
        assert len(sent.headers) == 1
        assert "'once', an option of celery-once" in caplog.text
        with pytest.raises(InvalidOption, match="celery-once"):
            job.apply_async((2,), once={"graceful": True})

    def test_message_does_not_follow_its_own_id(self, sent: Sent) -> None:
        job = sent.task()
        job.apply_async((1,), task_id="the id")
        job.apply_async((1,), task_id="the id", link=job.si(2))
        assert "queue" not in sent.headers[1][HEADER]

    def test_receivers_hear_of_followers(self, sent: Sent) -> None:
        job, heard = sent.task(), []

        def receive(policy: str, **_: Any) -> None:
            heard.append(policy)

        with connected(lock_duplicate, receive):
            first = job.delay(1)
            job.apply_async((1,), link=job.si(2))
        assert heard == ["follow"]
        assert first.id not in str(sent.headers[1]), "a search for the first message must not find it here"


class TestNothingIsSent:
    def test_process_that_dies_before_it_has_sent_blocks_others_for_half_a_minute_at_most(
        self, sent: Sent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = sent.task()
        monkeypatch.setattr(Runtime.of(sent.app).confirmations._later, "want", lambda: None)  # It died before that.
        job.delay(1)
        (held,) = sent.held(job, 1)
        assert held.remaining <= in_bulk.UNCONFIRMED_TTL
        sent.confirm()
        (held,) = sent.held(job, 1)
        assert 90 < held.remaining <= 100


class TestNextAttempt:
    """What Celery sends for a message that a worker carries out: an error would end the message."""

    @pytest.fixture
    def running(self, sent: Sent) -> Iterator[Callable[..., Any]]:
        with ExitStack() as stack:

            def run(job: Any, *args: Any, **options: Any) -> Any:
                """Carry out a message in this thread."""
                result = job.apply_async(args, **options)
                headers = sent.headers[-1] if sent.headers else {}
                request = Context(
                    id=result.id,
                    args=args,
                    kwargs={},
                    retries=0,
                    called_directly=False,
                    is_eager=False,
                    **headers,
                )
                stack.enter_context(carried_out(job, request))
                return request

            yield run

    def retry(self, job: Any, **options: Any) -> None:
        with pytest.raises(Retry):
            raise job.retry(countdown=10, **options)

    def test_retry_of_a_call_with_its_own_key_keeps_the_key(self, sent: Sent, running: Callable[..., Any]) -> None:
        job = sent.task()
        running(job, 1, singleton_lock={"key": "mine"})
        self.retry(job)
        first, second = (headers[HEADER]["queue"] for headers in sent.headers)
        assert first[1:3] == second[1:3]
        assert sent.held(job, 1) == []

    def test_retry_of_a_follower_does_not_follow(self, sent: Sent, running: Callable[..., Any]) -> None:
        """It has run with the lock; but a rebuilt copy (see `requeue`) still follows."""
        job = sent.task()
        job.delay(1)
        request = running(job, 1, link=job.si(2))
        follows = sent.lock(sent.headers[-1]).follows
        assert follows is not None
        job.signature_from_request(request, headers=request.headers, retries=0).apply_async()
        assert sent.lock(sent.headers[-1]).follows == follows
        self.retry(job)
        assert sent.lock(sent.headers[-1]).follows is None

    def test_retry_of_a_call_without_a_lock_has_no_lock(self, sent: Sent, running: Callable[..., Any]) -> None:
        sent.app.conf.singleton_lock_accept = "all"
        job = sent.task()
        running(job, 1, singleton_lock=False)
        self.retry(job)
        assert ["queue" in headers[HEADER] for headers in sent.headers] == [False, False]

    def test_retry_with_other_arguments_takes_another_lock(self, sent: Sent, running: Callable[..., Any]) -> None:
        job = sent.task()
        request = running(job, 1)
        self.retry(job, args=(2,))
        assert [len(sent.held(job, number)) for number in (1, 2)] == [1, 1]
        assert progress_of(request).passes_on is None

    def test_retry_with_the_arguments_of_another_message_has_no_lock(
        self, sent: Sent, running: Callable[..., Any]
    ) -> None:
        job = sent.task(on_duplicate="raise")
        job.delay(2)
        running(job, 1)
        self.retry(job, args=(2,))
        assert "queue" not in sent.headers[-1][HEADER]

    def test_retry_while_the_lock_server_is_silent_has_no_lock(
        self, sent: Sent, running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = sent.task(lock_scope="until_executing", on_send_unavailable="raise")
        request = running(job, 1)
        progress_of(request).is_begun = True
        silence(sent, monkeypatch)
        self.retry(job)
        assert "queue" not in sent.headers[-1][HEADER]

    def test_retry_without_a_key_has_no_lock(self, sent: Sent, running: Callable[..., Any]) -> None:
        job = sent.task()
        running(job, 1)
        self.retry(job, args=(object(),))
        assert "queue" not in sent.headers[-1][HEADER]

    def test_record_of_an_attempt_is_not_settled_if_the_next_one_has_its_lock(
        self, sent: Sent, running: Callable[..., Any]
    ) -> None:
        """A late copy that found a settled one would free that lock."""
        job = sent.task()
        request = running(job, 1)
        execution = Execution.of(job, job.lock_of(request, (1,), {}))
        before = execution.record(Outcome(states.RETRY))
        self.retry(job)
        after = execution.record(Outcome(states.RETRY))
        assert [it and outcome.read(it)[0].settled for it in (before, after)] == [True, False]
        # Also if it has sent its retry with throw=False, and returned.
        assert execution.record(Outcome(states.SUCCESS, b"value", settled=True)) == after

    def test_failed_retry_leaves_the_lock(self, sent: Sent, running: Callable[..., Any]) -> None:
        job = sent.task()
        request = running(job, 1)
        sent.fails_with = OperationalError("no broker")
        with pytest.raises(Reject):
            job.retry(countdown=10)
        assert progress_of(request).passes_on is None
        assert len(sent.held(job, 1)) == 1

    def test_retry_that_the_main_process_sends_keeps_the_lock(self, sent: Sent) -> None:
        job = sent.task(lock_scope="until_executing")
        result = job.delay(1)
        request = Context(id=result.id, args=(1,), kwargs={}, retries=0, **sent.headers[0])
        again = job.signature_from_request(request, retries=1).apply_async()
        assert not isinstance(again, DuplicateResult)
        assert sent.headers[1][HEADER]["queue"][:3] == sent.headers[0][HEADER]["queue"][:3]

    @pytest.mark.parametrize("is_held", [False, True])
    def test_retry_that_the_main_process_sends_has_a_lock_that_ended_as_the_body_began(
        self, sent: Sent, is_held: bool
    ) -> None:
        """The child has died in its body. If another message was sent meanwhile, that one has the lock."""
        job = sent.task(lock_scope="until_executing")
        result = job.delay(1)
        request = Context(id=result.id, args=(1,), kwargs={}, retries=0, **sent.headers[0])
        sent.store.free(sent.lock(sent.headers[0]).hold())
        if is_held:
            job.apply_async((1,), task_id="another")
        job.signature_from_request(request, retries=1).apply_async()
        assert [held.holder.task_id for held in sent.held(job, 1)] == ["another" if is_held else result.id]
        sent.confirm()
        assert all(held.remaining > 90 for held in sent.held(job, 1))

    def test_follower_that_the_main_process_sends_still_follows(self, sent: Sent) -> None:
        """Its child may have died as it looked for its leader."""
        job = sent.task()
        job.delay(1)
        result = job.apply_async((1,), link=job.si(2))
        request = Context(id=result.id, args=(1,), kwargs={}, retries=0, **sent.headers[-1])
        follows = sent.lock(sent.headers[-1]).follows
        assert follows is not None
        job.signature_from_request(request, retries=1).apply_async()
        assert sent.lock(sent.headers[-1]).follows == follows

    @pytest.mark.parametrize("scope", QUEUED)
    def test_copy_that_is_sent_before_its_body_has_begun_keeps_the_lock(
        self, sent: Sent, running: Callable[..., Any], scope: str
    ) -> None:
        """For example if a user's own request class keeps no message that could be put back."""
        job = sent.task(lock_scope=scope)
        request = running(job, 1)
        job.signature_from_request(request, retries=0).apply_async()
        assert sent.headers[1][HEADER]["queue"][:3] == sent.headers[0][HEADER]["queue"][:3]
        assert progress_of(request).passes_on is not None

    def test_step_of_a_chain_without_a_key_has_no_lock(self, sent: Sent, running: Callable[..., Any]) -> None:
        job = sent.task()
        request = running(job, 1)
        job.s().apply_async((object(),), parent_id=request.id, root_id=request.id)
        assert "queue" not in sent.headers[-1][HEADER]

    def test_message_that_a_body_sends_is_a_normal_call(
        self, sent: Sent, running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = sent.task(on_duplicate="raise", on_send_unavailable="raise")
        request = running(job, 1)
        progress_of(request).in_body = True
        with pytest.raises(DuplicateTask):
            job.apply_async((1,), headers=request.headers)
        with pytest.raises(InvalidKey):
            job.delay(object())
        silence(sent, monkeypatch)
        with pytest.raises(LockUnavailable):
            job.delay(2)


@pytest.mark.parametrize("is_part", [True, False])
def test_what_follows_from_a_task_whose_child_was_lost_is_sent_without_a_lock(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, is_part: bool
) -> None:
    """The worker's main process sends it. There is nobody to whom an error would be raised."""
    job = sent.task(on_send_unavailable="raise")
    silence(sent, monkeypatch)
    if is_part:
        request = Context(id="lost", errbacks=[job.si(1), job.si(object())], delivery_info={})
        sent.app.backend.mark_as_failure("lost", WorkerLostError(), request=request)
        assert ["queue" in headers[HEADER] for headers in sent.headers] == [False, False]
    else:
        with pytest.raises(LockUnavailable):
            group(job.si(1), job.si(2)).apply_async()


def silence(sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*_: object) -> None:
        raise LockUnavailable("redis://here", "gone")

    monkeypatch.setattr(sent.store, "acquire", acquire)


class TestHasEnded:
    """What the result backend must have for the lock of another message to be freed."""

    def test_id_of_a_tick_is_that_of_its_message_alone(self, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(outcome, "has_ended", lambda *_: True)
        job = sent.task(lock_scope="until_executing")
        tick = header.Made(id="tick", sent=new_owner(), due=1.0, entry="nightly")
        job.apply_async((1,), task_id="tick", headers={HEADER: tick})
        assert not isinstance(job.delay(1), DuplicateResult)

    @pytest.mark.parametrize("scope", QUEUED)
    @pytest.mark.parametrize("again", ["next attempt", "new message"])
    def test_message_that_a_body_sends_under_its_id_has_not_ended_with_it(
        self, sent: Sent, monkeypatch: pytest.MonkeyPatch, again: str, scope: str
    ) -> None:
        """Its body may return afterwards: `retry(throw=False)`, or a task that plans its next run."""
        monkeypatch.setattr(outcome, "has_ended", lambda *_: True)
        job = sent.task(lock_scope=scope)
        request = Context(id="an id", args=(1,), kwargs={}, retries=0, called_directly=False, is_eager=False)
        with carried_out(job, request):
            progress_of(request).in_body = progress_of(request).is_begun = True
            if again == "next attempt":
                job.retry(throw=False, countdown=10)
            else:
                job.apply_async((1,), task_id=request.id, countdown=10)
        assert isinstance(job.delay(1), DuplicateResult)

    def test_message_that_took_the_lock_meanwhile_keeps_it(self, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
        job = sent.task()
        job.delay(1)

        def another_comes(*_: object) -> bool:
            """The first message's lock is freed, and another one takes it, while the backend is asked."""
            (held,) = sent.held(job, 1)
            sent.store.free(held.hold(key_of_queue(job.lock_key_of(1)), ttl=60))
            monkeypatch.setattr(outcome, "has_ended", lambda *_: False)
            job.delay(1)
            return True

        monkeypatch.setattr(outcome, "has_ended", another_comes)
        assert isinstance(job.delay(1), DuplicateResult)
        assert len(sent.headers) == 2


class TestHowLong:
    """Seconds for which a waiting message keeps others from being sent."""

    def test_lock_outlasts_the_countdown(self, sent: Sent) -> None:
        job = sent.task(lock_queue_ttl=100)
        assert sending._seconds(job, options_of(job), {"countdown": 50}) == 150


def options_of(task: Any) -> Any:
    return task.lock_when_sent(None, (1,), {})[0]


class TestHeader:
    """A forged or copied header is ignored."""

    @pytest.fixture
    def header(self, sent: Sent) -> list[Any]:
        sent.task().apply_async((1,), task_id="the id")
        return list(sent.headers[0][HEADER]["queue"])

    def found(self, sent: Sent, header: object, task_id: str = "the id") -> object:
        return lock_of(sent.app.tasks["job"], Context({"id": task_id, HEADER: {"id": "the id", "queue": header}}))

    def test_valid_header_is_read(self, sent: Sent, header: list[Any]) -> None:
        assert self.found(sent, header) is not None
        assert self.found(sent, [*header, "of a later version"]) is not None

    def test_header_of_another_message_is_ignored(self, sent: Sent, header: list[Any]) -> None:
        assert self.found(sent, header, "another") is None

    @pytest.mark.parametrize("at", range(6))
    @pytest.mark.parametrize("value", [None, "x", -1, math.inf, [], {}, "0" * 32, 10**400])
    def test_forged_parts_are_ignored(self, sent: Sent, header: list[Any], at: int, value: object) -> None:
        header[at] = value
        found: Any = self.found(sent, header)
        assert found is None or (at, found.owner) == (2, "0" * 32) or at == 5

    @pytest.mark.parametrize("header", [None, "x", 7, {}, [1, 2]])
    def test_header_of_another_type_is_ignored(self, sent: Sent, header: object) -> None:
        sent.task()
        assert self.found(sent, header) is None
