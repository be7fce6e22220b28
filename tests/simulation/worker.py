"""A Celery worker of simulated processes: Celery's own strategies, requests and tracer, on a simulated consumer and
pool.
"""

from __future__ import annotations

import io
import pickle
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import Terminated, WorkerLostError
from celery import bootsteps, signals
from celery.app.trace import trace_task_ret
from celery.concurrency import prefork
from celery.worker import state, strategy
from kombu.transport import virtual

from tests.simulation import apps, fakes, inside, loading
from tests.simulation.broker import Consumer, Delivery
from tests.simulation.loop import Loop
from tests.simulation.program import Program
from tests.simulation.scheduler import Host, Process, Task, simulation

#: Least and most seconds until the pool notices that a child is gone.
NOTICED = (0.05, 1.0)

#: Most seconds after that until it reports that a job is lost, if the child's successor has the pid.
LOST = 2.0


@dataclass(eq=False)
class Job:
    """A job of the pool."""

    task_id: str
    args: bytes
    accepted: Callable[..., Any]
    done: Callable[..., Any]
    failed: Callable[..., Any]
    given_at: float
    child: Child | None = None
    is_accepted: bool = False
    is_over: bool = False


@dataclass(eq=False)
class Child:
    """A process of the pool."""

    process: Process
    inbox: deque[Job] = field(default_factory=deque)
    job: Job | None = None
    idle: Task | None = None
    is_to_end: bool = False


class Worker(Program):
    """A worker; call `start` to run it.

    Args:
        world: where it is.
        host: on which it runs.
        number: for its name.
        pool: "prefork" or "threads".
        concurrency: bodies at once.
        prefetch: most messages that it takes.
    """

    def __init__(
        self, world: Any, host: Host, number: int, *, pool: str = "prefork", concurrency: int = 2, prefetch: int = 4
    ) -> None:
        super().__init__(world, host, f"w{number}", lambda _: self._live())
        self.pool, self.concurrency, self.prefetch, self.run = pool, concurrency, prefetch, world.run
        self.settings = {**world.settings, **world.settings_of.get(host.name, {})}
        self.node = f"celery@w{number}"
        self.children: list[Child] = []

    def start(self) -> None:
        """Start it as a new process."""
        if not self.is_alive:
            self.children = []
            self._jobs: deque[Job] = deque()
            self.loop = Loop(self.run, self.host)
            #: Whether it has begun to shut down.
            self.is_ending = False
            super().start()

    @property
    def living(self) -> list[Child]:
        """Its living children."""
        return [child for child in self.children if child.process.alive]

    # The main process

    def _live(self) -> None:
        process, package = self.process, self.process.package
        app = apps.app_of(package, self.settings)
        #: As for a consumer of this pool.
        self.num_processes = self.concurrency
        self.options = {"initargs": (app, self.node)}
        loop, consumer = self.loop, self._consumer(app)
        parent = SimpleNamespace(
            app=app,
            concurrency=self.concurrency,
            pool_cls=prefork.TaskPool,
            pool=self,
            consumer=consumer,
            use_eventloop=True,
        )
        has_processes = self.pool == "prefork"
        free_left_behind = inside.begin_worker(package, app, _State(app), parent, has_processes=has_processes)
        #: Its waiting copies; None if they wait only for their time.
        self.line = inside.line_of(package, app)
        self.world.parked.watch(self)
        fakes.Thread(target=free_left_behind, args=(self.node,), name="start").start()
        for _ in range(self.concurrency if has_processes else 0):
            self._add_child()
        self._free_threads = self.concurrency
        channel = app.connection_for_read().channel()
        strategies = _Made(lambda name: strategy.default(app.tasks[name], app, consumer))

        def take(delivery: Delivery) -> None:
            loop.post(lambda: self._received(channel, strategies, delivery))

        def cut(seconds: float) -> None:
            notices = self.run.now + self.run.rng.uniform(0.0, min(seconds, 0.3))
            self.run.at(notices, lambda: loop.post(lambda: self._lost_its_broker(seconds)))

        self._channel, self._app = channel, app
        channel.consumer = Consumer(self.world.broker, take, self.prefetch, cut)
        process.at_end.append(channel.consumer.close)
        process.handlers[signal.SIGTERM] = lambda *_: self._is_told_to_end(consumer)
        self._connected()
        while not self.is_ending:
            loop.turn()
        self._end(consumer)

    def _consumer(self, app: Any) -> Any:
        """What Celery's strategies, and the code that starts waiting copies, use of a consumer."""
        return SimpleNamespace(
            app=app,
            hostname=self.node,
            connection_errors=(OSError,),
            event_dispatcher=None,
            timer=self.loop.timer,
            apply_eta_task=self._is_due,
            disable_rate_limits=True,
            task_buckets={},
            on_task_request=self._handle,
            _limit_task=None,
            _limit_post_eta=None,
            pool=self,
            controller=SimpleNamespace(state=SimpleNamespace(revoked=self.world.revoked)),
            qos=SimpleNamespace(increment_eventually=lambda: self._channel.consumer.prefetch_more(1)),
            blueprint=SimpleNamespace(state=bootsteps.RUN),
        )

    def _connected(self) -> None:
        if self.is_ending:
            return
        if self.line is not None:
            self.line.register(self.loop)
        consumer = self._channel.consumer
        consumer.prefetch = self.prefetch
        self.world.broker.subscribe(consumer)

    def _lost_its_broker(self, seconds: float) -> None:
        """Do what Celery's consumer does when its connection is gone (`Consumer.on_close`)."""
        loop, timer = self.loop, self.loop.timer
        for entry in timer.entries:
            timer.cancel(entry)
        for request in [*state.reserved_requests]:
            if request.app is self._app and request not in state.active_requests:
                state.reserved_requests.discard(request)
        if self.pool == "prefork":
            self._jobs.clear()
        self.world.parked.are_gone(self.process)
        self.run.after(seconds, lambda: loop.post(self._connected))

    def _is_told_to_end(self, consumer: Any) -> None:
        """Do what Celery's worker does in its signal handler."""
        signals.worker_shutting_down.send(sender=self.node, sig="SIGTERM", how="Warm", exitcode=0)
        self.loop.post(lambda: self._stop(consumer))

    def _stop(self, consumer: Any) -> None:
        if not self.is_ending:
            self.is_ending, consumer.blueprint.state = True, bootsteps.CLOSE

    def _end(self, consumer: Any) -> None:
        """Stop Celery's steps one after the other: the consumer, ours, the pool."""
        self.run.note("ends", by=self.process.name)
        self.loop.is_open = False
        self._channel.consumer.cancel()
        if self.pool == "prefork":
            self._jobs.clear()
        self.world.parked.are_gone(self.process)
        if self.line is not None:
            self.line.close()
            self.line.join()
            self.world.parked.has_left(self.process, self.line)
        while self._is_busy():
            self.loop.turn()
        for child in self.living:
            child.is_to_end = True
            child.process.at_end.append(lambda: self.loop.post(lambda: None))
            if child.idle is not None:
                self.run.wake(child.idle)
        while self.living:
            self.loop.turn()
        signals.worker_shutdown.send(sender=self.node)
        self.run.kill(self.process)

    def _received(self, channel: Any, strategies: Any, delivery: Delivery) -> None:
        payload = pickle.loads(pickle.dumps(delivery.message))
        payload["properties"]["delivery_tag"] = delivery.tag
        if delivery.redelivered:
            payload["properties"]["delivery_info"]["redelivered"] = True
        message = virtual.Message(payload, channel=channel)
        for at_received in self.world.at_received:
            at_received(self.process, message.headers)
        strategies[message.headers["task"]](
            message,
            None,
            lambda *_: message.ack(),
            lambda _logger, _errors, requeue=False: message.reject(requeue=requeue),
            (),
        )

    def _is_busy(self) -> bool:
        if self.pool == "threads":
            return bool(self._jobs) or self._free_threads < self.concurrency
        return any(child.job is not None for child in self.living)

    def _is_due(self, request: Any) -> None:
        """Do what Celery's consumer does with an entry of the timer."""
        state.task_reserved(request)
        self.world.parked.begins(self, request)
        self._handle(request)
        self._channel.consumer.prefetch_more(-1)

    def _handle(self, request: Any) -> None:
        try:
            request.execute_using_pool(self)
        except Exception as error:
            if type(error).__name__ not in ("TaskRevokedError", "Ignore"):
                raise
            self.run.note("does not run", str(error))

    # The pool

    def apply_async(
        self,
        target: Any,
        args: Any,
        accept_callback: Any = None,
        callback: Any = None,
        error_callback: Any = None,
        **_: Any,
    ) -> Job:
        """Apply a job like billiard's pool."""
        job = Job(args[1], pickle.dumps(args), accept_callback, callback, error_callback, self.run.now)
        self._jobs.append(job)
        self._dispatch()
        return job

    def _dispatch(self) -> None:
        if self.pool == "threads":
            while self._jobs and self._free_threads:
                self._free_threads -= 1
                job = self._jobs.popleft()
                fakes.Thread(target=self._in_thread, args=(job,), name="pool").start()
            return
        for child in self.living:
            if self._jobs and child.job is None:
                job = child.job = self._jobs.popleft()
                job.child = child
                child.inbox.append(job)
                if child.idle is not None:
                    self.run.wake(child.idle)

    def _in_thread(self, job: Job) -> None:
        process = self.process
        job.accepted(process.os_pid, 0.0)
        failed, value = _trace(process, job)
        self._report(process, job, failed, value)
        self._free_threads += 1
        self.loop.post(self._dispatch)

    def _add_child(self) -> None:
        parent = self.process
        name = f"{parent.name}c{len(self.children) + 1}"
        process = self.world.process(self.host, name)
        process.is_child, process.parent = True, parent
        child = Child(process)
        self.children.append(child)
        process.at_end.append(lambda: self.run.after(self.run.rng.uniform(*NOTICED), lambda: self._lost(parent, child)))
        self.run.start(process, lambda: self._until_it_ends(parent, child))

    def _lost(self, parent: Process, child: Child) -> None:
        if self.process is not parent or not parent.alive:
            return
        loop = self.loop

        def notice() -> None:
            if self.world.pids_come_again:  # As billiard does, long before it reports what the child has not ended.
                self._succeed()
                self.run.after(self.run.rng.uniform(0.0, LOST), lambda: loop.post(lambda: report(replaced=True)))
            else:
                report(replaced=False)

        def report(*, replaced: bool) -> None:
            job = child.job
            if job is not None and not job.is_accepted:
                self._put_back(parent, job)
            elif job is not None and not job.is_over:
                job.is_over = True
                self.world.parked.is_lost(job.failed.__self__)
                job.failed(_reported(WorkerLostError("Worker exited prematurely")))
            if not replaced:
                self._succeed()

        loop.post(notice)

    def _succeed(self) -> None:
        if not self.is_ending:
            self._add_child()
        self._dispatch()

    def _put_back(self, parent: Process, job: Job) -> None:
        """Find another child for a job that this one had not begun with; if it was revoked, end it, as Celery does."""
        if job.task_id not in self.world.revoked:
            self._jobs.appendleft(job)
            return
        job.is_over = True
        job.accepted(parent.os_pid, 0.0)
        job.failed(_reported(Terminated(0)))

    def _until_it_ends(self, parent: Process, child: Child) -> None:
        try:
            self._child(parent, child)
        except SystemExit:
            self.run.kill(child.process)

    def _child(self, parent: Process, child: Child) -> None:
        """The main function of a process of the pool."""
        package = child.process.package
        package.begin()
        inside.inherit_channel(package, parent.package)
        apps.app_of(package, self.settings)
        while parent.alive:
            if child.is_to_end:
                signals.worker_process_shutdown.send(sender=None, pid=child.process.os_pid, exitcode=0)
                raise SystemExit
            if not child.inbox:
                child.idle = self.run.current
                self.run.park(1.0)
                continue
            job = child.inbox.popleft()
            pid = child.process.os_pid
            self._tell(parent, lambda job=job, pid=pid: job.accepted(pid, 0.0) if not job.is_over else None)
            job.is_accepted = True
            failed, value = _trace(child.process, job)
            self._tell(parent, lambda job=job, value=value, failed=failed: self._result(child, job, failed, value))

    def _tell(self, parent: Process, what: Callable[[], None]) -> None:
        """Write to the parent's pipe: it arrives whatever happens to the child."""

        def arrive() -> None:
            if self.process is parent and parent.alive:
                self.loop.post(what)

        # A pipe keeps the order.
        when = max(getattr(parent, "last_told", 0.0), self.run.now + self.run.rng.uniform(0.0001, 0.003))
        parent.last_told = when  # type: ignore[attr-defined]
        self.run.at(when, arrive)

    def _result(self, child: Child, job: Job, failed: bool, value: bytes) -> None:
        child.job = None
        if not job.is_over:
            job.is_over = True
            self._report(self.process, job, failed, loads(value, self.process))
        self._dispatch()

    def _report(self, process: Process, job: Job, failed: bool, value: Any) -> None:
        value = value if not isinstance(value, bytes) else pickle.loads(value)
        (job.failed if failed else job.done)(value)
        self.world.parked.is_over(process, job.task_id)


class _State:
    """The part of Celery's state that belongs to one worker; in one interpreter, all workers would share it."""

    def __init__(self, app: Any) -> None:
        self._app = app
        #: By id, the newest delivery.
        self.requests: dict[str, Any] = {}

    @property
    def active_requests(self) -> list[Any]:
        return [request for request in [*state.active_requests] if request.app is self._app]

    @property
    def reserved_requests(self) -> list[Any]:
        return [request for request in [*state.reserved_requests] if request.app is self._app]


class _Made(dict[str, Any]):
    """Strategies, each with its own class of requests: made when the first message of their task arrives."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        self._make = make

    def __missing__(self, name: str) -> Any:
        with loading.uninterrupted():
            made = self[name] = self._make(name)
        return made


def _reported(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except Exception:  # noqa: BLE001 - the one above
        return ExceptionInfo()


def _trace(process: Process, job: Job) -> tuple[bool, Any]:
    """Carry out a job in its process; returns whether the tracer itself failed, and what is reported."""
    name, task_id, request, body, content_type, encoding = loads(job.args, process)
    app = process.package.kept["app"]
    process.had.add((task_id, request["retries"]))
    simulation().current.delivered = {**request, "given_at": job.given_at}  # type: ignore[union-attr]
    try:
        value = trace_task_ret(name, task_id, request, body, content_type, encoding, app=app)
        failed = False
    except Exception:  # noqa: BLE001 - as billiard
        failed, value = True, ExceptionInfo()
    return failed, pickle.dumps((value[0], value[1], value[2]) if not failed else value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, own: str) -> None:
        super().__init__(io.BytesIO(data))
        self._own = own

    def find_class(self, module: str, name: str) -> Any:
        first, dot, rest = module.partition(".")
        if first.startswith("simulated_"):
            module = self._own + dot + rest
        return super().find_class(module, name)


def loads(data: bytes, process: Process) -> Any:
    """Load another process's pickle, with the classes of this process's copy of the package."""
    return _Unpickler(data, process.package.name).load()
