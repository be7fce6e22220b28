"""The private parts of other libraries that the package touches, and the promise that depends on each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from celery_singleton_lock import _celery
from celery_singleton_lock.stores.redis import _redis_py

#: The only modules that use private parts.
ROOMS: tuple[ModuleType, ...] = (_celery, _redis_py)


class Part(NamedTuple):
    """What one function or class of these modules touches.

    Attributes:
        promise: what depends on it.
        touches: the dotted names of the private parts.
    """

    promise: str
    touches: tuple[str, ...]


#: By the function or class of ours.
PARTS: Mapping[str, Part] = {
    "WorkerRequest": Part(
        "a message that goes on is not recorded as ended; a run is terminated by its id also beside waiting copies",
        (
            "celery.worker.request.Request._retry_worker_lost",
            "celery.worker.request.Request._success_was_stored",
            "celery.worker.request.Request._already_cancelled",
            "celery.worker.request.Request._already_revoked",
            "celery.worker.request.Request._announce_cancelled",
            "celery.worker.request.Request._context",
            "celery.worker.request.Request.request_dict",
            "celery.worker.state.requests",
        ),
    ),
    "reported": Part(
        "a child's put-back, or its end that stores nothing, is not stored as a failure; parts of a chord go on",
        ("billiard.einfo.ExceptionInfo",),
    ),
    "raised": Part(
        "the lock that a retry carries is not freed for the attempt that has sent it",
        ("billiard.einfo.ExceptionInfo.exception", "billiard.einfo.ExceptionWithTraceback"),
    ),
    "active_requests": Part(
        "`celery inspect locks` lists what runs; the main process renews for what runs, and for nothing else",
        ("celery.worker.state.active_requests",),
    ),
    "is_active": Part(
        "the main process renews for what runs, and for nothing else", ("celery.worker.state.active_requests",)
    ),
    "begin_now": Part(
        "a copy that waits for a lock begins as soon as that is free, and once",
        (
            "kombu.asynchronous.timer.Timer._queue",
            "celery.concurrency.gevent.Timer._enter",
            "celery.bootsteps.Blueprint.state",
        ),
    ),
    "give_token_back": Part(
        "an execution that has met a held lock, and so has not run, does not count for `rate_limit`",
        (
            "celery.worker.consumer.consumer.Consumer.task_buckets",
            "celery.worker.consumer.consumer.Consumer._schedule_bucket_request",
            "kombu.utils.limits.TokenBucket._tokens",
        ),
    ),
    "_spend": Part(
        "a worker that refuses many messages of a task with a `rate_limit` does not slow down",
        ("celery.worker.consumer.consumer.Consumer._limit_move_to_pool", "kombu.utils.limits.TokenBucket.contents"),
    ),
    "has_free_slot": Part(
        "a lock that is free is not given to a worker that is busy while another one is not",
        ("celery.worker.state.reserved_requests",),
    ),
    "extend_every_app": Part(
        "in whatever order a program makes its app and imports us, its workers check their settings as they start",
        ("celery.Celery.builtin_fixups",),
    ),
    "active_apps": Part(
        "Django's checks look at each app; the worker's options are on an app that was made before we were imported",
        ("celery._state._get_active_apps",),
    ),
    "is_stand_in": Part(
        "Django's checks look at the apps of the project, and say so where there are none", ("celery.Celery.fixups",)
    ),
    "current_task": Part(
        "`task.map`, `task.starmap` and `task.chunks` take the lock for each of their calls",
        ("celery._state.get_current_task",),
    ),
    "current_worker_task": Part(
        "what a body sends is no copy of its own message, and is not dropped as one; a retry is not a new message",
        ("celery._state.get_current_worker_task",),
    ),
    "with_dumped_models": Part(
        "a call has the same key where it is sent and where it runs", ("celery.Task._dump_pydantic_arguments",)
    ),
    "push_task": Part(
        "each call of a `task.map` has a lease of its own, in `self.request`",
        ("celery._state.push_current_task", "celery.Task.request_stack"),
    ),
    "pop_task": Part(
        "what a worker does after a `task.map` is not taken for one of its calls",
        ("celery._state.pop_current_task", "celery.Task.request_stack"),
    ),
    "forget_task": Part(
        "whoever uses a refused task gets the error, not only the first who does", ("celery.Celery._tasks",)
    ),
    "innermost_request": Part(
        "a body that something else calls, past the lock, is stopped; a direct call within the body is not",
        ("celery.Task.request_stack", "celery.Task.push_request", "celery.Task.bind"),
    ),
    "queue_taken_from": Part(
        "a message that is put back goes to the queue that it came from, and to no other worker's",
        ("kombu.messaging.Consumer._active_tags", "kombu.messaging.Consumer._queues", "amqp.channel.Channel.callbacks"),
    ),
    "consumed_queues": Part(
        "a message that is put back goes to a queue that this worker reads; the audit finds fanout queues",
        ("celery.app.amqp.Queues.consume_from",),
    ),
    "queues_reached": Part(
        "a message that is put back goes to the queue that it came from, where the broker does not say which",
        ("kombu.transport.virtual.Channel._lookup",),
    ),
    "delayed_way": Part(
        "a message that is put back to a quorum queue behind a topic exchange takes no place in a worker meanwhile",
        (
            "kombu.transport.native_delayed_delivery.calculate_routing_key",
            "kombu.transport.native_delayed_delivery.level_name",
            "kombu.transport.native_delayed_delivery.MAX_LEVEL",
        ),
    ),
    "lead_delayed_to": Part(
        "a message that is put back to a quorum queue arrives there",
        ("kombu.transport.native_delayed_delivery.bind_queue_to_native_delayed_delivery_exchange",),
    ),
    "without_delay": Part(
        "a message that waits in RabbitMQ again goes the same way",
        ("kombu.transport.native_delayed_delivery.MAX_NUMBER_OF_BITS_TO_USE",),
    ),
    "let_pauses_switch": Part(
        "leases are renewed in a pool of greenlets while the broker is away", ("kombu.utils.functional.sleep",)
    ),
    "reword_ignored": Part(
        "a message that is put back does not read as one that was ignored",
        ("celery.app.trace.logger", "celery.app.trace.log_policy_ignore"),
    ),
    "with_preload_options": Part(
        '`celery locks` knows the options that an app gives to all commands, `app.user_options["preload"]`',
        ("celery.bin.base.handle_preload_options",),
    ),
    "add_method": Part(
        "a program asks with `app.control.inspect().locks()` and `app.control.release_lock(key)`",
        (
            "celery.app.control.Control",
            "celery.app.control.Inspect",
            "celery.Celery.control_cls",
            "celery.app.control.Control.inspect",
        ),
    ),
    "ask_each_worker": Part(
        "`app.control.inspect().locks()`, and a doctor that compares how all workers lock",
        ("celery.app.control.Inspect._request",),
    ),
    "keeps_results": Part(
        "of a message that nobody waits for no value is recorded, and a copy of it asks no result backend",
        ("celery.backends.base.DisabledBackend",),
    ),
    "may_be_asked": Part(
        "a copy that has joined another task ends as that does, and asks no backend that it cannot read",
        ("celery.backends.base.DisabledBackend", "celery.backends.rpc.RPCBackend.as_uri"),
    ),
    "record_end": Part(
        "nobody waits forever for an execution that met a held lock; errbacks are called for failures only",
        ("celery.backends.base.Backend.mark_as_failure",),
    ),
    "counts_part_once": Part(
        "a chord goes on, also where the worker died when it had stored the result of a part and not counted it",
        ("celery.backends.redis.RedisBackend._chord_zset",),
    ),
    "is_prefork": Part(
        "the main process renews for its children, and frees for those that die",
        ("celery.concurrency.prefork.TaskPool",),
    ),
    "InitialArguments": Part(
        "the main process looks after children that are not forked (`worker_pool_start_method`), too",
        ("celery.concurrency.base.BasePool.options", "billiard.pool.Worker.initargs", "billiard.reduction.DupFd"),
    ),
    "is_child_of_a_pool": Part(
        "a body that goes on without its lock, whatever is raised in it, ends with its process",
        ("billiard.process.current_process",),
    ),
    "PunctualScheduler": Part(
        "if it takes long to send a tick, the entry's next tick is not late", ("celery.beat.Scheduler._when",)
    ),
    "forget_heap": Part("no beat sends by what it knew before another beat sent", ("celery.beat.Scheduler._heap",)),
    "put_off": Part(
        "a tick that another beat has sent is not sent here, and those behind it have their turn",
        ("celery.beat.Scheduler._heap", "celery.beat.event_t", "celery.beat.Scheduler._when"),
    ),
    "turn_in": Part(
        "a tick that the broker did not take, or that another beat has claimed, is tried again after a while only",
        ("celery.beat.Scheduler._heap", "celery.beat.event_t", "celery.beat.Scheduler._when"),
    ),
    "named_schedulers": Part(
        "the doctor and the audit judge the scheduler that beat starts",
        ("celery.utils.imports.load_extension_class_names",),
    ),
    "scheduler_of": Part(
        "`celery worker -B` ends its beat so that what it has sent is recorded", ("celery.beat.Service.scheduler",)
    ),
    "socket_of": Part(
        "one thread waits for several servers at once; what was given up is not sent when the network is back",
        ("redis.connection.Connection._sock",),
    ),
    "nodes_of": Part(
        "the locks of a client share connections, which go with the client",
        (
            "redis.cluster.RedisCluster.nodes_manager",
            "redis.cluster.RedisCluster.user_on_connect_func",
            "redis.cluster.NodesManager.startup_nodes",
            "redis.cluster.NodesManager.connection_kwargs",
        ),
    ),
    "sentinels_of": Part(
        "the doctor asks each Sentinel which server is the master; no Redlock has the same master twice",
        ("redis.sentinel.SentinelConnectionPool.sentinel_manager", "redis.sentinel.Sentinel.sentinels"),
    ),
}


def own(room: ModuleType) -> set[str]:
    """The functions and classes that a module defines."""
    made = {name: it for name, it in vars(room).items() if getattr(it, "__module__", None) == room.__name__}
    return {name for name, it in made.items() if inspect.isfunction(it) or inspect.isclass(it)}
