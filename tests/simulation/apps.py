"""The app of the simulated workers: tasks of each kind, whose bodies report when they begin and end."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import billiard.einfo
from celery import Celery
from celery.app import trace as celery_trace
from celery.beat import ScheduleEntry
from celery.utils.collections import ConfigurationView
from celery.worker import request, strategy

from tests.simulation import inside, loading
from tests.simulation.scheduler import active, simulation

#: Options of the tasks, by name.
TASKS: dict[str, dict[str, Any]] = {
    "shop.skip": {"on_conflict": "skip"},
    "shop.late": {"on_conflict": "skip", "acks_late": True, "reject_on_worker_lost": True},
    "shop.again": {"on_conflict": "retry", "acks_late": True, "reject_on_worker_lost": True},
    "shop.patient": {"on_conflict": "retry", "lock_wait": 20.0},
    "shop.refuses": {"on_conflict": "raise", "lock_wait": 3.0, "acks_late": True, "reject_on_worker_lost": True},
    "shop.bounded": {
        "on_conflict": "retry",
        "lock_conflict_retries": 2,
        "acks_late": True,
        "reject_on_worker_lost": True,
    },
    "shop.rests": {
        "on_conflict": "retry",
        "acks_late": True,
        "reject_on_worker_lost": True,
        "lock_at_least_for": 2.0,
    },
    "shop.two": {"on_conflict": "retry", "lock_limit": 2, "acks_late": True, "reject_on_worker_lost": True},
    "shop.retries": {"on_conflict": "retry", "acks_late": True, "reject_on_worker_lost": True, "max_retries": 2},
    "shop.keeps": {
        "on_conflict": "retry",
        "acks_late": True,
        "reject_on_worker_lost": True,
        "max_retries": 2,
        "lock_retain_on_retry": True,
    },
    "shop.keeps_early": {"on_conflict": "retry", "max_retries": 2, "lock_retain_on_retry": True},
}

#: Options of tasks that lock when sent, so that their messages come back; and the seconds of `until_expired`.
_LATE: dict[str, Any] = {"acks_late": True, "reject_on_worker_lost": True}
_ONCE, _BEHIND = {"lock_scope": "until_executed"}, {"lock_scope": "until_and_while_executing"}
KEEPS_OUT = 8.0

SENT: dict[str, dict[str, Any]] = {
    "shop.once": {**_ONCE, "on_conflict": "retry", **_LATE},
    "shop.once_early": {**_ONCE, "on_conflict": "retry", "on_duplicate": "raise"},
    "shop.strict": {**_ONCE, "on_conflict": "retry", "on_send_unavailable": "raise", **_LATE},
    "shop.waits": {"lock_scope": "until_executing", **_LATE},
    "shop.waits_early": {"lock_scope": "until_executing", "on_duplicate": "skip"},
    "shop.behind": {**_BEHIND, "on_conflict": "retry", **_LATE},
    "shop.behind_early": {**_BEHIND, "on_conflict": "skip", "on_duplicate": "raise"},
    "shop.each": {"lock_scope": "until_expired", "lock_queue_ttl": KEEPS_OUT, **_LATE},
}
TASKS |= SENT

#: Tasks of which a newer message takes the place of one that waits.
REPLACES: dict[str, dict[str, Any]] = {
    "shop.replaces": {"lock_scope": "until_executing", "on_duplicate": "replace", **_LATE},
    "shop.replaces_early": {"lock_scope": "until_executing", "on_duplicate": "replace"},
    "shop.replaces_behind": {**_BEHIND, "on_conflict": "retry", "on_duplicate": "replace", **_LATE},
}
TASKS |= REPLACES

#: Tasks that end as the task that has their lock, and tasks of which only the newest message runs.
_AGAIN: dict[str, Any] = {"max_retries": 2}
JOINS: dict[str, dict[str, Any]] = {
    "shop.joins": {"on_conflict": "join", **_LATE, **_AGAIN},
    "shop.joins_early": {"on_conflict": "join", **_AGAIN},
    "shop.joins_patient": {"on_conflict": "join", "lock_wait": 2.0, **_LATE, **_AGAIN},
    "shop.joins_keeps": {"on_conflict": "join", "lock_retain_on_retry": True, **_LATE, **_AGAIN},
    "shop.joins_rests": {"on_conflict": "join", "lock_at_least_for": 2.0, **_LATE, **_AGAIN},
}
NEWEST: dict[str, dict[str, Any]] = {
    "shop.newest": {"on_conflict": "rerun", **_LATE, **_AGAIN},
    "shop.newest_early": {"on_conflict": "rerun", **_AGAIN},
    "shop.newest_patient": {"on_conflict": "rerun", "lock_wait": 3.0, **_LATE, **_AGAIN},
    "shop.newest_stops": {"on_conflict": "replace", **_LATE, **_AGAIN},
    "shop.newest_keeps": {"on_conflict": "rerun", "lock_retain_on_retry": True, **_LATE, **_AGAIN},
    "shop.newest_stops_kept": {"on_conflict": "replace", "lock_retain_on_retry": True, **_LATE, **_AGAIN},
}
TASKS |= JOINS | NEWEST

#: Scopes with which several messages may run at once.
OF_EACH_MESSAGE = ("until_executing", "until_expired")

#: Length of a return value that is too large to be kept beside the lock.
TOO_LARGE = 5000

#: The task that beats send.
TICK: dict[str, Any] = {"on_conflict": "retry", "acks_late": True, "reject_on_worker_lost": True}


def words_of(text: str) -> dict[str, str]:
    """The words that say what a body does, or how a message is sent: `takes=0.3 fails=1`."""
    return dict(word.partition("=")[::2] for word in text.split())


class App(Celery):
    """Celery's app, on simulated time."""

    def now(self) -> datetime:
        return _now().astimezone(self.timezone)


def _now() -> datetime:
    run = active()
    task = run.current if run is not None else None
    seconds = 0.0 if run is None else run.now
    wall = task.process.host.wall_clock(seconds) if task is not None else 1_700_000_000.0 + seconds
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=wall)


class _Datetime:
    """Replaces the class for code that only asks for the time."""

    @staticmethod
    def now(zone: Any = None) -> datetime:
        return _now().astimezone(zone)


class _Traceback:
    """Replaces billiard's copies of tracebacks, which would take as long as everything else."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tb_frame = self.tb_next = None
        self.tb_lineno = 0


def patch_celery() -> None:
    """Leave out what costs time and is useless here."""
    billiard.einfo.Traceback = _Traceback
    billiard.einfo.traceback = SimpleNamespace(format_exception=lambda *_: [""])
    celery_trace.traceback_clear = lambda _error=None: None
    celery_trace._does_info = False
    request.datetime = _Datetime  # For expiring messages.
    strategy.to_timestamp = lambda eta, *_: eta.timestamp()  # Celery's own looks at the real clock.
    ConfigurationView.__getitem__ = _setting
    ScheduleEntry.__lt__ = lambda self, other: self.name < other.name  # Celery's own depends on memory addresses.
    logging.getLogger("celery").setLevel(logging.CRITICAL)
    logging.getLogger("celery").propagate = False
    logging.lastResort = None  # For loggers that nobody has configured: those of the copies.


def _setting(self: ConfigurationView, key: str) -> Any:
    """As Celery's own, which also tries each key as an old name, of which these apps use none."""
    for mapping in self.maps:
        try:
            return mapping[key]
        except KeyError:
            pass
    raise KeyError(key)


def app_of(package: Any, settings: dict[str, Any]) -> Celery:
    """The app of a process, made once for each copy of the package, with these settings."""
    with loading.uninterrupted():
        app = package.kept.get("app")
        if app is None:
            app = package.kept["app"] = _app(package)
            package.kept["settings"] = dict(app.conf.maps[0])
        # As it was made: settings of another simulation are gone.
        changes = app.conf.maps[0]
        changes.clear()
        changes.update(package.kept["settings"])
        app.conf.update(settings)
    return app


def _app(package: Any) -> Celery:
    app = App("shop", broker="simulated://", backend="tests.simulation.results:Backend", set_as_current=False)
    app.conf.update(
        task_always_eager=False,
        result_extended=False,
        task_send_sent_event=False,
        worker_hijack_root_logger=False,
        broker_pool_limit=None,
        task_publish_retry=False,
    )
    base = inside.task_class(package)
    for name, options in TASKS.items():
        app.task(name=name, base=base, bind=True, shared=False, lock_key=["key"], **options)(_body(name))
    app.task(name="shop.tick", base=base, bind=True, shared=False, lock_key=["key"], **TICK)(_tick)
    app.task(name="shop.after", bind=True, shared=False)(_after)
    app.finalize()
    return app


def _body(name: str) -> Any:
    def body(self: Any, key: str, number: int, plan: str = "") -> Any:
        simulation().world.bodies.run(self, name, key, number, plan)  # type: ignore[attr-defined]
        return [number, "x" * TOO_LARGE] if "large=1" in plan else number

    body.__name__ = name.rpartition(".")[2]
    return body


def _tick(self: Any, key: str) -> None:
    simulation().world.bodies.run(self, "shop.tick", key, self.request.id, "takes=0.05")  # type: ignore[attr-defined]


def _after(self: Any, *args: Any) -> None:
    simulation().world.follows(self.request.id, args)  # type: ignore[attr-defined]
