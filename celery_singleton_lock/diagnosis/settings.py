"""Rules for the settings of an app, and for its tasks as a whole."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock import cleaned
from celery_singleton_lock._celery import consumed_queues
from celery_singleton_lock.backend import Kind
from celery_singleton_lock.diagnosis.finding import Finding, Subject, some
from celery_singleton_lock.diagnosis.tasks import exclusive_tasks
from celery_singleton_lock.options.app import Settings, set_names
from celery_singleton_lock.options.delivery import is_rabbitmq, visibility_timeout
from celery_singleton_lock.options.rules import NEWEST_POLICIES, SETTINGS, TASK_OPTIONS
from celery_singleton_lock.options.task import options_for, raw_attribute
from celery_singleton_lock.options.words import misspelled_setting
from celery_singleton_lock.task.singleton_task import SingletonTask

#: From this version on, a signal handler that raises can strike inside of `with lock:`.
UNSAFE_PYTHON = (3, 14)


@dataclass(frozen=True, slots=True)
class AppContext:
    """An app whose task modules have been imported.

    Attributes:
        leaders: how many beats lead its schedule; None if no server was asked.
        recorded: the entries of which the server records what beat has sent.
    """

    app: Any
    settings: Settings
    leaders: int | None = None
    recorded: Collection[str] = ()


def switched_off(it: AppContext) -> Iterator[Finding]:
    """Exclusive tasks that run without a lock."""
    if not it.settings.enabled:
        yield Subject("singleton_lock_enabled").warning(
            "it is False: exclusive tasks run without a lock",
            "remove it, unless this is intended",
        )


def kept_in_memory(it: AppContext) -> Iterator[Finding]:
    """Locks that no other process can see."""
    if it.settings.enabled and it.settings.backend.in_memory:
        yield Subject("singleton_lock_backend").warning(
            "the locks are in memory, which processes do not share: each has its own",
            "set singleton_lock_backend to the URL of a Redis",
        )


def forgotten_too_soon(it: AppContext) -> Iterator[Finding]:
    """Records of finished messages that expire before the broker may deliver a copy."""
    visibility, remembered = visibility_timeout(it.app.conf), it.settings.done_ttl
    if visibility is not None and remembered < visibility:
        yield Subject("singleton_lock_done_ttl").problem(
            f"finished messages are remembered for {remembered:g} s, but the broker redelivers a message "
            f"that was not acknowledged within {visibility:g} s (its visibility timeout): a copy that comes "
            "then runs again",
            f"remove the setting, or set it to {visibility:g} or more",
        )


def _misspelled(it: AppContext) -> Iterator[Finding]:
    """Settings that nobody reads."""
    for name in sorted(set_names(it.app.conf)):
        if (meant := misspelled_setting(name, SETTINGS)) is not None:
            yield Subject(cleaned.text(name)).warning(
                "nothing reads this setting", f"write {meant}, if that is what you mean"
            )


def _broadcasts(it: AppContext) -> Iterator[Finding]:
    """Queues whose messages every worker gets, on a broker that does not say which queue a message comes from."""
    queues = consumed_queues(it.app)
    fanout = [name for name, queue in queues.items() if queue.exchange is not None and queue.exchange.type == "fanout"]
    if fanout and not is_rabbitmq(it.app.conf):
        others = sorted(name for name in queues if name not in fanout) or [str(it.app.conf.task_default_queue)]
        yield Subject(f"task_queues {some(fanout)}").warning(
            "every worker gets what is sent there; on this broker, a message that has to wait for its lock "
            f"cannot go back to one worker alone, and goes to the queue {others[0]}, where any worker may "
            "take it",
            "send exclusive tasks to other queues, or use RabbitMQ",
        )


def _python_is_too_new(_: AppContext) -> Iterator[Finding]:
    """There, a signal's handler that raises may leave a mutex locked: see docs/install.md."""
    python = (sys.version_info.major, sys.version_info.minor)
    if python >= UNSAFE_PYTHON:
        yield Subject("Python {}.{}".format(*python)).warning(
            "a time limit or an abort may stop the heartbeat here, and the worker's tasks then lose their locks",
            "use an older one: 3.10 to 3.13",
        )


def _without_the_base(it: AppContext) -> Iterator[Finding]:
    """Plain tasks with options of exclusive ones."""
    for task in it.app.tasks.values():
        given = [name for name in TASK_OPTIONS if getattr(task, name, None) is not None]
        if given and not isinstance(task, SingletonTask):
            yield Subject(cleaned.text(task.name)).warning(
                f"it has {', '.join(given)}, but it is a plain task, which takes no lock",
                "set base=SingletonTask",
            )


def _shared_names(it: AppContext) -> Iterator[Finding]:
    by_name: defaultdict[str, list[Any]] = defaultdict(list)
    for task in exclusive_tasks(it.app):
        by_name[task.lock_name or task.name].append(task)
    for name, tasks in by_name.items():
        yield from _of_one_name(f"lock_name {name}", tasks, it.settings)


def _of_one_name(subject: str, tasks: Sequence[Any], settings: Settings) -> Iterator[Finding]:
    if forms := _where_they_differ((task.name, form) for task in tasks if (form := _form(task)) is not None):
        yield Subject(subject).problem(
            f"the tasks that share it make their keys in different ways, and so never exclude each other: {forms}",
            "give them one lock_key with the same argument names, or templates such as 'tenant:{tenant_id}'",
        )
    options = {task.name: options_for(task, settings) for task in tasks}
    if limits := _where_they_differ((name, str(of.limit)) for name, of in options.items()):
        yield Subject(subject).warning(
            f"the tasks that share it have different lock_limit, and each goes by its own: {limits}",
            "give them one lock_limit",
        )
    ttls = _where_they_differ((name, f"{of.ttl:g} s") for name, of in options.items())
    if ttls and settings.backend.kind is Kind.REDLOCK:
        yield Subject(subject).problem(
            "the tasks that share it have different lock_ttl on a Redlock, where a node that came back empty "
            f"has no vote for the ttl of the requested lock: {ttls}",
            "give them one lock_ttl",
        )


def _newest_on_a_redlock(it: AppContext) -> Iterator[Finding]:
    if it.settings.backend.kind is not Kind.REDLOCK:
        return
    for task in exclusive_tasks(it.app):
        policy = options_for(task, it.settings).on_conflict
        if policy in NEWEST_POLICIES:
            yield Subject(task.name).problem(
                f"on_conflict is {policy!r}, but the locks are on a Redlock, whose nodes would not agree on "
                "an order: every call fails with InvalidOption",
                "set on_conflict='retry', or singleton_lock_backend to one server, Sentinels or a cluster",
            )


def _where_they_differ(values: Iterable[tuple[str, str]]) -> str:
    """Each value, with some of the names that have it; empty if all have the same value."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in values:
        names[value].append(name)
    return "; ".join(f"{value} for {some(having)}" for value, having in names.items()) if len(names) > 1 else ""


def _form(task: Any) -> str | None:
    """How a task's key is made, so that two tasks can be compared; None if that is unknown."""
    lock_key = raw_attribute(task, "lock_key")
    if callable(lock_key):
        return None
    if isinstance(lock_key, str):
        return "a template"
    try:
        names = inspect.signature(task.run).parameters if lock_key is None else lock_key
    except (TypeError, ValueError):
        return None  # A function in C.
    return f"({', '.join(sorted(names))})"


RULES = (
    switched_off,
    kept_in_memory,
    forgotten_too_soon,
    _misspelled,
    _python_is_too_new,
    _without_the_base,
    _shared_names,
    _newest_on_a_redlock,
    _broadcasts,
)

#: The rules for a starting worker. It knows its pool, and itself refuses locks in memory that its processes would not
#: share.
AT_START = tuple(rule for rule in RULES if rule is not kept_in_memory)
