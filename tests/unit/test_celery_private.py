"""Private or undocumented parts of Celery and its libraries, and what we assume about them.

A new version that changes one of these parts fails here, and each test says which promise would be broken; what a part
means is in `celery_singleton_lock/_celery.py`, and what depends on it in `private_parts.py`.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import celery
import click
import pytest
from celery import Celery, _state, bootsteps
from celery.app.task import Context
from celery.beat import ScheduleEntry, Scheduler
from celery.signals import user_preload_options
from celery.utils import timer2, uuid
from celery.worker import state
from celery.worker.request import Request
from kombu import Connection, Exchange, Queue
from kombu.asynchronous.timer import Timer
from kombu.message import Message
from pydantic import BaseModel
from redis import Sentinel
from redis.cluster import ClusterNode, NodesManager
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from celery_singleton_lock import _celery
from celery_singleton_lock._celery import WorkerRequest
from celery_singleton_lock.stores.redis import _redis_py
from celery_singleton_lock.stores.redis.connection import Parser
from tests.unit import private_parts

#: Celery's major and minor version.
VERSION = tuple(map(int, celery.__version__.split(".")[:2]))

#: Parts that older versions do not have, and the first versions that have them.
SINCE = {
    "celery.worker.request.Request._retry_worker_lost": (5, 7),
    "celery.worker.request.Request._success_was_stored": (5, 7),
    "celery.Task._dump_pydantic_arguments": (5, 7),
    "kombu.transport.native_delayed_delivery.bind_queue_to_native_delayed_delivery_exchange": (5, 5),
    "kombu.transport.native_delayed_delivery.calculate_routing_key": (5, 5),
    "kombu.transport.native_delayed_delivery.level_name": (5, 5),
    "kombu.transport.native_delayed_delivery.MAX_LEVEL": (5, 5),
    "kombu.transport.native_delayed_delivery.MAX_NUMBER_OF_BITS_TO_USE": (5, 5),
}


#: The attributes of Celery's classes that the package uses, and mypy does not know.
HAS: dict[type, tuple[str, ...]] = {
    Request: (
        *("id", "app", "task", "args", "kwargs", "acknowledged", "time_start", "hostname", "worker_pid", "eta"),
        *("delivery_info", "request_dict", "_context", "_already_cancelled", "_already_revoked"),
    ),
    ScheduleEntry: ("name", "options", "last_run_at"),
    Scheduler: ("schedule", "max_interval", "producer", "info", "_heap"),
}

#: Methods of theirs that the package calls or extends, and their first arguments.
TAKES: dict[Callable[..., Any], list[str]] = {
    Request.__init__: ["self", "message"],
    Request.on_accepted: ["self", "pid", "time_accepted"],
    Request.on_timeout: ["self", "soft", "timeout"],
    Request.on_failure: ["self", "exc_info", "send_failed_event", "return_ok"],
    Request.reject: ["self", "requeue"],
    Request.info: ["self", "safe"],
    Request.send_event: ["self", "type"],
    Scheduler.__init__: ["self", "app"],
    Scheduler.apply_entry: ["self", "entry", "producer"],
    Scheduler.apply_async: ["self", "entry", "producer", "advance"],
    Scheduler._when: ["self", "entry", "next_time_to_run"],
    Scheduler.is_due: ["self", "entry"],
    Scheduler.reserve: ["self", "entry"],
}


class Order(BaseModel):
    id: int


@pytest.fixture
def app() -> Celery:
    return Celery("inside", broker="memory://", set_as_current=False)


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(shared=False, name="inside.job")
    def job() -> None: ...

    return job


@pytest.fixture
def request_of(app: Celery, task: Any) -> WorkerRequest:
    headers = {"id": "an-id", "task": task.name, "retries": 0}
    message = Message(body=[[], {}, {}], headers=headers, content_type="application/json", content_encoding="utf-8")
    return WorkerRequest(message, app=app, task=task, decoded=True, hostname="worker@host")


@pytest.fixture
def scheduler(app: Celery) -> Scheduler:
    app.conf.beat_schedule = {name: {"task": name, "schedule": timedelta(days=1)} for name in ("first", "second")}
    app.conf.result_expires = None
    scheduler = Scheduler(app)
    scheduler.populate_heap()
    return scheduler


TOUCHED = [
    pytest.param(name, part.promise, id=f"{ours}-{name}")
    for ours, part in private_parts.PARTS.items()
    for name in part.touches
]


@pytest.mark.parametrize(("name", "promise"), TOUCHED)
def test_private_part_exists(name: str, promise: str) -> None:
    if SINCE.get(name, (0, 0)) > VERSION:
        pytest.skip(f"since Celery {SINCE[name]}")
    owner, _, attribute = name.rpartition(".")
    assert is_there(resolved(owner), attribute), f"{name} is gone; what depends on it: {promise}"


def resolved(name: str) -> Any:
    """The module, class or function of a dotted name."""
    with suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    owner, _, attribute = name.rpartition(".")
    return getattr(resolved(owner), attribute)


def is_there(owner: Any, name: str) -> bool:
    """Whether it has this attribute, or its instances get one."""
    if hasattr(owner, name):
        return True
    return inspect.isclass(owner) and any(f"self.{name} = " in inspect.getsource(cls) for cls in owner.__mro__[:-1])


def test_all_that_touches_private_parts_is_listed() -> None:
    assert {name for room in private_parts.ROOMS for name in private_parts.own(room)} == {*private_parts.PARTS}


class TestClasses:
    """Celery's classes have what the package takes for granted."""

    @pytest.mark.parametrize("method", TAKES)
    def test_methods_take_these_arguments_first(self, method: Callable[..., Any]) -> None:
        assert list(inspect.signature(method).parameters)[: len(TAKES[method])] == TAKES[method]

    def test_attributes_exist(self, request_of: WorkerRequest, scheduler: Scheduler) -> None:
        made = {Request: request_of, Scheduler: scheduler, ScheduleEntry: scheduler.schedule["first"]}
        assert [(cls, name) for cls, names in HAS.items() for name in names if not hasattr(made[cls], name)] == []


class TestRequest:
    def test_active_requests_are_listed_while_a_thread_begins_with_another(
        self, request_of: WorkerRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise a worker with a pool of threads ends when a message that it has got is revoked."""

        class Busy(WeakSet[Any]):
            begins = True

            def __iter__(self) -> Iterator[Any]:
                for request in super().__iter__():
                    if self.begins:
                        self.begins = False
                        self.add(another)
                    yield request

        another = Context()
        monkeypatch.setattr(state, "active_requests", Busy([request_of]))
        assert {*map(id, _celery.active_requests())} == {id(request_of), id(another)}


def gevent_timer() -> Any:
    return importlib.import_module("celery.concurrency.gevent").Timer()


def consumer_with(timer: Any, state: int = bootsteps.RUN) -> Any:  # type: ignore[attr-defined]
    return SimpleNamespace(timer=timer, blueprint=SimpleNamespace(state=state))


class TestTimer:
    """A copy that waits for a lock is begun when the lock is free, by the call that its timer would have made."""

    @pytest.mark.parametrize("make", [Timer, gevent_timer])
    @pytest.mark.parametrize("limited", [False, True])
    def test_request_is_begun_once(self, request_of: WorkerRequest, make: Callable[[], Any], limited: bool) -> None:
        timer, begun = make(), []
        consumer = consumer_with(timer)
        assert not _celery.begin_now(consumer, request_of)
        # As `celery.worker.strategy` does it; with a rate limit there are more arguments.
        arguments = (request_of, "bucket", 1) if limited else (request_of,)
        timer.call_at(time.monotonic() + 0.05, lambda *given: begun.append(given), arguments, priority=6)
        timer.call_at(time.monotonic() + 300, lambda *given: begun.append(given), (object(),), priority=6)
        assert _celery.begin_now(consumer, request_of)
        assert begun == [arguments]
        assert not _celery.begin_now(consumer, request_of)
        if isinstance(timer, Timer) and type(timer) is Timer:
            waits, entry = next(iter(timer))
            assert (waits or 0) > 100 or entry is None
        else:
            importlib.import_module("gevent").sleep(0.1)
        assert begun == [arguments]
        timer.clear()

    @pytest.mark.parametrize("has_slot", [True, False])
    def test_request_that_the_timer_has_begun_is_not_begun_again(
        self, request_of: WorkerRequest, has_slot: bool
    ) -> None:
        """A greenlet has begun it, and may wait for a slot; the timer still has the entry for a moment."""
        gevent, events = importlib.import_module("gevent"), importlib.import_module("gevent.event")
        timer, slot, has_come, begun = gevent_timer(), events.Event(), events.Event(), []

        def begin(request: object) -> None:
            has_come.set()
            slot.wait()
            begun.append(request)

        if has_slot:
            slot.set()
        timer.call_at(time.monotonic(), begin, (request_of,), priority=6)
        has_come.wait()
        assert timer.queue, "the timer still has the entry"
        assert not _celery.begin_now(consumer_with(timer), request_of)
        slot.set()
        gevent.sleep(0.01)
        assert begun == [request_of]
        timer.clear()

    def test_timer_forgets_requests_that_were_begun(self) -> None:
        """Otherwise it keeps every copy of the last minute, and looks at them all for the next one."""
        timer, requests = Timer(), [SimpleNamespace() for _ in range(9)]
        for request in requests:
            timer.call_at(time.monotonic() + 300 - len(timer), id, (request,), priority=6)
        for request in requests[::2]:
            assert _celery.begin_now(consumer_with(timer), request)  # type: ignore[arg-type]
        assert [waiting.entry.args[0] for waiting in timer.queue] == requests[7::-2]

    def test_request_that_was_cancelled_when_the_broker_was_lost_is_not_begun(self, request_of: WorkerRequest) -> None:
        timer = Timer()
        entry = timer.call_at(time.monotonic() + 300, pytest.fail, (request_of,), priority=6)
        timer.cancel(entry)
        assert not _celery.begin_now(consumer_with(timer), request_of)

    def test_stopping_worker_begins_nothing(self, request_of: WorkerRequest) -> None:
        timer = Timer()
        timer.call_at(time.monotonic() + 300, pytest.fail, (request_of,), priority=6)
        assert not _celery.begin_now(consumer_with(timer, bootsteps.CLOSE), request_of)  # type: ignore[attr-defined]

    def test_timer_of_a_thread_is_left_alone(self, request_of: WorkerRequest) -> None:
        """It might begin the same request at the same time."""
        timer = timer2.Timer()
        timer.schedule.call_at(time.monotonic() + 300, pytest.fail, (request_of,), priority=6)
        assert not _celery.begin_now(consumer_with(timer), request_of)


class TestApps:
    def test_apps_made_before_and_after_are_extended(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Celery, "builtin_fixups", set(Celery.builtin_fixups))
        extended.clear()
        _celery.extend_every_app(extend)
        assert app in extended
        later = Celery("later", set_as_current=False)
        assert later in extended

    def test_default_app_of_celery_is_recognized(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise Django's checks look at an app that nobody has made, and find no Redis broker there."""
        assert not _celery.is_stand_in(app)
        monkeypatch.setattr(_state, "default_app", None)
        monkeypatch.setattr(_state, "_tls", SimpleNamespace(current_app=None))
        assert _celery.is_stand_in(_state._get_current_app())


extended: list[Celery] = []


def extend(app: Celery) -> None:
    extended.append(app)


class TestTask:
    def test_models_are_sent_as_dictionaries(self, app: Celery) -> None:
        @app.task(shared=False, name="inside.models", pydantic=True)
        def models(order: Order) -> None: ...

        (order,), kwargs = _celery.with_dumped_models(models, (Order(id=7),), {})
        assert order == ({"id": 7} if VERSION >= (5, 7) else Order(id=7))
        assert kwargs == {}

    def test_worker_task_is_the_innermost_that_nobody_called_directly(self, app: Celery, task: Any) -> None:
        found: list[Any] = []

        @app.task(shared=False, name="inside.outer", bind=True)
        def outer(self: Any) -> None:
            _celery.push_task(task, Context(id="inner", is_eager=True))
            found.append((_celery.current_task().name, _celery.current_worker_task().name))
            _celery.pop_task(task)

        outer.apply()
        assert found == [(task.name, "inside.outer")]


class TestMessages:
    def test_queues_that_an_exchange_routes_to_are_known(self) -> None:
        with Connection("memory://") as connection:
            channel = connection.default_channel
            Queue("reached", routing_key="a-key")(channel).declare()
            assert "reached" in _celery.queues_reached(channel, "", "reached")

    def test_consumed_queues_are_those_that_were_chosen(self, app: Celery) -> None:
        """Otherwise a message that is put back goes to a queue that this worker does not read."""
        app.conf.task_queues = [Queue("one"), Queue("two", Exchange("all", type="fanout"))]
        assert set(_celery.consumed_queues(app)) == {"one", "two"}
        assert _celery.consumed_queues(app)["two"].exchange.type == "fanout"
        app.amqp.queues.select(["one"])
        assert set(_celery.consumed_queues(app)) == {"one"}
        app.amqp.queues.select_add("three")
        assert set(_celery.consumed_queues(app)) == {"one", "three"}
        app.amqp.queues.deselect(["one"])
        assert set(_celery.consumed_queues(app)) == {"three"}

    @pytest.mark.skipif(VERSION < (5, 5), reason="older versions have RabbitMQ keep nothing")
    def test_delayed_message_has_its_delay_before_its_routing_key(self) -> None:
        way = _celery.delayed_way(5, "a.b")
        assert way == ("celery_delayed_27", "0." * 25 + "1.0.1.a.b")
        assert way[0].startswith(_celery.DELAYED)
        assert _celery.without_delay(way[1]) == "a.b"
        assert _celery.delayed_way(5, way[1]) == way
        assert _celery.without_delay("0.1.a") == "0.1.a"


def test_command_announces_the_options_of_the_app(app: Celery) -> None:
    """`celery locks` is started with them like Celery's own commands."""
    announced: list[Any] = []

    def announce(app: Celery, options: Any, **_: Any) -> None:
        announced.append((app, options))

    def command(ctx: Any, as_json: bool, **_: Any) -> Any:
        """What it is for."""
        return ctx, as_json

    app.user_options["preload"].add(click.Option(["--tenant"]))
    ctx = SimpleNamespace(obj=SimpleNamespace(app=app))
    user_preload_options.connect(announce)
    try:
        made = _celery.with_preload_options(command)
        assert made(ctx, as_json=True, tenant="one") == (ctx, True)
    finally:
        user_preload_options.disconnect(announce)
    assert announced == [(app, {"tenant": "one"})]
    assert (made.__name__, made.__doc__) == ("command", "What it is for.")


class TestWorkers:
    @pytest.mark.parametrize(("state", "call_errbacks"), [("REVOKED", False), ("FAILURE", True)])
    def test_end_is_recorded_for_the_chain_the_chord_and_the_errbacks(
        self, state: str, call_errbacks: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise whoever waits for an execution that a held lock has ended waits forever."""
        backend: Any = Celery(set_as_current=False, backend="cache+memory://").backend
        told: list[tuple[Any, ...]] = []
        monkeypatch.setattr(backend, "on_chord_part_return", lambda request, *its: told.append(("chord", *its)))
        monkeypatch.setattr(backend, "_call_task_errbacks", lambda *_: told.append(("errbacks",)))
        task_id, later_id = uuid(), uuid()  # This backend is common to all apps.
        later = {"task": "later", "options": {"task_id": later_id}}
        request = Context(id=task_id, chord={"task": "body"}, chain=[later], errbacks=[later])
        error = ValueError("locked")
        _celery.record_end(
            backend, task_id, error, request, state=state, store_result=True, call_errbacks=call_errbacks
        )
        assert [backend.get_state(its) for its in (task_id, later_id)] == [state, state]
        assert told == [("chord", state, error), *[("errbacks",)] * call_errbacks]

    def test_end_that_nobody_asks_for_is_not_stored(self) -> None:
        backend: Any = Celery(set_as_current=False, backend="cache+memory://").backend
        task_id = uuid()
        _celery.record_end(
            backend,
            task_id,
            ValueError("locked"),
            Context(id=task_id),
            state="REVOKED",
            store_result=False,
            call_errbacks=False,
        )
        assert backend.get_state(task_id) == "PENDING"

    @pytest.mark.parametrize(("url", "once"), [("redis://", True), ("cache+memory://", False), ("disabled://", False)])
    def test_parts_of_a_chord_are_counted_once_on_redis(self, url: str, once: bool) -> None:
        app = Celery(set_as_current=False, backend=url)
        assert _celery.counts_part_once(app.backend) is once

    def test_parts_may_be_counted_twice_if_serialization_is_not_deterministic(self) -> None:
        app = Celery(set_as_current=False, backend="redis://")
        app.conf.result_serializer = "pickle"
        assert _celery.counts_part_once(app.backend) is False


class TestScheduler:
    @pytest.mark.parametrize("method", [Scheduler.tick, Scheduler.populate_heap])
    def test_tick_calls_the_methods_that_we_replace(self, method: Callable[..., Any]) -> None:
        """If a tick worked differently, it would send unclaimed entries, and two beats would send them twice."""
        used = set(method.__code__.co_names)
        assert {"_heap", "_when"} <= used
        if method is Scheduler.tick:
            assert {"is_due", "reserve", "apply_entry", "populate_heap", "producer"} <= used
            assert {"schedules_equal", "old_schedulers", "schedule"} <= used


class TestErrors:
    """A server's error is raised as the exception of redis-py that says what to do about it."""

    @pytest.mark.parametrize(
        ("text", "kind", "said"),
        [
            ("NOSCRIPT No matching script.", NoScriptError, "No matching script."),
            ("NOPERM this user has no permissions", NoPermissionError, "this user has no permissions"),
            ("READONLY You can't write", ReadOnlyError, "You can't write"),
            ("TRYAGAIN Multiple keys", TryAgainError, "Multiple keys"),
            ("CLUSTERDOWN Hash slot not served", ClusterDownError, "Hash slot not served"),
            ("MOVED nowhere", ResponseError, "MOVED nowhere"),
            ("WRONGTYPE Operation against a key", ResponseError, "WRONGTYPE Operation against a key"),
        ],
    )
    def test_error_is_known_by_its_code(self, text: str, kind: type[Exception], said: str) -> None:
        error = Parser.parse_error(text)
        assert type(error) is kind
        assert said in str(error)

    @pytest.mark.parametrize(("code", "kind"), [("MOVED", MovedError), ("ASK", AskError)])
    def test_redirection_says_where_to(self, code: str, kind: type[Exception]) -> None:
        error: Any = Parser.parse_error(f"{code} 866 127.0.0.1:7002")
        assert isinstance(error, kind)
        assert (error.slot_id, error.host, error.port) == (866, "127.0.0.1", 7002)


class TestClients:
    """The locks of a client share connections."""

    def test_nodes_and_options_of_a_cluster_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(NodesManager, "initialize", lambda *_, **__: None)  # It would look for the nodes.
        nodes = NodesManager([ClusterNode("127.0.0.1", 7000), ClusterNode("127.0.0.1", 7001)], password="x")
        cluster: Any = SimpleNamespace(nodes_manager=nodes, user_on_connect_func=None)
        start, options = _redis_py.nodes_of(cluster)
        assert sorted(start) == [("127.0.0.1", 7000), ("127.0.0.1", 7001)]
        assert options["password"] == "x"

    def test_sentinels_of_a_pool_are_found(self) -> None:
        pool = Sentinel([("127.0.0.1", 26379), ("127.0.0.1", 26380)]).master_for("mymaster").connection_pool
        ports = [sentinel.connection_pool.connection_kwargs["port"] for sentinel in _redis_py.sentinels_of(pool)]
        assert ports == [26379, 26380]
