"""A message that is put back is the same message, comes later each time, and is never lost."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from json import dumps
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Exchange, Queue, binding
from kombu.exceptions import EncodeError, OperationalError
from kombu.transport.virtual import Channel

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.testing import hold_lock
from tests.bench import Bench, Sent, raises
from tests.inside import at_question, line, silence
from tests.patience import sleepless

#: Values that no part of a header has.
NONSENSE = (None, True, "x", "\ud800", -1, 1.5, 10**400, [], {}, ["x"] * 6, {"retries": 0})


def refused(bench: Bench, message: Sent, **delivery: Any) -> Sent:
    """Deliver a message that meets a held lock; returns its copy."""
    with hold_lock(bench.app.tasks[message.headers["task"]]):
        assert bench.deliver(message, **delivery) == "PENDING"
    return bench.put_back()


class TestCopy:
    def test_what_belongs_to_one_delivery_stays_behind(self, bench: Bench) -> None:
        task = bench.task(on_conflict="retry")
        ours = {"queue": "celery_delayed_2", "reason": "expired", "count": 1}
        theirs = {"queue": "failed", "reason": "rejected", "count": 2}
        gone = {"CC": ["another queue"], "x-delivery-count": 1, "redelivered": True}
        gone |= {f"x-first-death-{name}": "celery_delayed_2" for name in ("queue", "reason", "exchange")}
        message = bench.send(task).but(**gone, **{"x-death": [ours, theirs], "x-last-death-queue": "failed"})
        of_sqs = {"MessageDeduplicationId": "x", "DelaySeconds": 3}
        copy = refused(bench, replace(message, properties={**message.properties, **of_sqs}))
        assert (copy.headers["x-death"], copy.headers["x-last-death-queue"]) == ([theirs], "failed")
        assert not {*gone} & {*copy.headers}
        assert not {*of_sqs} & {*copy.properties}

    @pytest.mark.parametrize("delayed", [False, True])
    def test_retry_of_its_task_goes_the_way_that_the_message_first_went(self, bench: Bench, delayed: bool) -> None:
        reports = Exchange("reports", type="topic")
        bench.app.conf.task_queues = [Queue(bench.app.main, bindings=[binding(reports, routing_key="report.#")])]
        task = bench.task(lambda: task.retry(countdown=0), on_conflict="retry")
        message = bench.send(task, exchange=reports, routing_key="report.daily")
        copy = refused(bench, refused(bench, message))
        assert copy.route != message.route
        if delayed:  # As it comes after RabbitMQ has kept it for Celery.
            copy = replace(
                copy, route={"exchange": "celery_delayed_delivery", "routing_key": "0." * 28 + "report.daily"}
            )
        bench.deliver(copy)
        assert bench.put_back().route == message.route == {"exchange": "reports", "routing_key": "report.daily"}

    @pytest.mark.parametrize(("expires", "kept"), [(None, "60000"), (100.0, None)])
    def test_broker_lets_it_expire_only_if_no_worker_would(
        self, bench: Bench, expires: float | None, kept: str | None
    ) -> None:
        message = bench.send(bench.task(on_conflict="retry"), expires=expires)
        copy = refused(bench, replace(message, properties={**message.properties, "expiration": "60000"}))
        assert copy.properties.get("expiration") == kept

    def test_message_of_protocol_1_that_another_program_sends_is_made_anew(self, bench: Bench) -> None:
        """It has its times in its body."""
        task = bench.task(on_conflict="retry")
        made: Any = bench.app.amqp.task_protocols[1]("the id", task.name)
        content = ("application/json", "utf-8")
        message = Sent("the id", dumps(made.body).encode(), made.headers, made.properties, content)
        with hold_lock(task):
            assert bench.deliver(message) == "PENDING"
        copy = bench.put_back()
        assert (copy.id, copy.headers["task"]) == ("the id", task.name)
        assert copy.headers["eta"] is not None
        assert bench.deliver(copy) == "ran"
        assert bench.runs == ["the id"]

    def test_sender_cannot_forge_what_is_put_back(self, bench: Bench) -> None:
        task = bench.task(on_conflict="retry")
        message = bench.send(task)
        forged = {**message.properties, "singleton_lock_original": ["body", "", "", {}, "", "", "elsewhere", True]}
        copy = refused(bench, Sent(message.id, message.body, message.headers, forged, message.content, message.route))
        assert copy.body == message.body


class TestDelay:
    def test_it_grows_up_to_its_bound(self, bench: Bench) -> None:
        message = bench.send(bench.task(on_conflict="retry"))
        delays = []
        for _ in range(10):
            message = refused(bench, message)
            delays.append(bench.seconds_until(message))
        assert delays[0] <= 1.0
        assert delays[6] > delays[0] * 4
        assert max(delays) <= 61.0

    def test_message_does_not_grow_with_each_try(self, bench: Bench) -> None:
        message, sizes = bench.send(bench.task()), list[int]()
        for _ in range(40):
            with at_question(bench.app, 1, raises(LockUnavailable("server", "silent")), "after"):
                bench.deliver(message)
            message = bench.put_back()
            sizes.append(len(str(message.headers)))
        assert sizes[-1] < sizes[19] + 20
        assert bench.deliver(message) == "ran"
        assert bench.runs == [message.id]


@pytest.mark.parametrize(
    "error", [OperationalError("x"), ValueError("x"), EncodeError("x"), OSError("x"), SoftTimeLimitExceeded()], ids=repr
)
def test_message_is_sent_again_after_any_error(bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    message, publish, tries = bench.send(bench.task(on_conflict="retry")), Channel.basic_publish, list[int]()

    def fail_twice(*args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) <= 2:
            raise error
        return publish(*args, **options)

    with monkeypatch.context() as broken:
        broken.setattr(Channel, "basic_publish", fail_twice)
        broken.setattr(clock, "sleep", sleepless())
        copy = refused(bench, message)
    assert len(tries) == 3
    assert bench.deliver(copy) == "ran"


class TestSilence:
    """The lock server answers nothing, and may have heard what it was asked."""

    @pytest.mark.parametrize(("policy", "end"), [("raise", "LockUnavailable"), ("run", "ran")])
    def test_task_may_say_what_to_do(self, bench: Bench, policy: str, end: str) -> None:
        message = bench.send(bench.task(on_unavailable=policy))
        with silence(bench.app, heard=0):
            bench.deliver(message)
        assert end in repr(bench.end(message))


class TestInLine:
    """The worker's main process holds it until its lock is free; each look of its own would take a slot."""

    def copy(self, bench: Bench, **options: Any) -> Sent:
        return refused(bench, bench.send(bench.task(on_conflict="retry"), **options))

    @pytest.mark.parametrize(("timeout", "longest"), [(3600, 60.0), (60, 30.0)])
    @pytest.mark.parametrize("wakes", [True, False])
    def test_it_is_held_for_a_minute_if_it_will_be_woken(
        self, bench: Bench, wakes: bool, timeout: int, longest: float
    ) -> None:
        """But no longer than the broker waits."""
        bench.app.conf.broker_transport_options = {"visibility_timeout": timeout}
        copy = self.copy(bench)
        with line(bench.app, wakes=wakes):
            assert bench.deliver(copy) == "ran"
        assert bench.held == [pytest.approx(longest if wakes else bench.seconds_until(copy), abs=1.0)]

    @pytest.mark.parametrize("wakes", [True, False])
    def test_it_ends_when_it_expires(self, bench: Bench, wakes: bool) -> None:
        copy = self.copy(bench, expires=5.0).but(eta="2100-01-01T00:00:00+00:00")
        with line(bench.app, wakes=wakes):
            bench.deliver(copy)
        assert bench.held == [pytest.approx(5.0, abs=1.0)]

    @pytest.mark.parametrize("year", ["0001", "9999"])
    @pytest.mark.parametrize("expires", [None, "0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59.999999+00:00"])
    def test_extreme_times_harm_nobody(self, bench: Bench, year: str, expires: str | None) -> None:
        copy = self.copy(bench).but(eta=f"{year}-12-31T23:59:59.999999+00:00", expires=expires)
        with line(bench.app, wakes=False):
            assert bench.deliver(copy) in ("ran", "REVOKED")

    @pytest.mark.parametrize("waits", [None, "a", ["a"], ["{}:wake", 1], ["other:1:{{x}}", 1], ["{}", 0]])
    def test_no_foreign_lock_is_waited_for(self, bench: Bench, waits: Any) -> None:
        """The process would take elements from foreign lists."""
        copy = self.copy(bench)
        header = deepcopy(copy.headers["singleton_lock"])
        ((path, (key, _)),) = [(path, part) for path, part in parts_of(header) if path[-1] == "waits"]
        header[path[0]][path[1]] = [waits[0].format(key), *waits[1:]] if isinstance(waits, list) else waits
        with line(bench.app) as keys:
            bench.deliver(copy.but(singleton_lock=header))
            assert keys == []
            bench.deliver(copy)
        assert keys == [key]


def parts_of(header: Any, path: tuple[Any, ...] = ()) -> Any:
    """The path of each part of a header, and of its parts; and the part."""
    items = header.items() if isinstance(header, dict) else enumerate(header) if isinstance(header, list) else ()
    for name, part in items:
        yield (*path, name), part
        yield from parts_of(part, (*path, name))
