"""The worker's part: options on its command line, a check of the settings before anything runs, and the locks that an
earlier life of the worker left behind.

Installed on every Celery app of a process that imports this package, through Celery's own hook for such extensions
(fix-ups, which an app calls when it is made): the command line is parsed before the app's tasks exist.
"""

from __future__ import annotations

import os
import threading
from importlib.metadata import entry_points
from typing import Any

import click
from celery import Celery, bootsteps
from celery.signals import worker_process_init, worker_process_shutdown, worker_shutdown, worker_shutting_down
from celery.utils.log import get_logger

import celery_singleton_lock.worker.remote_control  # noqa: F401 - adds its commands
from celery_singleton_lock import forks, process_identity
from celery_singleton_lock._celery import (
    InitialArguments,
    begin_now,
    extend_every_app,
    has_free_slot,
    is_prefork,
    let_pauses_switch,
    reword_ignored,
)
from celery_singleton_lock.diagnosis import audit
from celery_singleton_lock.diagnosis.servers import unusable
from celery_singleton_lock.diagnosis.tasks import exclusive_tasks
from celery_singleton_lock.errors import InvalidOption, LockUnavailable
from celery_singleton_lock.heartbeat import SharedFlag
from celery_singleton_lock.options.rules import MAX_TTL, MIN_TTL
from celery_singleton_lock.runtime import Runtime, write_all
from celery_singleton_lock.stores import check_servers
from celery_singleton_lock.task import reports
from celery_singleton_lock.task.ends import why_it_continues
from celery_singleton_lock.worker.children import Children, RunHold, free
from celery_singleton_lock.worker.line import Line, line_of
from celery_singleton_lock.worker.request import children_of, worker_of

logger = get_logger(__name__)

_BACKEND = click.Option(
    ["--singleton-lock-backend"],
    metavar="URL",
    help="URL of the server that keeps the locks of exclusive tasks, as in singleton_lock_backend.",
)
_TTL = click.Option(
    ["--singleton-lock-ttl"],
    type=click.FloatRange(MIN_TTL, MAX_TTL),
    help="Seconds that a lock outlives its worker, as in singleton_lock_ttl.",
)
_DISABLE = click.Option(
    ["--singleton-lock-disable"],
    is_flag=True,
    default=False,
    help="Run exclusive tasks without a lock, as with singleton_lock_enabled = False.",
)


#: The pools in which exclusive tasks can run on Windows: the others fork processes, or wait for pipes.
_ON_WINDOWS = ("solo", "threads")

#: The entry points that are imported when a worker starts, so that they can connect to our signals.
OBSERVERS = "celery_singleton_lock.observers"


def observe() -> None:
    """Connect the listeners to our signals: Celery's events, and the optional libraries that are installed."""
    from celery_singleton_lock.worker import events  # noqa: F401 - connects itself

    for observer in entry_points(group=OBSERVERS):
        try:
            observer.load()
        except ModuleNotFoundError as error:
            logger.debug("singleton lock: observer %s is not used: %s", observer.name, error)
        except Exception as error:  # noqa: BLE001 - a version of a library that does not fit, or anything
            logger.warning("singleton lock: observer %s cannot be used: %r", observer.name, error)


def install(app: Celery) -> None:
    """Give the app's workers the options of this package, and its bootstep; a second call changes nothing."""
    app.user_options["worker"].update((_BACKEND, _TTL, _DISABLE))
    app.steps["worker"].add(LockStep)


class LockStep(bootsteps.StartStopStep):
    """Applies the command line's options, then refuses to start with settings that are wrong, also for the lock server
    that is there.

    Steps are made before the pool is started, so that its processes inherit what is set here.
    """

    name = "singleton-lock"
    # After all that forks: the child of a fork waits forever for what a thread here was just importing.
    requires = ("celery.worker.components:Pool", "celery.worker.components:Beat")

    def __init__(
        self,
        parent: Any,
        singleton_lock_backend: str | None = None,
        singleton_lock_ttl: float | None = None,
        singleton_lock_disable: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(parent, **options)
        conf = parent.app.conf
        if singleton_lock_backend is not None:
            conf.singleton_lock_backend = singleton_lock_backend
        if singleton_lock_ttl is not None:
            conf.singleton_lock_ttl = singleton_lock_ttl
        if singleton_lock_disable:
            conf.singleton_lock_enabled = False
        # With -E only this worker knows; the processes of its pool send this package's events.
        conf.worker_send_task_events = bool(parent.task_events)

    def include_if(self, parent: Any) -> bool:
        """Whether the app has an exclusive task at all; others need no lock server."""
        return bool(exclusive_tasks(parent.app))

    def create(self, parent: Any) -> None:
        """Check the settings and log them.

        Raises:
            InvalidOption: one of them is wrong, or does not suit the pool.
            ClickException: the same on the command line, which then shows this error alone.
        """
        try:
            self._check(parent)
        except InvalidOption as error:
            if click.get_current_context(silent=True) is None:
                raise
            raise click.ClickException(str(error)) from error

    def _check(self, parent: Any) -> None:
        # Imported here, where there is a worker: registers the command that asks it how it locks.
        from celery_singleton_lock.diagnosis import peers  # noqa: F401

        runtime = Runtime.of(parent.app)
        settings = runtime.settings
        if not settings.enabled:
            logger.warning("singleton lock: disabled; exclusive tasks run without a lock")
            return
        if not forks.CAN_FORK:
            _check_windows(audit.pool_name(parent.pool_cls))
        check_servers(settings)
        if is_prefork(parent.pool_cls):
            _look_after_processes(parent, runtime)
        _have_copies_wait(parent, runtime)
        _prepare_to_run()
        logger.info(
            "singleton lock: %s, ttl %g s, on_conflict %s",
            settings.backend.masked,
            settings.defaults["ttl"],
            settings.defaults["on_conflict"],
        )
        for finding in audit.of_app(parent.app, settings):
            if finding.subject != audit.IN_MEMORY:
                logger.warning("singleton lock: %s", finding)

    def start(self, parent: Any) -> None:
        """Free the locks that an earlier life left behind; the start does not wait for that."""
        runtime = Runtime.of(parent.app)
        if runtime.settings.enabled:
            worker_of[parent.app] = parent
            let_pauses_switch()
            if (children := children_of.get(parent.app)) is not None:
                children.start()
            arguments = (runtime, parent.hostname)
            threading.Thread(target=free_left_behind, args=arguments, name="singleton-lock-start", daemon=True).start()

    def register_with_event_loop(self, parent: Any, hub: Any) -> None:
        """The worker's loop begins, at first and after each loss of the broker."""
        if (line := line_of.get(parent.app)) is not None:
            line.register(hub)

    def stop(self, parent: Any) -> None:
        """Leave the lines, so that others are woken; the process may go on, and start another worker."""
        worker_of.pop(parent.app, None)
        if (line := line_of.pop(parent.app, None)) is not None:
            line.close()
            line.join()
        if (children := children_of.get(parent.app)) is not None:
            children.close()

    terminate = stop


def _check_windows(pool: str) -> None:
    """Say what a worker cannot do there, or refuse what it cannot do at all."""
    if pool not in _ON_WINDOWS:
        raise InvalidOption(
            f"setting worker_pool is {pool!r}, in which exclusive tasks cannot run on Windows; allowed there: "
            f"{' or '.join(_ON_WINDOWS)} (celery worker -P solo)"
        )
    logger.warning(
        "singleton lock: on Windows, a task that loses its lock is stopped only after a call that blocks, and the lock "
        "of a process that was killed ends with its ttl"
    )


def _have_copies_wait(parent: Any, runtime: Runtime) -> None:
    """Begin waiting copies as soon as their locks are free, if the consumer can be notified."""
    in_loop = bool(parent.use_eventloop)
    if runtime.settings.backend.in_memory or not (in_loop or audit.pool_name(parent.pool_cls) == "gevent"):
        return

    def begin(request: Any) -> bool:
        return begin_now(parent.consumer, request) and not request.was_terminated  # Revoked: the next one may begin.

    line_of[parent.app] = Line(runtime.store, begin, lambda: has_free_slot(parent.pool), in_loop=in_loop)


@worker_shutting_down.connect
def _leave_lines(**_: Any) -> None:
    for line in [*line_of.values()]:  # A worker in another thread may end meanwhile.
        line.close()


def _look_after_processes(parent: Any, runtime: Runtime) -> None:
    """Renew and free for the processes of the pool; refuse several processes that share no locks."""
    writer = reports.open_channel()
    if not runtime.settings.backend.in_memory:
        children_of[parent.app] = Children(runtime.store, runtime.journal, runtime.heartbeat.outage)
        flag = runtime.heartbeat.renew_flag
        InitialArguments.extend(parent.pool, _inherit, lambda: [writer, flag.file()])
    elif parent.concurrency > 1:
        raise InvalidOption(
            "setting singleton_lock_backend is 'memory://', which the processes of a prefork pool do not share; "
            "allowed here: a redis:// URL, or a pool of threads (-P threads) or of one process (-c 1)"
        )


def _inherit(app: Any, *descriptors: int) -> None:
    """In a process of the pool that is not forked, before it does anything: what a forked one has."""
    writer, flag = descriptors
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    reports.report_to(writer)

    def begin(**_: Any) -> None:
        Runtime.of(app).heartbeat.renew_flag = SharedFlag(flag)
        _prepare_to_run()

    worker_process_init.connect(begin, weak=False)  # Then the app has its settings.


def _prepare_to_run() -> None:
    """Where tasks are to run."""
    observe()
    reword_ignored(why_it_continues)


def free_left_behind(runtime: Runtime, node: str) -> None:
    """Free the locks of processes that ran under the node name `node` on this host and have provably ended."""
    left = 0
    try:
        for key, held in runtime.store.all_held(runtime.settings.prefix):
            holder = held.holder
            if holder is not None and holder.node == node and process_identity.is_dead(holder.process):
                left += 1
                hold = held.hold(key, ttl=runtime.settings.defaults["ttl"])
                free(runtime.store, RunHold(hold, holder), runtime.journal)
        logger.debug("singleton lock: %d locks were left behind by an earlier %s", left, node)
    except LockUnavailable as error:
        # The worker starts all the same: servers and workers may be started together, in any order.
        finding = unusable(error.server, error.reason or "no answer")
        logger.error("singleton lock: exclusive tasks cannot run now: %s", finding)  # noqa: TRY400


@worker_process_shutdown.connect
@worker_shutdown.connect
def _write_what_is_left(**_: Any) -> None:
    write_all()


extend_every_app(install)
