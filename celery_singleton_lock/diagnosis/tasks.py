"""Rules for one exclusive task: does it do what was intended, as far as its settings show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from celery.utils.imports import symbol_by_name

from celery_singleton_lock.diagnosis.finding import Finding, Rule, judged
from celery_singleton_lock.errors import LockConflict, LockUnavailable
from celery_singleton_lock.options.app import CONSUMER_TIMEOUT, is_rabbitmq, visibility_timeout
from celery_singleton_lock.options.rules import UNTIL_AND_WHILE_EXECUTING, WHILE_EXECUTING
from celery_singleton_lock.options.task import Options, raw_attribute
from celery_singleton_lock.task.singleton_task import SingletonTask

#: What to do about a message that waits too long in its slot.
_WAIT_IN_THE_QUEUE = "lower lock_wait, or set on_conflict='retry', which waits in the queue"


def exclusive_tasks(app: Any) -> list[Any]:
    """The app's exclusive tasks by name, without Celery's own; its task modules must have been imported."""
    tasks = [task for task in app.tasks.values() if isinstance(task, SingletonTask) and not task.is_builtin]
    return sorted(tasks, key=lambda task: str(task.name))


def lock_key_in_words(task: Any) -> str:
    lock_key = raw_attribute(task, "lock_key")
    if callable(lock_key):
        return f"the callable {getattr(lock_key, '__qualname__', lock_key)}"
    return "all arguments" if lock_key is None else json.dumps(lock_key)


def of_task(task: Any, options: Options) -> list[Finding]:
    """Findings about an exclusive task with these options."""
    return judged(
        task.name,
        (
            options.on_conflict == "reject" and not task.acks_late,
            "warning",
            "on_conflict is 'reject' without acks_late: the message is acknowledged before the lock is "
            "requested, so no dead-letter queue gets it",
            "set acks_late=True, or on_conflict='raise'",
        ),
        *_of_autoretry(task, options),
        *_of_waiting(task, options),
        (
            not getattr(symbol_by_name(task.Request), "looks_after_its_lock", False),
            "problem",
            f"its Request is {task.Request}, which is not a SingletonRequest: on prefork nobody frees the "
            "lock of a child that is killed, nor renews it for a busy one",
            "derive that class from celery_singleton_lock.SingletonRequest",
        ),
        *_of_sending_without_a_scope(task, options),
        (
            options.scope == UNTIL_AND_WHILE_EXECUTING and options.on_conflict == "skip",
            "warning",
            f"lock_scope={UNTIL_AND_WHILE_EXECUTING!r} lets one message wait behind a running one, and "
            "on_conflict='skip' drops it if a worker takes it before that run has ended",
            "set on_conflict='retry', the default of this scope",
        ),
    )


def _of_autoretry(task: Any, options: Options) -> Iterator[Rule]:
    for error, option, instead in (
        (LockConflict, "on_conflict", "on_conflict='retry', with lock_conflict_retries for a bound"),
        (LockUnavailable, "on_unavailable", "on_unavailable='retry'"),
    ):
        yield (
            error in tuple(getattr(task, "autoretry_for", None) or ()),
            "warning",
            f"autoretry_for has {error.__name__}, which is raised before the body: Celery's autoretry does not "
            f"see it (here {option} is {getattr(options, option)!r})",
            f"set {instead}",
        )


def _of_waiting(task: Any, options: Options) -> Iterator[Rule]:
    """A wait for the lock that the broker ends."""
    conf, wait = task.app.conf, f"lock_wait {options.wait:g} s is not below"
    visibility = (visibility_timeout(conf) if task.acks_late else None) or math.inf
    patience = CONSUMER_TIMEOUT if task.acks_late and is_rabbitmq(conf) else math.inf
    yield (
        options.wait >= visibility,
        "warning",
        f"{wait} the broker's visibility timeout of {visibility:g} s: a message that waits for its lock is delivered "
        "again meanwhile",
        _WAIT_IN_THE_QUEUE,
    )
    yield (
        options.wait >= patience,
        "warning",
        f"{wait} the consumer_timeout of RabbitMQ ({patience:g} s by default), which closes the connection of a worker "
        "that keeps a message unacknowledged for longer",
        _WAIT_IN_THE_QUEUE,
    )


def _of_sending_without_a_scope(task: Any, options: Options) -> Iterator[Rule]:
    for name in ("on_duplicate", "lock_queue_ttl", "on_send_unavailable"):
        yield (
            options.scope == WHILE_EXECUTING and raw_attribute(task, name) is not None,
            "warning",
            f"{name} does nothing with lock_scope={WHILE_EXECUTING!r}: no lock is taken when a message is sent",
            "set lock_scope='until_executed', or another scope that begins when a message is sent",
        )
