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
from celery_singleton_lock.options.rules import NEWEST_POLICIES, UNTIL_AND_WHILE_EXECUTING, WHILE_EXECUTING
from celery_singleton_lock.options.task import Options, raw_attribute
from celery_singleton_lock.task.singleton_task import SingletonTask, is_builtin

#: Pools that lack some time limits: the name, whether the soft limit works, and whether the hard limit does.
_LIMITS: Mapping[str, tuple[bool, bool]] = {
    "threads": (False, False),
    "solo": (False, False),
    "gevent": (False, True),
    "eventlet": (False, True),
}

#: In seconds; a longer lease was probably meant to last for the whole run.
_LONG_TTL = 600.0


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

    @property
    def soft(self) -> Any:
        """The soft time limit in seconds, whether the pool supports it or not."""
        return self.task.soft_time_limit or self.conf.task_soft_time_limit

    @property
    def hard(self) -> Any:
        """The hard time limit, likewise."""
        return self.task.time_limit or self.conf.task_time_limit

    def limits(self) -> Iterator[tuple[str, float, bool]]:
        """The time limits that are set, and whether the pool supports them."""
        works = _LIMITS.get(self.pool, (True, True))
        for name, value, has in zip(("soft", "hard"), (self.soft, self.hard), works, strict=True):
            if value:
                yield name, value, has


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


def _lost_workers(it: TaskContext) -> Iterator[Finding]:
    task = it.task
    if task.reject_on_worker_lost and not it.conf.task_reject_on_worker_lost and not task.acks_late:
        yield it.warning(
            "reject_on_worker_lost does nothing without acks_late: what a killed child was doing is lost",
            "set acks_late=True as well",
        )
    if task.acks_late and not task.reject_on_worker_lost:
        yield it.note(
            "acks_late without reject_on_worker_lost: the message of a killed child counts as done (Celery's default)",
            "set reject_on_worker_lost=True if it should run again",
        )


def _long_ttl(it: TaskContext) -> Iterator[Finding]:
    if it.options.ttl > _LONG_TTL:
        yield it.note(
            f"lock_ttl {it.options.ttl:g} s: the lock of a host that is gone stays for that long; it does not "
            "limit the run",
            "lower lock_ttl: the lock is renewed while the task runs",
        )


def _waiting_beyond_visibility(it: TaskContext) -> Iterator[Finding]:
    visibility = visibility_timeout(it.conf)
    if visibility is not None and it.task.acks_late and it.options.wait >= visibility:
        yield it.warning(
            f"lock_wait {it.options.wait:g} s is not below the broker's visibility timeout of {visibility:g} s: a "
            "message that waits for its lock is delivered again meanwhile",
            "lower lock_wait, or set on_conflict='retry', which waits in the queue",
        )


def _unacknowledged_on_rabbitmq(it: TaskContext) -> Iterator[Finding]:
    if not (it.task.acks_late and is_rabbitmq(it.conf)):
        return
    closes = (
        "on RabbitMQ, which closes the connection of a worker that keeps a message unacknowledged for longer than its "
        f"consumer_timeout ({CONSUMER_TIMEOUT:g} s by default)"
    )
    limit = min((limit for _, limit, _ in it.limits()), default=None)
    if it.options.wait >= CONSUMER_TIMEOUT or (limit is not None and limit >= CONSUMER_TIMEOUT):
        waits = it.options.wait >= CONSUMER_TIMEOUT
        longer = f"lock_wait {it.options.wait:g} s" if waits else f"a time limit of {limit:g} s"
        yield it.warning(
            f"acks_late with {longer} {closes}",
            "raise consumer_timeout in rabbitmq.conf (or x-consumer-timeout of the queue), or split the task",
        )
    elif limit is None:
        yield it.note(
            f"acks_late without a time limit {closes}",
            "set a time limit below it, or raise it in rabbitmq.conf",
        )


def _greenlets_that_reconnect(it: TaskContext) -> Iterator[Finding]:
    # After a lost connection, a greenlet of the pool sends RabbitMQ a request on the connection that the consumer's
    # greenlet reads.
    reduces = it.conf.worker_enable_prefetch_count_reduction
    if it.pool in ("gevent", "eventlet") and is_rabbitmq(it.conf) and reduces:
        yield it.warning(
            f"the {it.pool} pool on RabbitMQ with worker_enable_prefetch_count_reduction: a worker that loses its "
            "connection while tasks run may end",
            "set worker_enable_prefetch_count_reduction=False",
        )


def _limits_that_the_pool_lacks(it: TaskContext) -> Iterator[Finding]:
    if lost := [name for name, _, has in it.limits() if not has]:
        ends = any(has for _, _, has in it.limits())
        hangs = "" if ends else ": a run that hangs keeps its lock as long as its worker lives"
        yield it.warning(
            f"the {it.pool} pool has no {' and no '.join(lost)} time limits{hangs}",
            "use the prefork pool, or time-outs within the task",
        )


def _waiting_beyond_a_limit(it: TaskContext) -> Iterator[Finding]:
    limit = min((limit for _, limit, has in it.limits() if has), default=None)
    if limit is not None and it.options.wait >= limit:
        yield it.warning(
            f"lock_wait {it.options.wait:g} s is not below the time limit of {limit:g} s, which counts the "
            "wait, too: the task is stopped while it still waits",
            "lower lock_wait, or raise the time limit",
        )


def _limits_that_do_not_fit(it: TaskContext) -> Iterator[Finding]:
    if it.soft and it.hard and it.soft >= it.hard:
        yield it.warning(
            f"soft_time_limit {it.soft:g} s is not below time_limit {it.hard:g} s, which kills the child first",
            "lower soft_time_limit",
        )
    if not it.soft and not it.hard:
        yield it.note(
            "no time limit: a run that hangs keeps its lock for as long as its worker lives",
            "set soft_time_limit and time_limit if it can hang",
        )
    elif [(name, has) for name, _, has in it.limits()] == [("hard", True)]:
        yield it.note(
            "a hard time limit and no soft one: the run ends without a chance to clean up (its lock is freed)",
            "set soft_time_limit below time_limit",
        )


def _foreign_request(it: TaskContext) -> Iterator[Finding]:
    if not getattr(symbol_by_name(it.task.Request), "looks_after_its_lock", False):
        yield it.problem(
            f"its Request is {it.task.Request}, which is not a SingletonRequest: on prefork nobody frees the "
            "lock of a child that is killed, nor renews it for a busy one",
            "derive that class from celery_singleton_lock.SingletonRequest",
        )


def _exclusion_given_up(it: TaskContext) -> Iterator[Finding]:
    if it.options.on_unavailable == "run":
        yield it.note(
            "on_unavailable is 'run': while the lock server does not answer, it runs without a lock",
            "leave it at 'retry' if it must never run twice",
        )
    if it.options.on_lock_lost == "warn":
        yield it.note(
            "on_lock_lost is 'warn': a run that has lost its lock goes on, maybe beside another",
            "leave it at 'abort' if it must never run twice, or check self.lock.fence where it writes",
        )


def _retained_for_ever(it: TaskContext) -> Iterator[Finding]:
    if it.options.retain_on_retry and it.task.max_retries is None:
        yield it.note(
            "lock_retain_on_retry with max_retries=None: a task that never succeeds never frees its lock",
            "set max_retries",
        )


def _arguments_without_a_form(it: TaskContext) -> Iterator[Finding]:
    if raw_attribute(it.task, "lock_key") is None and it.task.serializer in ("pickle", "yaml"):
        yield it.note(
            f"its key is made from all arguments, and the serializer {it.task.serializer} also sends objects "
            "without a stable form: a call with such an object is refused (InvalidKey)",
            "set lock_key to the arguments that make two calls the same",
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


def _newest_that_may_be_lost(it: TaskContext) -> Iterator[Finding]:
    if it.options.on_conflict in NEWEST_POLICIES and not it.task.acks_late:
        yield it.note(
            f"on_conflict is {it.options.on_conflict!r} without acks_late: a call that is killed while it "
            "asks for its lock is lost, and what it has superseded does not run either",
            "set acks_late=True and reject_on_worker_lost=True if the newest call must not be lost",
        )


RULES = (
    _reject_of_acknowledged,
    _autoretry_of_lock_errors,
    _lost_workers,
    _long_ttl,
    _waiting_beyond_visibility,
    _unacknowledged_on_rabbitmq,
    _limits_that_the_pool_lacks,
    _waiting_beyond_a_limit,
    _limits_that_do_not_fit,
    _greenlets_that_reconnect,
    _foreign_request,
    _exclusion_given_up,
    _retained_for_ever,
    _arguments_without_a_form,
    _of_sending_without_a_scope,
    _copies_that_wait_and_are_skipped,
    _newest_that_may_be_lost,
)
