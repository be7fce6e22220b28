"""Private or undocumented parts of Celery and its libraries, and what we assume about them.

A new version that changes one of these parts fails here, and each test says which promise would be broken; what a part
means is in `celery_singleton_lock/_celery.py`, and what depends on it in `private_parts.py`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import celery
import click
import pytest
from billiard import reduction
from billiard.process import current_process
from celery import Celery, _state, bootsteps
from celery.app import trace
from celery.app.control import Control, Inspect
from celery.app.task import Context
from celery.beat import ScheduleEntry, Scheduler, Service, event_t
from celery.concurrency import get_implementation
from celery.exceptions import Ignore, Reject
from celery.signals import user_preload_options
from celery.utils import timer2, uuid
from celery.worker import control, state, strategy
from celery.worker.request import Request
from kombu import Connection, Consumer, Exchange, Queue
from kombu.asynchronous.timer import Timer
from kombu.message import Message
from kombu.transport import virtual
from kombu.utils import functional
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
from celery_singleton_lock._celery import WorkerRequest, reported
from celery_singleton_lock.diagnosis import peers
from celery_singleton_lock.stores.redis import _redis_py
from celery_singleton_lock.stores.redis.connection import Parser
from celery_singleton_lock.worker import remote_control
from tests.unit import private_parts

PACKAGE = Path(_celery.__file__).parent
ROOMS = {Path(room.__file__ or "") for room in private_parts.ROOMS}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path not in ROOMS)

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

#: Undocumented modules that only `_celery` and its like import.
INSIDE = (
    "billiard",
    "celery._state",
    "celery.app.defaults",
    "celery.worker.state",
    "celery.worker.request",
    "kombu.utils.functional",
)

#: Names of these libraries that other modules import: whole modules, and single names. A further one belongs here if it
#: is documented, and otherwise in `_celery` or its like.
LIBRARIES = ("amqp", "billiard", "celery", "kombu", "redis")
IMPORTED = (
    "amqp",
    "celery.Celery",
    "celery.Task",
    "celery.app.app_or_default",
    "celery.app.control",
    "celery.app.task.Context",
    "celery.beat",
    "celery.bin.base.CeleryCommand",
    "celery.bin.base.CeleryOption",
    "celery.bootsteps",
    "celery.contrib.django.task.DjangoTask",
    "celery.exceptions",
    "celery.result",
    "celery.schedules",
    "celery.signals",
    "celery.states",
    "celery.utils.dispatch.Signal",
    "celery.utils.imports.qualname",
    "celery.utils.imports.symbol_by_name",
    "celery.utils.log.get_logger",
    "celery.utils.time",
    "celery.utils.uuid",
    "celery.uuid",
    "celery.worker.control",
    "kombu.compression.compress",
    "kombu.exceptions",
    "kombu.serialization",
    "kombu.utils.json",
    "redis.Redis",
    "redis.backoff",
    "redis.cluster.RedisCluster",
    "redis.connection.Connection",
    "redis.connection.ConnectionPool",
    "redis.connection.DefaultParser",
    "redis.connection.parse_url",
    "redis.crc.key_slot",
    "redis.exceptions",
    "redis.retry",
    "redis.sentinel",
)


#: Private names that are documented, and therefore as good as public.
DOCUMENTED = {
    "_exit": "of Python's os",
    "_field_defaults": "a named tuple's",
    "_fields": "a named tuple's",
    "_replace": "a named tuple's",
    "_base_manager": "of a model of Django's",
    "_meta": "of a model of Django's",
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


@pytest.mark.xdist_group("sources")  # In one process, which reads each module once.
class TestOtherModulesUseNoPrivateParts:
    @pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
    def test_module_uses_only_its_own_private_names(self, path: Path) -> None:
        source = Source.of(path)
        # A class may use private names of the module that defines its base, if that is in this package.
        bases = (PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in source.imports)
        ours = {path, *bases} & set(MODULES)
        own = {name for one in ours for name in Source.of(one).own_names}
        foreign = {
            f"line {line}: {name}"
            for line, name in source.used
            if is_private(name) and name not in own and name not in DOCUMENTED
        }
        assert not foreign, "give it a name in _celery.py that says what it means, and the promise that depends on it"

    @pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
    def test_module_imports_nothing_undocumented(self, path: Path) -> None:
        found = {name for name in Source.of(path).imports if f"{name}.".startswith(tuple(INSIDE_PREFIXES))}
        assert not found

    def test_modules_import_what_is_listed(self) -> None:
        found = {name for path in MODULES for name in Source.of(path).imported_names}
        unknown = {name for name in found if not f"{name}.".startswith(tuple(f"{known}." for known in IMPORTED))}
        assert unknown == set(), "list it if it is documented; give it a name in _celery.py otherwise"

    def test_this_check_finds_private_names(self) -> None:
        tree = ast.parse("from celery import _state\nclass A(B):\n  def f(self): return self._heap, getattr(b, '_x')")
        assert {name for _, name in names_used(nodes(tree))} == {"_heap", "_x"}
        assert set(own_names(nodes(tree))) == {"A", "f"}
        assert set(imports(nodes(tree))) == {"celery", "celery._state"}


INSIDE_PREFIXES = [f"{name}." for name in INSIDE]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


Nodes = tuple[ast.AST, ...]


def nodes(tree: ast.AST) -> Nodes:
    return tuple(ast.walk(tree))


class Source(NamedTuple):
    """What is in a module; see the functions of these names."""

    used: frozenset[tuple[int, str]]
    own_names: frozenset[str]
    imports: frozenset[str]
    imported_names: frozenset[str]

    @staticmethod
    @cache
    def of(path: Path) -> Source:
        found = nodes(ast.parse(path.read_text()))
        looks = (names_used, own_names, imports, imported_names)
        return Source(*(frozenset(look(found)) for look in looks))


def names_used(found: Nodes) -> Iterator[tuple[int, str]]:
    """Attributes that are read, directly or by a string."""
    for node in found:
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            yield from ((node.lineno, str(name.value)) for name in node.args[1:2] if isinstance(name, ast.Constant))


def own_names(found: Nodes) -> Iterator[str]:
    """The names that a module defines: functions, classes, fields, slots, and attributes assigned to `self`."""
    for node in found:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def imports(found: Nodes) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_names(found: Nodes) -> Iterator[str]:
    """What a module imports of other libraries, each name with its module."""
    for node in found:
        if isinstance(node, ast.ImportFrom) and is_of_library(node.module or ""):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if "." in alias.name and is_of_library(alias.name))


def is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


class TestClasses:
    """Celery's classes have what the package takes for granted."""

    @pytest.mark.parametrize("method", TAKES)
    def test_methods_take_these_arguments_first(self, method: Callable[..., Any]) -> None:
        assert list(inspect.signature(method).parameters)[: len(TAKES[method])] == TAKES[method]

    def test_attributes_exist(self, request_of: WorkerRequest, scheduler: Scheduler) -> None:
        made = {Request: request_of, Scheduler: scheduler, ScheduleEntry: scheduler.schedule["first"]}
        assert [(cls, name) for cls, names in HAS.items() for name in names if not hasattr(made[cls], name)] == []


class TestRequest:
    @pytest.mark.skipif(VERSION < (5, 7), reason="older versions do not send it again")
    def test_message_that_celery_sends_again_is_noticed(
        self, request_of: WorkerRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise it is recorded as failed, and the retry is dropped as its copy."""
        noticed: list[bool] = []
        monkeypatch.setattr(WorkerRequest, "on_sent_again", lambda self: noticed.append(True))
        assert list(inspect.signature(Request._retry_worker_lost).parameters) == ["self", "exc", "exc_info"]
        assert "_retry_worker_lost" in Request.on_failure.__code__.co_names
        for answer, expected in ((False, []), (True, [True])):
            monkeypatch.setattr(Request, "_retry_worker_lost", lambda self, exc, exc_info, answer=answer: answer)
            assert request_of._retry_worker_lost(RuntimeError(), None) is answer
            assert noticed == expected

    @pytest.mark.skipif(VERSION < (5, 7), reason="older versions consider each lost child a failure")
    def test_result_that_a_lost_child_had_stored_is_noticed(
        self, request_of: WorkerRequest, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise a chord waits forever for a part that was not counted."""
        assert "_success_was_stored" in Request.on_failure.__code__.co_names
        for answer in (False, {"status": "SUCCESS"}):
            monkeypatch.setattr(Request, "_success_was_stored", lambda self, answer=answer: answer)
            assert request_of.success_was_stored is bool(answer)

    def test_child_gives_its_message_back_by_rejecting_it(self) -> None:
        exception = reported(Reject("why", requeue=True)).exception
        assert isinstance(getattr(exception, "exc", exception), Reject)
        assert getattr(exception, "exc", exception).requeue

    def test_cancelled_request_is_known(self, request_of: WorkerRequest) -> None:
        """Otherwise it is recorded as revoked, and its next delivery is dropped."""
        assert request_of.was_cancelled is False
        assert "_already_cancelled" in Request.on_failure.__code__.co_names
        request_of._announce_cancelled()  # type: ignore[attr-defined]
        assert request_of.was_cancelled is True

    def test_context_is_the_request_of_the_task(self, request_of: WorkerRequest) -> None:
        assert isinstance(request_of.context, Context)
        assert request_of.context.id == "an-id"
        assert request_of.context.delivery_info is request_of.delivery_info

    def test_child_gets_the_request_dict(self, request_of: WorkerRequest) -> None:
        """It carries the original of the message and the owner of its lock."""
        assert "_request_dict" in Request.execute_using_pool.__code__.co_names
        assert request_of.request_dict["delivery_info"] is request_of.delivery_info

    def test_request_is_active_from_its_start_to_its_end(self, request_of: WorkerRequest) -> None:
        assert not _celery.is_active(request_of)
        state.task_reserved(request_of)
        state.task_accepted(request_of)
        assert _celery.is_active(request_of)
        assert request_of in _celery.active_requests()
        state.task_ready(request_of)
        assert not _celery.is_active(request_of)

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

    def test_celery_looks_for_a_request_by_its_id_and_forgets_that_as_it_ends(self, request_of: WorkerRequest) -> None:
        """And with it the run that a copy of the same id has come for: `_leave_others_known`."""
        state.task_reserved(request_of)
        assert list(control._find_requests_by_id([request_of.id])) == [request_of]
        state.task_ready(request_of)
        assert list(control._find_requests_by_id([request_of.id])) == []
        assert request_of._already_revoked is False


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

    def test_strategy_waits_with_the_request_as_the_first_argument(self) -> None:
        source = inspect.getsource(strategy.default)
        assert "apply_eta_task, (req,)" in source
        assert "limit_post_eta, (req, bucket, 1)" in source

    def test_slot_is_free_while_fewer_requests_are_reserved(self, request_of: WorkerRequest) -> None:
        pool = SimpleNamespace(num_processes=1)
        state.reserved_requests.clear()  # Of the tests before it.
        assert _celery.has_free_slot(pool)
        state.task_reserved(request_of)
        assert not _celery.has_free_slot(pool)
        pool.num_processes = 2
        assert _celery.has_free_slot(pool)
        state.task_ready(request_of)


class TestApps:
    def test_apps_made_before_and_after_are_extended(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Celery, "builtin_fixups", set(Celery.builtin_fixups))
        extended.clear()
        _celery.extend_every_app(extend)
        assert app in extended
        later = Celery("later", set_as_current=False)
        assert later in extended

    def test_app_is_active(self, app: Celery) -> None:
        assert app in _celery.active_apps()

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
    def test_running_task_is_the_current_task(self, task: Any) -> None:
        request = Context(id="inner", args=(), kwargs={}, is_eager=True)
        assert _celery.current_task() is None
        assert _celery.current_worker_task() is None
        _celery.push_task(task, request)
        try:
            assert _celery.current_task() is task
            assert task.request is request
        finally:
            _celery.pop_task(task)
        assert _celery.current_task() is None
        assert task.request is not request

    @pytest.mark.skipif(VERSION < (5, 5), reason="older versions push an empty one, and SingletonTask a copy")
    def test_celerys_call_pushes_a_copy_of_the_request_with_other_arguments(self, app: Celery) -> None:
        found: list[Any] = []

        @app.task(shared=False, name="inside.down", bind=True, base=celery.Task)
        def down(self: Any, n: int) -> None:
            found.append(_celery.innermost_request(type(self)))
            if n:
                self(n - 1)

        assert _celery.innermost_request(down) is None
        down.apply((1,), task_id="x")
        assert [(it.id, it.called_directly, it.args) for it in found] == [("x", False, (1,)), ("x", False, (0,))]
        assert found[0] is not found[1]

    def test_models_are_sent_as_dictionaries(self, app: Celery) -> None:
        @app.task(shared=False, name="inside.models", pydantic=True)
        def models(order: Order) -> None: ...

        (order,), kwargs = _celery.with_dumped_models(models, (Order(id=7),), {})
        assert order == ({"id": 7} if VERSION >= (5, 7) else Order(id=7))
        assert kwargs == {}

    def test_task_that_is_forgotten_is_made_anew(self, app: Celery) -> None:
        made = app.task(shared=False, name="inside.made")(extend)
        assert made.name in app.tasks
        _celery.forget_task(app, made.name)
        _celery.forget_task(app, "nobody")
        assert made.name not in app.tasks

    def test_worker_task_is_the_innermost_that_nobody_called_directly(self, app: Celery, task: Any) -> None:
        found: list[Any] = []

        @app.task(shared=False, name="inside.outer", bind=True)
        def outer(self: Any) -> None:
            _celery.push_task(task, Context(id="inner", is_eager=True))
            found.append((_celery.current_task().name, _celery.current_worker_task().name))
            _celery.pop_task(task)

        outer.apply()
        assert found == [(task.name, "inside.outer")]


class TestLog:
    def test_ignored_execution_says_why(self, task: Any, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "celery.app.trace")
        trace.logger.filters.clear()  # Another test may have started a worker in this process.
        for _ in range(2):
            _celery.reword_ignored({"Ignore('for this')": "for that"}.get)
        try:
            for error in (Ignore("for this"), Ignore("else")):
                task.run = fails_with(error)
                tracer = trace.build_tracer(task.name, task, app=task.app, eager=False)
                tracer("an-id", (), {}, request={"id": "an-id"})
        finally:
            trace.logger.filters.clear()
        assert [record.getMessage() for record in caplog.records] == [
            "Task inside.job[an-id] for that",
            "Task inside.job[an-id] ignored",
        ]


def fails_with(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


class TestMessages:
    @pytest.fixture
    def channel(self) -> Iterator[Any]:
        with Connection("memory://") as connection:
            yield connection.default_channel

    def test_queue_of_a_consumer_is_found_by_its_tag(self, channel: Any) -> None:
        """RabbitMQ gives only the tag, and a copy that is put back elsewhere may never run."""
        with Consumer(channel, queues=[Queue("one"), Queue("two")]) as consumer:
            amqp = SimpleNamespace(callbacks=dict.fromkeys(consumer._active_tags.values(), consumer._receive_callback))
            for name, tag in consumer._active_tags.items():
                message: Any = SimpleNamespace(channel=amqp, delivery_info={"consumer_tag": tag})
                assert _celery.queue_taken_from(message).name == name
            for other in ({}, None, {"consumer_tag": "other"}):
                assert _celery.queue_taken_from(SimpleNamespace(channel=amqp, delivery_info=other)) is None
        assert "_receive_callback" in Consumer._basic_consume.__code__.co_names
        assert "callbacks" in inspect.getsource(importlib.import_module("amqp.channel").Channel.basic_consume)

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

    def test_queues_that_an_exchange_routes_to_are_known(self, channel: Any) -> None:
        queue = Queue("reached", routing_key="a-key")(channel)
        queue.declare()
        assert isinstance(channel, virtual.Channel)
        assert "reached" in _celery.queues_reached(channel, "", "reached")

    @pytest.mark.skipif(VERSION < (5, 5), reason="older versions have RabbitMQ keep nothing")
    def test_delayed_message_has_its_delay_before_its_routing_key(self) -> None:
        way = _celery.delayed_way(5, "a.b")
        assert way == ("celery_delayed_27", "0." * 25 + "1.0.1.a.b")
        assert way[0].startswith(_celery.DELAYED)
        assert _celery.without_delay(way[1]) == "a.b"
        assert _celery.delayed_way(5, way[1]) == way
        assert _celery.without_delay("0.1.a") == "0.1.a"

    @pytest.mark.skipif(VERSION < (5, 5), reason="Celery does not have RabbitMQ keep messages")
    def test_queue_is_bound_to_the_exchange_of_kept_messages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bound: list[str] = []
        monkeypatch.setattr(Exchange, "bind_to", lambda self, to, routing_key: bound.append(routing_key))
        monkeypatch.setattr(Queue, "bind_to", lambda self, to, routing_key: bound.append(f"{to} {routing_key}"))
        queue = Queue("orders", Exchange("shop", type="topic"), routing_key="shop.orders")
        _celery.lead_delayed_to(queue, Connection("memory://"))
        assert bound == ["#.shop.orders", "shop #.shop.orders"]

    def test_pauses_use_pythons_sleep(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise a missing broker stops a greenlet pool, and the heartbeat with it."""
        monkeypatch.setattr(functional, "sleep", lambda seconds: None)
        _celery.let_pauses_switch()
        assert functional.sleep is time.sleep
        assert "sleep" in functional.retry_over_time.__code__.co_names


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
    def test_command_is_sent_like_celerys_own(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []
        monkeypatch.setattr(Inspect, "_request", lambda self, command, **arguments: asked.append(command) or {})
        assert _celery.ask_each_worker(app.control.inspect(), "locks") == {}
        assert asked == ["locks"]
        assert "_request" in Inspect.report.__code__.co_names

    def test_added_methods_are_those_of_each_app_and_hide_none_of_celerys(self, app: Celery) -> None:
        assert isinstance(app.control, Control)
        assert isinstance(app.control.inspect(), Inspect)
        its = set(own_names(nodes(ast.parse(inspect.getsource(importlib.import_module("celery.app.control"))))))
        for owner, name in ((app.control, "release_lock"), (app.control.inspect(), "locks")):
            assert getattr(owner, name).__module__ == remote_control.__name__
            assert name not in its
        assert app.control.inspect().singleton_lock.__module__ == peers.__name__
        assert "singleton_lock" not in its

    def test_app_without_a_result_backend_keeps_no_results(self) -> None:
        for url, keeps in ((None, False), ("cache+memory://", True)):
            assert _celery.keeps_results(Celery("results", backend=url, set_as_current=False).backend) is keeps

    def test_backend_that_only_the_caller_can_read_is_known(self) -> None:
        for url, may in ((None, False), ("rpc://", False), ("cache+memory://", True)):
            backend = Celery("results", broker="memory://", backend=url, set_as_current=False).backend
            assert _celery.may_be_asked(backend) is may

    @pytest.mark.skipif(not hasattr(reduction, "DupFd"), reason="Windows passes no descriptors on")
    def test_process_that_is_not_forked_gets_more_than_celerys_arguments(
        self, app: Celery, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reduction, "DupFd", lambda descriptor: SimpleNamespace(detach=lambda: descriptor + 1))
        pool, inherited = SimpleNamespace(options={"initargs": (app, "node")}), list[Any]()
        _celery.InitialArguments.extend(pool, lambda *given: inherited.append(given), lambda: [3, 4])
        assert pool.options["initargs"] == (app, "node")
        arrive, given = pool.options["initargs"].__reduce__()
        assert arrive(*given) == (app, "node")
        assert inherited == [(app, 4, 5)]

    @pytest.mark.parametrize(("name", "forks"), [("prefork", True), ("threads", False), ("solo", False)])
    def test_pool_is_known_by_its_class(self, name: str, forks: bool) -> None:
        assert _celery.is_prefork(get_implementation(name)) is forks

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

    def test_main_process_is_not_a_child(self) -> None:
        assert _celery.is_child_of_a_pool() is False
        assert current_process().daemon is False


class TestScheduler:
    def test_missing_heap_is_rebuilt(self, scheduler: Scheduler) -> None:
        _celery.forget_heap(scheduler)
        scheduler.tick()
        assert scheduler._heap is not None
        assert len(scheduler._heap) == 2

    def test_postponed_entry_lets_the_next_one_be_first(self, scheduler: Scheduler) -> None:
        first, second = scheduler.schedule["first"], scheduler.schedule["second"]
        scheduler._heap = [event_t(1.0, 5, first), event_t(2.0, 5, second)]
        now = scheduler._when(first, 0)
        _celery.put_off(scheduler, first, 60.0)
        assert scheduler._heap[0].entry is second
        assert [event.time - now for event in scheduler._heap if event.entry is first] == [pytest.approx(60, abs=5)]

    def test_turn_of_the_first_entry_is_known(self, scheduler: Scheduler) -> None:
        """Celery before 5.7 asks about it at any time: what the broker did not take would be sent at each tick."""
        first, second = scheduler.schedule["first"], scheduler.schedule["second"]
        now = scheduler._when(first, 0)
        scheduler._heap = [event_t(now + 60, 5, first), event_t(now + 90, 5, second)]
        assert _celery.turn_in(scheduler, first) == pytest.approx(60, abs=5)
        assert _celery.turn_in(scheduler, second) == 0.0
        _celery.forget_heap(scheduler)
        assert _celery.turn_in(scheduler, first) == 0.0

    def test_entry_that_was_sent_is_looked_at_when_it_is_due(self, app: Celery) -> None:
        class Sends(_celery.PunctualScheduler):
            was_sent = False

            def apply_entry(self, entry: ScheduleEntry, producer: object = None) -> None:
                self.was_sent = True

            def due_in(self, entry: ScheduleEntry, seconds: float) -> float:
                return 60.0 if self.was_sent else seconds

        app.conf.update(beat_schedule={"first": {"task": "first", "schedule": 1000.0}}, result_expires=None)
        scheduler = Sends(app)
        (entry,) = scheduler.schedule.values()
        entry.last_run_at -= timedelta(seconds=1001)
        now = Scheduler._when(scheduler, entry, 0)
        scheduler.tick()
        assert [event.time - now for event in scheduler._heap] == [pytest.approx(60, abs=5)]

    @pytest.mark.parametrize("method", [Scheduler.tick, Scheduler.populate_heap])
    def test_tick_calls_the_methods_that_we_replace(self, method: Callable[..., Any]) -> None:
        """If a tick worked differently, it would send unclaimed entries, and two beats would send them twice."""
        used = set(method.__code__.co_names)
        assert {"_heap", "_when"} <= used
        if method is Scheduler.tick:
            assert {"is_due", "reserve", "apply_entry", "populate_heap", "producer"} <= used
            assert {"schedules_equal", "old_schedulers", "schedule"} <= used

    def test_scheduler_is_known_by_its_short_name(self) -> None:
        """Otherwise the doctor warns about a beat that is exclusive, and is silent about one that is not."""
        assert _celery.named_schedulers()["exclusive"] == "celery_singleton_lock.beat:ExclusiveScheduler"
        its = Service.get_scheduler
        assert inspect.signature(its).parameters["extension_namespace"].default == "celery.beat_schedulers"
        assert {"load_extension_class_names", "symbol_by_name"} <= set(its.__code__.co_names)

    def test_scheduler_is_made_on_demand(self, app: Celery, scheduler: Scheduler) -> None:
        assert isinstance(vars(Service)["scheduler"], cached_property)
        service = Service(app, scheduler_cls=Scheduler)
        assert _celery.scheduler_of(service) is None
        assert _celery.scheduler_of(SimpleNamespace(scheduler=scheduler)) is scheduler


def test_socket_of_a_connection_is_found(request: pytest.FixtureRequest) -> None:
    connection: Any = SimpleNamespace(_sock=(opened := object()))
    assert _redis_py.socket_of(connection) is opened


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
