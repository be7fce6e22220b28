"""An app with one exclusive task, around whose body other people's code stands: in the way that `test_form` says."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from celery import Celery, Task
from celery.utils.imports import instantiate

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import LockConflict, SingletonTask
from tests import recording

app = Celery("tests.integration.bases_app", **json.loads(os.environ["TEST_CONF"]))


@contextmanager
def context() -> Iterator[None]:
    yield


class Framework(Task):
    """As Flask's documentation has it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return self.run(*args, **kwargs)


class FrameworkFirst(Framework, SingletonTask):
    pass


class FrameworkBehind(SingletonTask, Framework):
    pass


class Mixin:
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            run = (self.run(*args, **kwargs) for _ in range(1))
            return next(run)


class MixinFirst(Mixin, SingletonTask):
    pass


class CooperativeMixin:
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


class CooperativeFirst(CooperativeMixin, SingletonTask):
    pass


class Own(SingletonTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return self.run(*args, **kwargs)


class OwnCooperative(SingletonTask):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return super().__call__(*args, **kwargs)


class OwnBind(SingletonTask):
    """Celery's own `on_bound` does nothing, so nobody calls it."""

    @classmethod
    def on_bound(cls, app: Any) -> None:
        pass

    __call__ = Own.__call__


class Indirect(SingletonTask):
    """What it calls in the end cannot be read here."""

    def in_context(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return self.run(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_context(*args, **kwargs)


class Skipping(SingletonTask):
    """Calls the one that comes after SingletonTask's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with context():
            return Task.__call__(self, *args, **kwargs)


class Twice(SingletonTask):
    """Its second run would be without the lock, which the first has freed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class OwnStrategy(SingletonTask):
    @staticmethod
    def Strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Any:
        return instantiate(Task.Strategy, task, app, consumer, **options)


def work(self: Any, job: str) -> str:
    with recording.run(job, self.request.id):
        while not recording.may_end(job):
            time.sleep(0.02)
    return job


def generated(self: Any, job: str) -> Iterator[str]:
    yield work(self, job)


def recursive(self: Any, job: str, depth: int = 0) -> str:
    """Calls itself as a function, also its inner one."""
    if depth == 3:
        return work(self, job)
    self.run(job, 3)
    return self(job, depth + 1) if depth < 2 else self.run(job, depth + 1)  # type: ignore[no-any-return]


def _call_run(task: Any, *args: Any, **kwargs: Any) -> Any:
    with context():
        return task.run(*args, **kwargs)


def _instrumented(task: Any) -> None:
    """As Sentry does it."""
    original = type(task).__call__

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    type(task).__call__ = call


def _replaced(task: Any) -> None:
    """As nobody should do it."""
    type(task).__call__ = lambda task, *args, **kwargs: _call_run(task, *args, **kwargs)


def _around(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: call(*args, **kwargs)


class Chooses:
    """Its methods need their own `self`."""

    argument, policy = "job", "raise"

    def key(self, arguments: dict[str, Any]) -> Any:
        return arguments[self.argument]

    def on_conflict(self, task: Any, conflict: LockConflict) -> str:
        return self.policy


form = app.conf.test_form
options: dict[str, Any] = {"on_conflict": "raise", "lock_key": ["job"]}
if form == "text as a key":
    options["lock_key"] = "job"
if form == "methods as options":
    options = {"on_conflict": Chooses().on_conflict, "lock_key": Chooses().key}
if form == "annotated":
    app.conf.task_annotations = {"*": {"__call__": Own.__call__}}
if form == "annotated around":
    app.conf.task_annotations = {"*": {"@__call__": _around}}
if form.endswith("autoretry"):
    options |= {"autoretry_for": (KeyError,), "retry_backoff": True}

base = globals().get(form.removesuffix(" autoretry"))
base = base if isinstance(base, type) else SingletonTask
body = {"generated": generated, "recursive": recursive}.get(form, work)
exclusive = app.task(bind=True, base=base, name="tests.integration.app.exclusive", **options)(body)

if form in ("instrumented", "replaced"):
    app.finalize()
    globals()[f"_{form}"](app.tasks["tests.integration.app.exclusive"])
