"""Whether the exclusive tasks of an app are set up so that they do what somebody meant, as far as settings can tell.

Nothing is connected to. A worker logs what is more than a note when it starts; `celery locks audit` shows it all.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery.utils.imports import symbol_by_name

from celery_singleton_lock.backend import Kind
from celery_singleton_lock.diagnosis.finding import Finding, worst_first
from celery_singleton_lock.errors import LockConflict, LockUnavailable
from celery_singleton_lock.options.app import Settings
from celery_singleton_lock.options.delivery import CONSUMER_TIMEOUT, is_rabbitmq, visibility_timeout
from celery_singleton_lock.options.task import Options, options_for, raw_attribute
from celery_singleton_lock.task.singleton_task import SingletonTask, is_builtin

#: Pools that have only some of the time limits: name, whether a soft one works, whether a hard one does.
_LIMITS: Mapping[str, tuple[bool, bool]] = {
    "threads": (False, False),
    "solo": (False, False),
    "gevent": (False, True),
    "eventlet": (False, True),
}

#: A lease that is longer than this was probably meant to last for the whole run, seconds.
_LONG_TTL = 600.0

#: Tasks that are named of many.
_TOLD = 3


@dataclass(frozen=True, slots=True)
class Audited:
    """An exclusive task.

    Attributes:
        task: its name.
        lock: what it locks and how, for people.
        findings: worst first.
    """

    task: str
    lock: str
    findings: Sequence[Finding]

    @property
    def verdict(self) -> str:
        """How bad the worst is; "ok" where nothing is more than a note."""
        worst = self.findings[0].severity if self.findings else "note"
        return "ok" if worst == "note" else worst


def exclusive_tasks(app: Any) -> list[Any]:
    """The app's exclusive tasks by name, Celery's own left out; its modules of tasks must have been imported."""
    tasks = [task for task in app.tasks.values() if isinstance(task, SingletonTask) and not is_builtin(task.name)]
    return sorted(tasks, key=lambda task: str(task.name))


def audit_tasks(app: Any, settings: Settings, *, pool: str) -> list[Audited]:
    """Each exclusive task, with what was found about it.

    Args:
        app: whose modules of tasks have been imported.
        settings: of its locks.
        pool: of the workers, as `celery worker -P` calls it.
    """
    return [_audited(task, settings, pool) for task in exclusive_tasks(app)]


def audit_app(app: Any, settings: Settings) -> list[Finding]:
    """What was found about the app as a whole, worst first."""
    return worst_first(
        [*_app_wide(app, settings), *_of_shared_names(app, settings), *_of_beat(app), *_of_broadcasts(app)]
    )


def warnings(app: Any, settings: Settings, *, pool: str) -> list[Finding]:
    """All that is more than a note; what is true of several tasks is said once. See `audit_tasks`."""
    of_tasks = [finding for audited in audit_tasks(app, settings, pool=pool) for finding in audited.findings]
    return [finding for finding in (*audit_app(app, settings), *_merged(of_tasks)) if finding.severity != "note"]


def pool_name(pool: Any) -> str:
    """A pool as `celery worker -P` calls it, of its class or of what the setting `worker_pool` has."""
    text = pool if isinstance(pool, str) else str(pool.__module__)
    name = text.partition(":")[0].rpartition(".")[2]
    return {"thread": "threads", "processes": "prefork"}.get(name, name)


def has_exclusive_beat(conf: Any) -> bool:
    """Whether the setting `beat_scheduler` is our scheduler; what `celery beat -S` says is not known here."""
    return _scheduler(conf) == "exclusive" or _scheduler(conf).endswith("ExclusiveScheduler")


def shown_lock_key(task: Any) -> str:
    """A task's `lock_key`, for people."""
    lock_key = raw_attribute(task, "lock_key")
    if callable(lock_key):
        return f"the callable {getattr(lock_key, '__qualname__', lock_key)}"
    return "all arguments" if lock_key is None else json.dumps(lock_key)


def _audited(task: Any, settings: Settings, pool: str) -> Audited:
    options = options_for(task, settings)
    lock = [
        *([f"lock_name {task.lock_name}"] if task.lock_name else []),
        f"key: {shown_lock_key(task)}",
        f"ttl {options.ttl:g} s",
        *([f"waits {options.wait:g} s"] if options.wait else []),
        f"on_conflict {getattr(options.on_conflict, '__qualname__', options.on_conflict)}",
        *([f"limit {options.limit}"] if options.limit > 1 else []),
    ]
    findings = [
        *_of_conflicts(task, options),
        *_of_delivery(task, options),
        *_of_time_limits(task, options, pool),
        *_of_reconnecting(task, pool),
        *_of_choices(task, options),
    ]
    return Audited(task.name, ", ".join(lock), worst_first(findings))


def _of_conflicts(task: Any, options: Options) -> Iterator[Finding]:
    if options.on_conflict == "reject" and not task.acks_late:
        yield Finding(
            *("warning", task.name),
            "on_conflict is 'reject' without acks_late: the message is acknowledged before the lock is asked for, so "
            "that no dead-letter queue gets it",
            "set acks_late=True, or on_conflict='raise'",
        )
    for error, option, instead in (
        (LockConflict, "on_conflict", "on_conflict='retry', with lock_conflict_retries for a bound"),
        (LockUnavailable, "on_unavailable", "on_unavailable='retry'"),
    ):
        if error in tuple(getattr(task, "autoretry_for", None) or ()):
            yield Finding(
                *("warning", task.name),
                f"autoretry_for has {error.__name__}, which is raised before the body: Celery's autoretry does not "
                f"see it (here {option} is {getattr(options, option)!r})",
                f"set {instead}",
            )


def _of_delivery(task: Any, options: Options) -> Iterator[Finding]:
    conf = task.app.conf
    visibility = visibility_timeout(conf)
    if task.reject_on_worker_lost and not conf.task_reject_on_worker_lost and not task.acks_late:
        yield Finding(
            *("warning", task.name),
            "reject_on_worker_lost does nothing without acks_late: what a killed child was doing is lost",
            "set acks_late=True as well",
        )
    if task.acks_late and not task.reject_on_worker_lost:
        yield Finding(
            *("note", task.name),
            "acks_late without reject_on_worker_lost: the message of a killed child counts as done (Celery's default)",
            "set reject_on_worker_lost=True if it is to run again",
        )
    if options.ttl > _LONG_TTL:
        yield Finding(
            *("note", task.name),
            f"lock_ttl {options.ttl:g} s: so long the lock of a host that is gone stays; it does not limit the run",
            "lower lock_ttl: it is renewed while the task runs",
        )
    if visibility is not None and task.acks_late and options.wait >= visibility:
        yield Finding(
            *("warning", task.name),
            f"lock_wait {options.wait:g} s is not below the broker's visibility timeout of {visibility:g} s: a message "
            "that waits for its lock is delivered again meanwhile",
            "lower lock_wait, or set on_conflict='retry', which waits in the queue",
        )

    yield from _of_consumer_timeout(task, options)


def _of_consumer_timeout(task: Any, options: Options) -> Iterator[Finding]:
    """What RabbitMQ does to a worker that keeps a message unacknowledged for too long: it closes the connection."""
    limits = [
        task.time_limit,
        task.soft_time_limit,
        *(task.app.conf[f"task_{name}time_limit"] for name in ("", "soft_")),
    ]
    limit = min((one for one in limits if one), default=None)
    if not (task.acks_late and is_rabbitmq(task.app.conf)):
        return
    if options.wait >= CONSUMER_TIMEOUT or (limit is not None and limit >= CONSUMER_TIMEOUT):
        longer = f"lock_wait {options.wait:g} s" if options.wait >= CONSUMER_TIMEOUT else f"a time limit of {limit:g} s"
        yield Finding(
            *("warning", task.name),
            f"acks_late with {longer} on RabbitMQ, which closes the connection of a worker that keeps a message "
            f"unacknowledged for longer than its consumer_timeout ({CONSUMER_TIMEOUT:g} s by default)",
            "raise consumer_timeout in rabbitmq.conf (or x-consumer-timeout of the queue), or split the task",
        )
    elif limit is None:
        yield Finding(
            *("note", task.name),
            "acks_late without a time limit on RabbitMQ, which closes the connection of a worker that keeps a message "
            f"unacknowledged for longer than its consumer_timeout ({CONSUMER_TIMEOUT:g} s by default)",
            "set a time limit below it, or raise it in rabbitmq.conf",
        )


def _of_reconnecting(task: Any, pool: str) -> Iterator[Finding]:
    """What Celery does after a lost connection: a greenlet of the pool asks RabbitMQ something on the connection that
    the consumer's greenlet reads.
    """
    conf = task.app.conf
    if pool in ("gevent", "eventlet") and is_rabbitmq(conf) and conf.worker_enable_prefetch_count_reduction:
        yield Finding(
            *("warning", task.name),
            f"the {pool} pool on RabbitMQ with worker_enable_prefetch_count_reduction: a worker that loses its "
            "connection while tasks run may end",
            "set worker_enable_prefetch_count_reduction=False",
        )


def _of_time_limits(task: Any, options: Options, pool: str) -> Iterator[Finding]:
    conf = task.app.conf
    soft = task.soft_time_limit or conf.task_soft_time_limit
    hard = task.time_limit or conf.task_time_limit
    has_soft, has_hard = _LIMITS.get(pool, (True, True))
    limits = (("soft", soft, has_soft), ("hard", hard, has_hard))
    lost = [name for name, value, works in limits if value and not works]
    effective = [value for _, value, works in limits if value and works]
    if lost:
        hangs = "" if effective else ": a run that hangs keeps its lock as long as its worker lives"
        yield Finding(
            *("warning", task.name),
            f"the {pool} pool has no {' and no '.join(lost)} time limits{hangs}",
            "use the prefork pool, or time-outs within the task",
        )
    limit = min(effective, default=None)
    if limit is not None and options.wait >= limit:
        yield Finding(
            *("warning", task.name),
            f"lock_wait {options.wait:g} s is not below the time limit of {limit:g} s, in which waiting counts: it is "
            "stopped while it still waits",
            "lower lock_wait, or raise the time limit",
        )
    if soft and hard and soft >= hard:
        yield Finding(
            *("warning", task.name),
            f"soft_time_limit {soft:g} s is not below time_limit {hard:g} s, which kills the child first",
            "lower soft_time_limit",
        )
    if not soft and not hard:
        yield Finding(
            *("note", task.name),
            "no time limit: a run that hangs keeps its lock for as long as its worker lives",
            "set soft_time_limit and time_limit if it can hang",
        )
    elif hard and not soft and has_hard:
        yield Finding(
            *("note", task.name),
            "a hard time limit and no soft one: the run ends without a chance to clean up (its lock is freed)",
            "set soft_time_limit below time_limit",
        )


def _of_choices(task: Any, options: Options) -> Iterator[Finding]:
    if not getattr(symbol_by_name(task.Request), "looks_after_its_lock", False):
        yield Finding(
            *("problem", task.name),
            f"its Request is {task.Request}, which is no SingletonRequest: on prefork nobody frees the lock of a "
            "child that is killed, nor renews it for one that is busy",
            "derive that class from celery_singleton_lock.SingletonRequest",
        )
    if options.on_unavailable == "run":
        yield Finding(
            *("note", task.name),
            "on_unavailable is 'run': while the lock server does not answer, it runs without a lock",
            "leave it at 'retry' if it must never run twice",
        )
    if options.on_lock_lost == "warn":
        yield Finding(
            *("note", task.name),
            "on_lock_lost is 'warn': a run that has lost its lock goes on, maybe beside another",
            "leave it at 'abort' if it must never run twice, or let what it writes to check self.lock.fence",
        )
    if options.retain_on_retry and task.max_retries is None:
        yield Finding(
            *("note", task.name),
            "lock_retain_on_retry with max_retries=None: a task that never succeeds never frees its lock",
            "set max_retries",
        )
    if raw_attribute(task, "lock_key") is None and task.serializer in ("pickle", "yaml"):
        yield Finding(
            *("note", task.name),
            f"its key is made of all arguments, and the serializer {task.serializer} also sends objects that have no "
            "stable form: a call with one is refused (InvalidKey)",
            "set lock_key to the arguments that make two calls the same",
        )


def _app_wide(app: Any, settings: Settings) -> Iterator[Finding]:
    visibility = visibility_timeout(app.conf)
    if not settings.enabled:
        yield Finding(
            *("warning", "singleton_lock_enabled"),
            "it is False: exclusive tasks run without a lock",
            "remove it, unless that is meant",
        )
    if visibility is not None and settings.done_ttl < visibility:
        yield Finding(
            *("problem", "singleton_lock_done_ttl"),
            f"finished messages are remembered for {settings.done_ttl:g} s, and the broker delivers one again that was "
            f"not acknowledged after {visibility:g} s (its visibility timeout): a copy that comes then runs again",
            f"remove the setting, or set it to {visibility:g} or more",
        )
    if app.conf.result_serializer == "pickle":
        yield Finding(
            *("warning", "result_serializer"),
            "it is 'pickle', and so are the return values that the lock server keeps for copies of finished messages: "
            "who may write there can run code in the workers",
            "set result_serializer='json'",
        )


def _of_shared_names(app: Any, settings: Settings) -> Iterator[Finding]:
    by_name: defaultdict[str, list[Any]] = defaultdict(list)
    for task in exclusive_tasks(app):
        by_name[task.lock_name or task.name].append(task)
    for name, tasks in by_name.items():
        subject = f"lock_name {name}"
        forms = {task.name: form for task in tasks if (form := _form(task)) is not None}
        if len(set(forms.values())) > 1:
            yield Finding(
                *("problem", subject),
                f"tasks share it whose keys are made in different ways, and so never exclude each other: "
                f"{_each(forms)}",
                "give them one lock_key of the same argument names, or templates such as 'tenant:{tenant_id}'",
            )
        limits = {task.name: options_for(task, settings).limit for task in tasks}
        if len(set(limits.values())) > 1:
            yield Finding(
                *("warning", subject),
                f"tasks share it with different lock_limit, and each counts to its own: {_each(limits)}",
                "give them one lock_limit",
            )
        ttls = {task.name: f"{options_for(task, settings).ttl:g} s" for task in tasks}
        if len(set(ttls.values())) > 1 and settings.backend.kind is Kind.REDLOCK:
            yield Finding(
                *("problem", subject),
                f"tasks share it with different lock_ttl on a Redlock, where a node that came back empty has no vote "
                f"for the ttl of the lock that is asked for: {_each(ttls)}",
                "give them one lock_ttl",
            )


def _of_beat(app: Any) -> Iterator[Finding]:
    exclusive = {task.name for task in exclusive_tasks(app)}
    entries = [name for name, entry in (app.conf.beat_schedule or {}).items() if _task_of(entry) in exclusive]
    if entries and not has_exclusive_beat(app.conf):
        yield Finding(
            *("note", "beat_scheduler"),
            f"it is {_scheduler(app.conf)}: two beats would send each tick twice, and the second run of "
            f"{_some([*map(str, entries)])} would follow the first",
            "start beat with -S exclusive where more than one may run",
        )


def _of_broadcasts(app: Any) -> Iterator[Finding]:
    """Queues whose messages every worker gets, on a broker that does not say which queue a message comes from."""
    queues = app.amqp.queues.consume_from
    fanout = [name for name, queue in queues.items() if queue.exchange is not None and queue.exchange.type == "fanout"]
    if fanout and not is_rabbitmq(app.conf):
        others = sorted(name for name in queues if name not in fanout) or [str(app.conf.task_default_queue)]
        yield Finding(
            *("warning", f"task_queues {_some(fanout)}"),
            "every worker gets what is sent there; a message that has to wait for its lock cannot go back to one "
            f"worker alone on this broker, and goes to the queue {others[0]}, where any worker may take it",
            "send exclusive tasks to other queues, or use RabbitMQ",
        )


def _scheduler(conf: Any) -> str:
    scheduler = conf.beat_scheduler
    return scheduler if isinstance(scheduler, str) else getattr(scheduler, "__qualname__", str(scheduler))


def _task_of(entry: Any) -> Any:
    return entry.get("task") if isinstance(entry, Mapping) else getattr(entry, "task", None)


def _form(task: Any) -> str | None:
    """In which way a task's key is made, so that two tasks can be compared; None where nobody can tell."""
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


def _each(values: Mapping[str, Any]) -> str:
    """Each value, with some of those that have it."""
    names: defaultdict[Any, list[str]] = defaultdict(list)
    for name, value in values.items():
        names[value].append(name)
    return "; ".join(f"{value} for {_some(having)}" for value, having in names.items())


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Those that differ in their subjects only as one."""
    subjects: defaultdict[Finding, list[str]] = defaultdict(list)
    for finding in findings:
        subjects[replace(finding, subject="")].append(finding.subject)
    return [replace(finding, subject=_some(names)) for finding, names in subjects.items()]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more
