"""Rules for one exclusive task: does it do what was intended, as far as its settings show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery.utils.imports import symbol_by_name

from celery_singleton_lock.diagnosis.finding import Finding, Subject
from celery_singleton_lock.errors import LockConflict, LockUnavailable
from celery_singleton_lock.options.delivery import CONSUMER_TIMEOUT, is_rabbitmq, visibility_timeout
from celery_singleton_lock.options.rules import UNTIL_AND_WHILE_EXECUTING, WHILE_EXECUTING
from celery_singleton_lock.options.task import Options, raw_attribute
from celery_singleton_lock.task.singleton_task import SingletonTask, is_builtin

#: Whether the soft time limit works in a pool, and whether the hard one does; in other pools both do.
_LIMITS: Mapping[str, tuple[bool, bool]] = {
    "threads": (False, False),
    "solo": (False, False),
    "gevent": (False, True),
    "eventlet": (False, True),
}
#: What to do about a message that waits too long in its slot.
_WAIT_IN_THE_QUEUE = "lower lock_wait, or set on_conflict='retry', which waits in the queue"


def exclusive_tasks(app: Any) -> list[Any]:
    """The app's exclusive tasks by name, without Celery's own; its task modules must have been imported."""
    tasks = [task for task in app.tasks.values() if isinstance(task, SingletonTask) and not is_builtin(task.name)]
    return sorted(tasks, key=lambda task: str(task.name))


def lock_key_in_words(task: Any) -> str:
    lock_key = raw_attribute(task, "lock_key")
    if callable(lock_key):
        return f"the callable {getattr(lock_key, '__qualname__', lock_key)}"
    return "all arguments" if lock_key is None else json.dumps(lock_key)


@dataclass(frozen=True, slots=True)
class TaskContext(Subject):
    """An exclusive task, its options, and the pool of its workers, by its name for `celery worker -P`."""

    task: Any
    options: Options
    pool: str

    @property
    def conf(self) -> Any:
        return self.task.app.conf

    def limits(self) -> Iterator[float]:
        """The time limits in seconds that are set, and that the pool supports."""
        task, conf = self.task, self.conf
        soft, hard = _LIMITS.get(self.pool, (True, True))
        if soft and (limit := task.soft_time_limit or conf.task_soft_time_limit):
            yield limit
        if hard and (limit := task.time_limit or conf.task_time_limit):
            yield limit


def _reject_of_acknowledged(it: TaskContext) -> Iterator[Finding]:
    if it.options.on_conflict == "reject" and not it.task.acks_late:
        yield it.warning(
            "on_conflict is 'reject' without acks_late: the message is acknowledged before the lock is "
            "requested, so no dead-letter queue gets it",
            "set acks_late=True, or on_conflict='raise'",
        )


def _autoretry_of_lock_errors(it: TaskContext) -> Iterator[Finding]:
    for error, option, instead in (
        (LockConflict, "on_conflict", "on_conflict='retry', with lock_conflict_retries for a bound"),
        (LockUnavailable, "on_unavailable", "on_unavailable='retry'"),
    ):
        if error in tuple(getattr(it.task, "autoretry_for", None) or ()):
            yield it.warning(
                f"autoretry_for has {error.__name__}, which is raised before the body: Celery's autoretry does not "
                f"see it (here {option} is {getattr(it.options, option)!r})",
                f"set {instead}",
            )


def _waiting_beyond_the_brokers_patience(it: TaskContext) -> Iterator[Finding]:
    if not it.task.acks_late:
        return
    visibility = visibility_timeout(it.conf)
    if visibility is not None and it.options.wait >= visibility:
        yield it.warning(
            f"lock_wait {it.options.wait:g} s is not below the broker's visibility timeout of {visibility:g} s: a "
            "message that waits for its lock is delivered again meanwhile",
            _WAIT_IN_THE_QUEUE,
        )
    if is_rabbitmq(it.conf) and it.options.wait >= CONSUMER_TIMEOUT:
        yield it.warning(
            f"lock_wait {it.options.wait:g} s is not below the consumer_timeout of RabbitMQ ({CONSUMER_TIMEOUT:g} s by "
            "default), which closes the connection of a worker that keeps a message unacknowledged for longer",
            _WAIT_IN_THE_QUEUE,
        )


def _waiting_beyond_a_limit(it: TaskContext) -> Iterator[Finding]:
    limit = min(it.limits(), default=None)
    if limit is not None and it.options.wait >= limit:
        yield it.warning(
            f"lock_wait {it.options.wait:g} s is not below the time limit of {limit:g} s, which counts the "
            "wait, too: the task is stopped while it still waits",
            "lower lock_wait, or raise the time limit",
        )


def _foreign_request(it: TaskContext) -> Iterator[Finding]:
    if not getattr(symbol_by_name(it.task.Request), "looks_after_its_lock", False):
        yield it.problem(
            f"its Request is {it.task.Request}, which is not a SingletonRequest: on prefork nobody frees the "
            "lock of a child that is killed, nor renews it for a busy one",
            "derive that class from celery_singleton_lock.SingletonRequest",
        )


def _of_sending_without_a_scope(it: TaskContext) -> Iterator[Finding]:
    if it.options.scope == WHILE_EXECUTING:
        for name in ("on_duplicate", "lock_queue_ttl", "on_send_unavailable"):
            if raw_attribute(it.task, name) is not None:
                yield it.warning(
                    f"{name} does nothing with lock_scope={WHILE_EXECUTING!r}: no lock is taken when a message is sent",
                    "set lock_scope='until_executed', or another scope that begins when a message is sent",
                )


def _copies_that_wait_and_are_skipped(it: TaskContext) -> Iterator[Finding]:
    if it.options.scope == UNTIL_AND_WHILE_EXECUTING and it.options.on_conflict == "skip":
        yield it.warning(
            f"lock_scope={UNTIL_AND_WHILE_EXECUTING!r} lets one message wait behind a running one, and "
            "on_conflict='skip' drops it if a worker takes it before that run has ended",
            "set on_conflict='retry', the default of this scope",
        )


RULES = (
    _reject_of_acknowledged,
    _autoretry_of_lock_errors,
    _waiting_beyond_the_brokers_patience,
    _waiting_beyond_a_limit,
    _foreign_request,
    _of_sending_without_a_scope,
    _copies_that_wait_and_are_skipped,
)
