"""Tasks that take their lock when they are sent, for the apps of the workers and of the sender."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.options.rules import SCOPES
from tests import recording

#: Seconds between two attempts, in which a test sends more.
PAUSE = 4.0


def define(app: Celery) -> SimpleNamespace:
    """The tasks, of one app."""

    def task(**options: Any) -> Any:
        options = {"base": SingletonTask, "lock_key": ["job"], "lock_scope": "until_executed", **options}
        return app.task(bind=True, shared=False, **options)

    def work(self: Any, job: str, seconds: float = 0.05) -> str:
        with recording.run(job, self.request.id):
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not recording.may_end(job):
                time.sleep(0.02)
        return job

    def who(self: Any, job: str, seconds: float = 0.05) -> str:
        work(self, job, seconds)
        return self.request.id

    def fails(self: Any, job: str, seconds: float = 0.05) -> None:
        work(self, job, seconds)
        raise ValueError(f"as told {self.request.id}")

    def is_replaced(self: Any, job: str, seconds: float = 0.05) -> None:
        work(self, job, seconds)
        raise self.replace(self.app.signature("queued.until_executed", (f"after {job}",)))

    def echo(value: Any) -> Any:
        with recording.run("echo", ""):
            return value

    def rejected(self: Any, job: str) -> None:
        raise Reject("as told", requeue=False)

    def replaced(self: Any, job: str) -> None:
        raise self.replace(self.app.signature("queued.until_executed", (job, PAUSE)))

    def sends_itself(self: Any, job: str, times: int) -> str:
        with recording.run(job, self.request.id):
            if times:
                self.apply_async((job, times - 1))
        return job

    def dies(self: Any, job: str) -> None:
        recording.mark("dies", self.request.id)
        os.kill(os.getpid(), signal.SIGKILL)

    def before_start(self: Any, *_: Any) -> None:
        raise ValueError("as told")

    def too_long(self: Any, job: str) -> None:
        time.sleep(300)

    scopes = {scope: task(name=f"queued.{scope}", lock_scope=scope, lock_queue_ttl=300.0)(work) for scope in SCOPES}
    whose = {scope: task(name=f"queued.who.{scope}", lock_scope=scope, lock_queue_ttl=300.0)(who) for scope in SCOPES}
    return SimpleNamespace(
        **scopes,
        scopes=scopes,
        who=whose,
        fails=task(name="queued.fails")(fails),
        echo=app.task(name="queued.echo", shared=False)(echo),
        is_replaced=task(name="queued.is_replaced")(is_replaced),
        skips=task(name="queued.skips", on_duplicate="skip")(who),
        raises=task(name="queued.raises", on_duplicate="raise")(who),
        rejected=task(name="queued.rejected")(rejected),
        replaced=task(name="queued.replaced", lock_name="queued.until_executed")(replaced),
        sends_itself=task(name="queued.sends_itself", lock_scope="until_executing")(sends_itself),
        dies=task(name="queued.dies")(dies),
        too_long=task(name="queued.too_long", time_limit=1)(too_long),
        not_begun=task(name="queued.not_begun", before_start=before_start)(work),
        dies_rejected=task(name="queued.dies_rejected", acks_late=True, acks_on_failure_or_timeout=False)(dies),
        newest=task(name="queued.newest", lock_scope="until_executing", on_duplicate="replace")(work),
        newest_alone=task(
            name="queued.newest_alone", lock_scope="until_and_while_executing", on_duplicate="replace", acks_late=True
        )(work),
        late=task(name="queued.late", acks_late=True, reject_on_worker_lost=True)(work),
    )
