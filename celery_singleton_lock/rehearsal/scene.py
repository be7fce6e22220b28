"""The set-up for one fault: two workers with a queue each, the messages that are sent to them, and what happened."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from celery import uuid
from celery.signals import before_task_publish

from celery_singleton_lock import clock
from celery_singleton_lock._celery import keeps_results
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.journal_entry import REFUSALS
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.rehearsal import history
from celery_singleton_lock.rehearsal.history import RAISED, RETRIED, Line, Run
from celery_singleton_lock.rehearsal.proxy import Detour
from celery_singleton_lock.rehearsal.witness import VARIABLE, Orders
from celery_singleton_lock.rehearsal.worker import Worker
from celery_singleton_lock.runtime import Runtime

#: Seconds between two looks at what has happened.
LOOK_EVERY = 0.05

#: The time limit for a task that has a time limit, since its runs last until the fault is over.
NO_LIMIT = 86_400

#: The most simultaneous calls to fill a lock that several may hold.
MOST_CALLS = 8


class RehearsalFailed(SingletonLockError):
    """A fault could not be tried: the workers did not start, or the task did not run.

    Attributes:
        log: the last output of a worker.
    """

    def __init__(self, why: str, workers: Sequence[Worker]) -> None:
        super().__init__(f"{why}; the last output of a worker is above")
        self.log = next((worker for worker in workers if worker.has_ended), workers[0]).last_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """What is rehearsed.

    Attributes:
        task: the user's task.
        args, kwargs: the arguments of the calls.
        call: the lock options of the calls.
        options: the resulting options.
        runtime: the app's locks.
        celery: the options of `celery` that name the app.
        pool: the pool of the workers.
        patience: seconds within which everything that should happen must happen.
    """

    task: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    call: Mapping[str, Any] | None
    options: Options
    runtime: Runtime
    celery: Sequence[str]
    pool: str
    patience: float

    @property
    def calls(self) -> int:
        """How many calls it takes until one of them finds the lock held."""
        return min(self.options.limit + 1, MOST_CALLS)

    @property
    def longest(self) -> float:
        """The longest time in seconds that a fault lasts, with all that follows."""
        return 3 * self.options.ttl + 3 * self.patience


class Message(NamedTuple):
    """Everything needed to send a message again."""

    headers: Mapping[str, Any]
    body: Any
    properties: Mapping[str, Any]


@dataclass(eq=False)
class Scene:
    """One fault's workers and messages.

    Attributes:
        play: what is rehearsed.
        orders: the orders for the workers.
        detour: the proxy between the lock server and the workers.
        workers: the two workers.
        sent: the ids of the messages that must reach an end.
        cut: when runs were killed, by name.
        broken: the promises that were broken, in words.
        notes: other remarks.
        recovery: seconds from the fault until the lock was free, or the task ran again.
        messages: the messages as they were sent, by id.
    """

    play: Play
    orders: Orders
    detour: Detour
    workers: list[Worker] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    cut: dict[str, float] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recovery: float | None = None
    messages: dict[str, Message] = field(default_factory=dict)

    @property
    def lines(self) -> list[Line]:
        return history.read(self.orders.history)

    @property
    def runs(self) -> list[Run]:
        return history.runs(self.lines)

    def send(self, worker: int) -> str:
        """Call the task on this worker; returns the id of the message."""
        task, play = self.play.task, self.play
        limits = {name: NO_LIMIT for name in ("time_limit", "soft_time_limit") if _is_limited(task, name)}
        given: dict[str, Any] = {"queue": self.workers[worker].queue, **limits}
        if play.call:
            given["singleton_lock"] = dict(play.call)
        with self._keeping_message(task_id := uuid()):
            task.apply_async(list(play.args), dict(play.kwargs), task_id=task_id, **given)
        self.sent.append(task_id)
        return task_id

    def send_again(self, task_id: str) -> None:
        """Deliver a message again, as brokers do, to the second worker."""
        message = self.messages[task_id]
        app = self.play.task.app
        with app.producer_or_acquire() as producer:
            queue = app.amqp.queues[self.workers[1].queue]
            producer.publish(
                message.body,
                exchange=queue.exchange,
                routing_key=queue.routing_key,
                serializer=self.play.task.serializer or app.conf.task_serializer,
                headers=dict(message.headers),
                declare=[queue],
                **message.properties,
            )

    def begun(self, task_id: str) -> Run:
        """The run of a message, as soon as it has begun.

        Raises:
            RehearsalFailed: it does not begin.
        """
        if not self.until(lambda: self.of(task_id)):
            raise RehearsalFailed(f"the task did not run within {self.play.patience:g} s", self.workers)
        return self.of(task_id)[-1]

    def of(self, task_id: str) -> list[Run]:
        return [run for run in self.runs if run.began.task_id == task_id]

    def has_run_to_its_end(self, run: Run) -> bool:
        return any(it.began.run == run.began.run and it.ended for it in self.runs)

    def met(self, task_id: str) -> int:
        """How many copies of a message have come to a worker, including requeued copies."""
        return sum(line.what == "met" and line.task_id == task_id for line in self.lines)

    def holders(self) -> set[int]:
        """The processes that hold a lock; without locks that are kept on purpose while no task runs."""
        keys = {run.began.key for run in self.runs if run.began.key}
        held = [lock for key in keys for lock in self.play.runtime.store.held(key, limit=self.play.options.limit)]
        return {lock.holder.pid for lock in held if lock.holder is not None and lock.holder.pid}

    def until(self, true: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait until `true` returns a true value; whether it did."""
        deadline = clock.now() + (self.play.patience if seconds is None else seconds)
        while not true():
            if clock.now() > deadline:
                return False
            clock.sleep(LOOK_EVERY)
        return True

    def expect(self, is_so: object, otherwise: str) -> None:
        """Check a promise; `otherwise` says what happened if it was broken."""
        if not is_so:
            self.broken.append(otherwise)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def let_end(self) -> float:
        """Let runs end from now on; returns the current time."""
        self.orders.end.touch()
        return clock.now()

    def excuse(self, task_id: str) -> None:
        """Do not expect this message to reach an end: its options, or Celery's, allow that."""
        self.sent.remove(task_id)

    def close(self) -> None:
        """Let everything end, and check what must hold after every fault."""
        self.let_end()
        if self.until(lambda: all(map(self.has_ended, self.sent))):
            self.expect(self.until(lambda: not self.holders(), self.play.options.ttl + 5.0), "a lock was left held")
        else:
            lost = sum(not self.has_ended(task_id) for task_id in self.sent)
            self.broken.append(f"{lost} of {len(self.sent)} calls reached no end within {self.play.patience:g} s")
        self.expect(not self.overlaps, f"{self.overlaps} overlaps")
        self.expect(
            history.fences_grow(self.runs) or self.play.options.limit > 1, "a later run had a lower fencing token"
        )
        for how, words in ((RAISED, "failed with its own error"), (RETRIED, "asked for a retry itself")):
            if any(run.ended and run.ended.about == how for run in self.runs):
                self.note(f"the task {words}")

    @property
    def overlaps(self) -> int:
        return history.overlaps(self.runs, self.play.options.limit, self.cut)

    def has_ended(self, task_id: str) -> bool:
        """Whether a message ran to an end, was refused for good, or failed."""
        return any(
            line.what in ("ended", "failed", "succeeded") or (line.what == "refused" and line.about in REFUSALS)
            for line in self.lines
            if line.task_id == task_id
        )

    @contextmanager
    def _keeping_message(self, task_id: str) -> Iterator[None]:
        def keep(headers: Any, body: Any, properties: Any, **_: Any) -> None:
            self.messages[task_id] = Message(dict(headers), body, dict(properties))

        before_task_publish.connect(keep)
        try:
            yield
        finally:
            before_task_publish.disconnect(keep)


@contextmanager
def scene(play: Play, *, cut_off: bool) -> Iterator[Scene]:
    """Two workers that are ready; nothing is left of them afterwards.

    Args:
        play: what is rehearsed.
        cut_off: whether the workers reach the lock server through a proxy.

    Raises:
        RehearsalFailed: a worker does not start.
    """
    name = f"rehearsal-{secrets.token_hex(4)}"
    with ExitStack() as exits:
        directory = exits.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-"))
        detour = exits.enter_context(Detour(play.runtime.settings.backend.urls if cut_off else ()))
        prefix = f"{play.runtime.settings.prefix[:60]}:{name}"
        orders = Orders(directory, play.task.name, prefix, detour.backend, play.longest, os.getpid())
        made = Scene(play, orders, detour)
        exits.callback(_forget, play, made)
        for number in range(2):
            made.workers.append(exits.enter_context(_worker(play, orders, f"{name}-{number}")))
        exits.callback(_dismiss, made)
        _wait_until_ready(made)
        yield made


def _worker(play: Play, orders: Orders, name: str) -> Worker:
    slots = 1 if play.pool == "solo" else play.calls
    log = Path(orders.directory, f"{name}.log")
    options = (play.celery, ("-P", play.pool, "-c", str(slots)))
    return Worker(name, options=options, environment={VARIABLE: orders.dumps()}, log=log)


def _wait_until_ready(made: Scene) -> None:
    def ready() -> bool:
        return sum(line.what == "ready" for line in made.lines) == len(made.workers)

    made.until(lambda: ready() or any(worker.has_ended for worker in made.workers))
    if not ready():
        raise RehearsalFailed("the workers did not start", made.workers)


def _dismiss(made: Scene) -> None:
    """Shut down both workers at once, so that they return the messages that they hold to the broker."""
    made.let_end()
    made.detour.speak()
    for worker in made.workers:
        worker.shut_down()


def _forget(play: Play, made: Scene) -> None:
    """Leave nothing on the broker, nor in the result backend."""
    app = play.task.app
    if keeps_results(play.task.backend):
        for task_id in made.messages:
            play.task.AsyncResult(task_id).forget()
    with app.connection_for_write() as connection:
        for worker in made.workers:
            queue = app.amqp.queues[worker.queue](connection.default_channel)
            queue.declare()  # kombu's virtual brokers delete only bindings that this channel knows.
            queue.delete()
            if queue.exchange.name == queue.name:
                queue.exchange.delete()


def _is_limited(task: Any, name: str) -> bool:
    return bool(getattr(task, name, None) or task.app.conf.get(f"task_{name}"))
