"""Every private or undocumented part of Celery, kombu and billiard that this package touches, under the name of what it
means. No other module touches one.

`tests/unit/private_parts.py` lists the parts, and the promise that depends on each; `tests/unit/test_celery_private.py`
asserts what is expected of them, so that a new version fails there first. What is said here of Celery was read in
versions 5.4.0, 5.5.3, 5.6.3 and 5.7.0, in kombu 5.4.2, 5.5.4, 5.6.2 and 5.7.0, and in billiard 4.2.0 and 4.3.2.
"""

from __future__ import annotations

import heapq
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import celery
from billiard import einfo
from billiard.einfo import ExceptionInfo
from billiard.process import current_process
from celery import Celery, _state, beat, bootsteps
from celery.app import trace
from celery.app.control import Control, Inspect
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.concurrency import prefork
from celery.utils.imports import load_extension_class_names
from celery.worker import request as worker_request
from celery.worker import state as worker_state
from kombu.utils import functional

if celery.VERSION[:2] < (5, 4):
    raise ImportError(f"celery_singleton_lock needs Celery 5.4 or newer, found {celery.__version__}")

#: The names of the queues in which Celery has RabbitMQ keep messages begin with this, and their routing keys with that.
DELAYED, _DELAY = "celery_delayed_", re.compile(r"^(?:[01]\.){28}")

#: Their stubs leave these parts out, or are wrong about some.
Request: Any = worker_request.Request
Scheduler: Any = beat.Scheduler
_internal_state: Any = _state
_einfo: Any = einfo
_trace: Any = trace
_bootsteps: Any = bootsteps
_functional: Any = functional


class WorkerRequest(Request):  # type: ignore[misc]  # As above.
    """A delivery in the worker's main process, which reports more about itself.

    Since 5.7 Celery sends a message again whose child died (`_retry_worker_lost`), and acknowledges one whose result
    was stored before (`_success_was_stored`); it cancels what runs as the connection is lost, or as the worker ends.
    RETRY is not stored over an end that Celery has not read yet (`_announce_cancelled`), since no copy of it runs. Of
    several deliveries with one id, Celery knows the newest (`requests`), and none once that has ended.
    """

    @property
    def context(self) -> Context:
        """The request that the task will have; what the headers say of it, if Celery cannot read the body."""
        try:
            found: Context = self._context
            return found
        except Exception:  # noqa: BLE001 - others wrote it; the task fails with the error as it begins
            return Context(self.request_dict)

    @property
    def was_cancelled(self) -> bool:
        """Whether it was stopped so that it runs elsewhere."""
        return bool(self._already_cancelled)

    @property
    def was_terminated(self) -> bool:
        """Whether it was stopped for good, or never begun, since it was revoked."""
        return bool(self._already_revoked)

    @property
    def success_was_stored(self) -> bool:
        """Whether its child was lost when it had stored its result, which Celery takes for the end of it."""
        ask = getattr(self, "_success_was_stored", None)
        return ask is not None and bool(ask())

    def others_at_work(self) -> list[Any]:
        """Other deliveries of this message that the pool has begun with."""
        return [request for request in active_requests() if request.id == self.id and request is not self]

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        finally:
            self._leave_others_known()

    def on_timeout(self, soft: bool, timeout: float) -> None:
        try:
            super().on_timeout(soft, timeout)
        finally:
            if not soft:
                self._leave_others_known()

    def revoked(self) -> bool:
        if revoked := bool(super().revoked()):
            self._leave_others_known()
        return revoked

    def _leave_others_known(self) -> None:
        """As it ends, Celery forgets its id."""
        for request in self.others_at_work():
            worker_state.requests[self.id] = request

    def has_ended(self) -> bool:
        """Whether it is known to have ended, although its process has not reported that."""
        return False

    def _announce_cancelled(self, **options: Any) -> None:
        # A cold shutdown stores nothing for a message that comes again (since Celery 5.6).
        if options.get("emit_retry", True) and self.has_ended():
            self._already_cancelled = True  # Its process is being killed, which is not its end.
        else:
            super()._announce_cancelled(**options)

    def on_sent_again(self) -> None:
        """Its child was lost, and Celery has sent it as a retry."""

    def _retry_worker_lost(self, exc: BaseException, exc_info: Any) -> bool:
        if sent := bool(super()._retry_worker_lost(exc, exc_info)):
            self.on_sent_again()
        return sent


def reported(error: Exception) -> Any:
    """What Celery gets from a child whose task has raised this."""
    try:
        raise error
    except Exception:  # noqa: BLE001 - the one above
        return ExceptionInfo()


def raised(exc_info: Any) -> BaseException:
    """What a task has raised, as its process reports that: wrapped, unless it came from another process."""
    error: Any = exc_info.exception
    found: BaseException = error.exc if isinstance(error, _einfo.ExceptionWithTraceback) else error
    return found


def active_requests() -> list[Any]:
    """What the pool has begun with and not reported the end of."""
    while True:
        with suppress(RuntimeError):  # A thread of the pool has begun with one meanwhile.
            return list(worker_state.active_requests)


def is_active(request: WorkerRequest) -> bool:
    """Whether the pool has begun with it and not reported its end."""
    return request in worker_state.active_requests


def begin_now(consumer: Any, request: WorkerRequest) -> bool:
    """Begin at once with a request that waits in the timer of a consumer that runs; whether that was so.

    In the consumer's loop, or, where greenlets have the timer, in one of them. The timer of a thread has no such queue.
    """
    timer = consumer.timer
    if consumer.blueprint.state != _bootsteps.RUN:
        return False
    for waiting in list(getattr(timer, "_queue", ())):
        entry = waiting.entry
        if not entry.canceled and entry.args and entry.args[0] is request:
            if getattr(waiting, "dead", False) or getattr(waiting, "gr_frame", None) is not None:
                return False  # A greenlet whose time has come: it has begun with it, or waits for a slot.
            entry.cancel()
            if hasattr(waiting, "cancel"):  # A greenlet, which does not look at its entry.
                timer.cancel(waiting)
            else:  # It would keep the request for as long as that was to wait, and be looked at by each search.
                timer._queue.remove(waiting)
                heapq.heapify(timer._queue)
            timer.apply_entry(entry)
            return True
    return False


def give_token_back(consumer: Any, task_name: str) -> None:
    """Have a consumer that has spent a token of a task's `rate_limit` have it back, and spend it on the next request.

    Any thread may call it; the consumer's own thread does it, since only that may touch the bucket.
    """

    def give_back() -> None:
        if (bucket := consumer.task_buckets[task_name]) is not None:
            consumer._schedule_bucket_request = partial(_spend, consumer)
            bucket.expected_time()  # Counts what has come since it last looked.
            bucket._tokens = min(bucket.capacity, bucket._tokens + 1)
            _spend(consumer, bucket)

    if consumer.task_buckets[task_name] is not None:
        consumer.timer.call_after(0, give_back)


def _spend(consumer: Any, bucket: Any) -> None:
    """As Celery's `_schedule_bucket_request`, with one timer for a bucket.

    Celery starts one for each request that has to wait, which goes on as long as any request waits. By tokens that come
    back, a worker gets through a backlog fast, and would have a timer for each message of it.
    """
    while True:
        try:
            request, tokens = bucket.pop()
        except IndexError:
            return
        if not bucket.can_consume(tokens):
            break
        consumer._limit_move_to_pool(request)
    bucket.contents.appendleft((request, tokens))
    now = time.monotonic()
    if now >= getattr(bucket, "wakes_at", now):  # It has no timer, or that has gone off.
        seconds = bucket.expected_time(tokens)
        bucket.wakes_at = now + seconds
        consumer.timer.call_after(seconds, _spend, (consumer, bucket))


def has_free_slot(pool: Any) -> bool:
    """Whether the pool could begin with one more request now."""
    return len(worker_state.reserved_requests) < (pool.num_processes or 1)


def extend_every_app(extend: Callable[[Celery], None]) -> None:
    """Call `extend`, a module's function, with each app of the process: those that are, and those that will be."""
    Celery.builtin_fixups.add(f"{extend.__module__}:{extend.__qualname__}")
    for app in active_apps():
        extend(app)


def active_apps() -> list[Any]:
    """The apps of this process."""
    return list(_internal_state._get_active_apps())


def is_stand_in(app: Any) -> bool:
    """Whether it is the app that Celery makes where a program has made none: that has no fix-ups."""
    return not app.fixups


def current_task() -> Any:
    """The task that this thread carries out, the innermost of those that call each other; None outside of one."""
    return _internal_state.get_current_task()


def current_worker_task() -> Any:
    """The innermost task of this thread that nobody called directly; None outside of one."""
    return _internal_state.get_current_worker_task()


def with_dumped_models(task: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call as Celery sends them: for a task with `pydantic=True`, models as dictionaries."""
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return (args, kwargs) if dump is None else dump(args, kwargs)


def push_task(task: Any, request: Context) -> None:
    """Have `task` be what this thread carries out, with this request.

    No context manager: a generator that an exception interrupts ends when it is collected, beneath another task.
    """
    _internal_state.push_current_task(task)
    task.request_stack.push(request)


def pop_task(task: Any) -> None:
    """End what `push_task` has begun."""
    task.request_stack.pop()
    _internal_state.pop_current_task()


def forget_task(app: Any, name: str) -> None:
    """Remove a task that could not be bound, which Celery registers before.

    Not from `app.tasks`, which evaluates the app's lazy tasks, among them this one, whose evaluation has not ended.
    """
    app._tasks.pop(name, None)


def innermost_request(task: Any) -> Any:
    """The request of a task, or of its class, that this thread carries out, the innermost; None if there is none.

    What `Task.__call__` pushes, without an id, is a copy of the one below. `SingletonTask` overrides `push_request`,
    and `bind`, which refuses a task that is wrong.
    """
    return task.request_stack.top


def queue_taken_from(message: Any) -> Any:
    """The queue that a message was taken from, on a broker that says for which consumer it is; None on others.

    Celery's consumer knows its queues' tags, and py-amqp's channel whom to call for a tag; neither shows it.
    """
    tag = (message.delivery_info or {}).get("consumer_tag")
    if not isinstance(tag, str):  # Where that comes with the message, as on Redis, its sender has written it.
        return None
    consumer = getattr((getattr(message.channel, "callbacks", None) or {}).get(tag), "__self__", None)
    for name, its in getattr(consumer, "_active_tags", {}).items():
        if its == tag:
            return getattr(consumer, "_queues", {}).get(name)
    return None


def consumed_queues(app: Any) -> Mapping[str, Any]:
    """The queues that a worker of this app takes messages from, by name: those of the settings, or of `-Q`."""
    queues: Mapping[str, Any] = app.amqp.queues.consume_from
    return queues


def queues_reached(channel: Any, exchange: str, routing_key: str) -> set[str]:
    """The queues that a message gets to by one of kombu's virtual transports."""
    return set(channel._lookup(exchange, routing_key))


def delayed_way(seconds: int, routing_key: str) -> tuple[str, str] | None:
    """The exchange and the routing key with which RabbitMQ keeps a message for so long, and then passes it on to the
    topic exchanges that Celery has bound, in an app with quorum queues; None before Celery 5.5, which binds none.
    """
    try:
        from kombu.transport import native_delayed_delivery as its
    except ImportError:
        return None
    key = its.calculate_routing_key(seconds, without_delay(routing_key)) if routing_key else ""
    return its.level_name(its.MAX_LEVEL), key


def lead_delayed_to(queue: Any, connection: Any) -> None:
    """Have messages that RabbitMQ has kept reach a queue: Celery sees to that when a worker starts, for the queues that
    it knows then, if its user may.
    """
    from kombu.transport.native_delayed_delivery import bind_queue_to_native_delayed_delivery_exchange

    bind_queue_to_native_delayed_delivery_exchange(connection, queue)


def without_delay(routing_key: str) -> str:
    """The routing key with which a message was sent before it was delayed."""
    return _DELAY.sub("", routing_key)


def let_pauses_switch() -> None:
    """Have kombu's pauses between two tries to reach the broker let other greenlets go on, the heartbeat's for one.

    gevent, as it patches the threads, looks at every object there is, also at Celery's lazy ones, and so has kombu
    imported before it patches `time` (gevent 26.9, Celery 5.7): kombu then stops the whole process for up to 32 s.
    """
    if _functional.sleep is not time.sleep:
        _functional.sleep = time.sleep


def reword_ignored(reword: Callable[[str], str | None]) -> None:
    """Have the log of an execution that ends by an `Ignore` say what `reword` makes of the exception's repr.

    Where that is None, or the log has another form, it says "ignored" as before.
    """

    def look(record: logging.LogRecord) -> bool:
        context = record.args
        if isinstance(context, dict) and context.get("description") == _trace.log_policy_ignore.description:
            words = reword(str(context.get("exc", "")))
            record.args = context if words is None else {**context, "description": words}
        return True

    if not any(getattr(known, "__qualname__", "") == look.__qualname__ for known in _trace.logger.filters):
        _trace.logger.addFilter(look)


def with_preload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that takes its context first, and first has a signal sent with the options that an app gives to all
    commands.
    """
    from celery.bin.base import handle_preload_options  # A program that only sends needs no command line.

    handled: Callable[..., Any] = handle_preload_options(command)
    return handled


def add_method(to: type[Control | Inspect], name: str, method: Callable[..., Any]) -> None:
    """Have `app.control`, or what `app.control.inspect()` returns, have one more method, whatever the app."""
    setattr(to, name, method)


def ask_each_worker(inspect: Inspect, command: str) -> Any:
    """Send a command by `app.control.inspect()`, as its own methods do; an answer for each node name, None for none."""
    asking: Any = inspect
    return asking._request(command)


def keeps_results(backend: Any) -> bool:
    """Whether a task's result backend keeps anything: an app without one has one that does not."""
    return not isinstance(backend, DisabledBackend)


def may_be_asked(backend: Any) -> bool:
    """Whether a worker can ask a result backend how another task has ended: rpc:// has that in the caller's queue."""
    return keeps_results(backend) and str(backend.as_uri()) != "rpc://"


def record_end(
    backend: Any,
    task_id: str,
    error: Exception,
    request: Any,
    *,
    state: str,
    store_result: bool,
    call_errbacks: bool,
) -> None:
    """Give an execution its final state, and with it the later steps of its chain and its part in a chord."""
    backend.mark_as_failure(
        task_id,
        error,
        request=request,
        store_result=store_result,
        call_errbacks=call_errbacks,
        state=state,
    )


def counts_part_once(backend: Any) -> bool:
    """Whether a part of a chord that is told to the result backend once more is counted no second time.

    Redis counts different members of a sorted set. Pickle may write the same value in another way in another process.
    """
    return bool(getattr(backend, "_chord_zset", False)) and backend.serializer == "json"


def is_prefork(pool: type[Any]) -> bool:
    """Whether a worker's pool is one of processes, which it forks."""
    return issubclass(pool, prefork.TaskPool)


class InitialArguments(tuple[Any, ...]):
    """What a pool of processes calls Celery's initializer with in each of them, the app first. billiard pickles this
    for a process that it starts afresh and does not fork; by that, the process gets more.
    """

    inherit: Callable[..., None]
    descriptors: Callable[[], Sequence[int]]

    @classmethod
    def extend(cls, pool: Any, inherit: Callable[..., None], descriptors: Callable[[], Sequence[int]]) -> None:
        """Call `inherit`, a module's function, before anything else in each process that `pool` does not fork.

        Args:
            pool: of a worker, not started yet.
            inherit: gets the app, and descriptors of the process's own.
            descriptors: finds those of this process that such a process is to have as well.
        """
        arguments = pool.options["initargs"] = cls(pool.options["initargs"])
        arguments.inherit, arguments.descriptors = inherit, descriptors

    def __reduce__(self) -> tuple[Any, ...]:
        from billiard.reduction import DupFd  # Windows has none.

        return self._arrive, (tuple(self), self.inherit, [DupFd(each) for each in self.descriptors()])

    @staticmethod
    def _arrive(arguments: tuple[Any, ...], inherit: Callable[..., None], given: Sequence[Any]) -> tuple[Any, ...]:
        inherit(arguments[0], *[each.detach() for each in given])
        return arguments


def is_child_of_a_pool() -> bool:
    """Whether this process is a prefork pool's, which makes another for one that dies."""
    return bool(current_process().daemon)


class PunctualScheduler(Scheduler):  # type: ignore[misc]  # As above.
    """Beat's scheduler, which is asked once more in how many seconds an entry is due, when it has sent that.

    Celery works that out before it sends, and counts from the moment at which it has sent.
    """

    def due_in(self, entry: Any, seconds: float) -> float:
        """In how many seconds the entry is due; `seconds` is what Celery knows."""
        return seconds

    def _when(self, entry: Any, next_time_to_run: float, *args: Any, **kwargs: Any) -> float:
        when: float = super()._when(entry, self.due_in(entry, next_time_to_run), *args, **kwargs)
        return when


def forget_heap(scheduler: Any) -> None:
    """Have beat's scheduler make its heap anew with its next tick."""
    scheduler._heap = None


def put_off(scheduler: Any, following: Any, seconds: float) -> None:
    """Have `following` take the place of the next entry, in that many seconds."""
    heap = scheduler._heap or []
    heapq.heapreplace(heap, heap[0]._replace(time=scheduler._when(following, seconds), entry=following))


def turn_in(scheduler: Any, entry: Any) -> float:
    """In how many seconds it is the turn of an entry that beat's scheduler asks about.

    Before 5.7, Celery asks about the first entry whatever its time.
    """
    first = scheduler._heap[0] if scheduler._heap else None
    return first.time - scheduler._when(entry, 0) if first is not None and first.entry is entry else 0.0


def named_schedulers() -> dict[str, str]:
    """The short names of beat's schedulers, such as `exclusive`, and the paths of their classes, from all packages."""
    names: Any = load_extension_class_names("celery.beat_schedulers")
    return dict(names)


def scheduler_of(service: Any) -> Any:
    """The scheduler of beat's service; None where it has not been made, which asking it would do."""
    return vars(service).get("scheduler")
