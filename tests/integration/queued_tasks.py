"""Tasks that take their lock when they are sent, for the apps of the workers and of the sender."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

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

    def failing(self: Any, job: str) -> None:
        raise ValueError("as told")

    def fails(self: Any, job: str, seconds: float = 0.05) -> None:
        work(self, job, seconds)
        raise ValueError(f"as told {self.request.id}")

    def is_replaced(self: Any, job: str, seconds: float = 0.05) -> None:
        work(self, job, seconds)
        raise self.replace(self.app.signature("queued.until_executed", (f"after {job}",)))

    def echo(value: Any) -> Any:
        with recording.run("echo", ""):
            return value

    def retrying(self: Any, job: str) -> str:
        with recording.run(job, self.request.id):
            if not self.request.retries:
                raise self.retry(countdown=PAUSE)
        return job

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

    def exits(self: Any, job: str) -> None:
        sys.exit(1)

    def resent(self: Any, job: str) -> str:
        with recording.run(job, self.request.id):
            if not self.request.retries:
                self.retry(countdown=PAUSE, throw=False)
        return job

    def given_back(self: Any, job: str) -> None:
        with recording.run(job, self.request.id):
            raise Reject("as told", requeue=True)

    def before_start(self: Any, *_: Any) -> None:
        raise ValueError("as told")

    def ends_before_start(self: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """A hook: ends the first attempt in the way that its second argument says."""
        _, how = args
        if self.request.retries:
            return
        if how == "retry":
            raise self.retry(countdown=PAUSE)
        if how == "retry for a cause":
            raise self.retry(exc=ValueError("as told"), countdown=PAUSE)
        if how == "ignore":
            raise Ignore
        if how == "reject":
            raise Reject("as told", requeue=False)

    def works_when_asked(self: Any, job: str, how: str) -> str:
        return work(self, job, 300.0)

    def retries_when_late(self: Any, job: str) -> str:
        try:
            return work(self, job, 300.0)
        except SoftTimeLimitExceeded as error:
            raise self.retry(exc=error, countdown=PAUSE) from None

    def too_long(self: Any, job: str) -> None:
        time.sleep(300)

    scopes = {scope: task(name=f"queued.{scope}", lock_scope=scope, lock_queue_ttl=300.0)(work) for scope in SCOPES}
    whose = {scope: task(name=f"queued.who.{scope}", lock_scope=scope, lock_queue_ttl=300.0)(who) for scope in SCOPES}
    return SimpleNamespace(
        **scopes,
        scopes=scopes,
        who=whose,
        who_briefly=task(name="queued.who_briefly", lock_queue_ttl=1.0)(who),
        fails=task(name="queued.fails")(fails),
        echo=app.task(name="queued.echo", shared=False)(echo),
        without_result=task(name="queued.without_result", ignore_result=True)(work),
        is_replaced=task(name="queued.is_replaced")(is_replaced),
        skips=task(name="queued.skips", on_duplicate="skip")(who),
        raises=task(name="queued.raises", on_duplicate="raise")(who),
        failing=task(name="queued.failing")(failing),
        retrying=task(name="queued.retrying")(retrying),
        rejected=task(name="queued.rejected")(rejected),
        replaced=task(name="queued.replaced", lock_name="queued.until_executed")(replaced),
        sends_itself=task(name="queued.sends_itself", lock_scope="until_executing")(sends_itself),
        dies=task(name="queued.dies")(dies),
        exits=task(name="queued.exits")(exits),
        too_long=task(name="queued.too_long", time_limit=1)(too_long),
        resent=task(name="queued.resent")(resent),
        given_back=task(name="queued.given_back")(given_back),
        hooked=task(name="queued.hooked", before_start=ends_before_start)(works_when_asked),
        retries_when_late=task(name="queued.retries_when_late", soft_time_limit=1)(retries_when_late),
        not_begun=task(name="queued.not_begun", before_start=before_start)(work),
        dies_rejected=task(name="queued.dies_rejected", acks_late=True, acks_on_failure_or_timeout=False)(dies),
        long_lease=task(name="queued.long_lease", lock_ttl=600.0)(work),
        patient=task(name="queued.patient", lock_scope="until_and_while_executing", lock_wait=300.0)(work),
        newest=task(name="queued.newest", lock_scope="until_executing", on_duplicate="replace")(work),
        newest_alone=task(
            name="queued.newest_alone", lock_scope="until_and_while_executing", on_duplicate="replace", acks_late=True
        )(work),
        late=task(name="queued.late", acks_late=True, reject_on_worker_lost=True)(work),
    )
