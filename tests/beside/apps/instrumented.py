"""An app that is instrumented as the variable INSTRUMENTATION says, in its workers and in the program that sends.

As a program it reads a line for each message or chain to be sent, and answers by a line: `[[task, args, options], …]`,
and `{"ids": …, "is_duplicate": …, "is_nested": …}`: whether each message has a dictionary `headers` in its headers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from celery import Celery, chain
from celery.signals import after_task_publish, before_task_publish

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import DuplicateResult, SingletonTask, clock
from celery_singleton_lock.signals import lock_conflict
from tests import recording

BY = os.environ["INSTRUMENTATION"]


def _in_each_message(headers: dict[str, Any], **_: Any) -> None:
    headers.setdefault("headers", {}).update(x="y")


def _moves_ours(headers: dict[str, Any], **_: Any) -> None:
    headers.setdefault("headers", {})["singleton_lock"] = headers.pop("singleton_lock")


if BY == "sentry":
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:9/1",
        traces_sample_rate=1.0,
        shutdown_timeout=0,
        integrations=[CeleryIntegration(monitor_beat_tasks=True)],
    )
elif BY == "datadog":
    import ddtrace

    ddtrace.patch(celery=True)
elif BY == "opentelemetry":
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())
    CeleryInstrumentor().instrument()
elif BY == "receiver":
    before_task_publish.connect(_in_each_message)
elif BY == "strips":
    before_task_publish.connect(_moves_ours)

#: Not `set_as_current=False`: Datadog looks for tasks in the current app.
app = Celery("shop")
app.conf.update(json.loads(os.environ["TEST_CONF"]))


@lock_conflict.connect
def _refused(sender: Any, task_id: str, **_: Any) -> None:
    recording.mark(f"{sender.name}:refused", task_id)


def _run(task: Any, job: str) -> list[Any]:
    with recording.run(job, task.request.id):
        while job.startswith("long") and not recording.may_end(job):
            clock.sleep(0.01)
    return [job, (task.request.headers or {}).get("user")]


@app.task(name="joined", base=SingletonTask, bind=True, lock_key=["job"], on_conflict="join")
def joined(self: Any, job: str) -> list[Any]:
    return _run(self, job)


@app.task(name="in_line", base=SingletonTask, bind=True, lock_key=[], on_conflict="retry")
def in_line(self: Any, job: str) -> list[Any]:
    return _run(self, job)


@app.task(name="bounded", base=SingletonTask, bind=True, lock_key=["job"], on_conflict="retry", lock_conflict_retries=1)
def bounded(self: Any, job: str) -> list[Any]:
    return _run(self, job)


@app.task(name="once", base=SingletonTask, bind=True, lock_scope="until_executed")
def once(self: Any, job: str, fails: int = 0) -> list[Any]:
    found = _run(self, job)
    if self.request.retries < fails:
        # Celery stores RETRY after it has sent the retry: maybe over the success of a retry that does not wait.
        raise self.retry(countdown=0.2)
    return found


@app.task(
    name="killed",
    base=SingletonTask,
    bind=True,
    lock_scope="until_executed",
    retry_on_worker_lost=True,
    default_retry_delay=0,
)
def killed(self: Any, job: str) -> list[Any]:
    found = _run(self, job)
    if not self.request.retries:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


@app.task(name="replaced", base=SingletonTask, bind=True, lock_scope="until_executed", lock_name="pair")
def replaced(self: Any, job: str) -> Any:
    _run(self, f"{job} replaced")
    raise self.replace(replacement.si(job))


@app.task(name="replacement", base=SingletonTask, bind=True, lock_scope="until_executed", lock_name="pair")
def replacement(self: Any, job: str) -> list[Any]:
    return _run(self, job)


is_nested: list[bool] = []


@after_task_publish.connect
def _note(headers: dict[str, Any], **_: Any) -> None:
    is_nested.append(isinstance(headers.get("headers"), dict))


def send(steps: list[Any]) -> dict[str, Any]:
    """Send a message, or a chain."""
    is_nested.clear()
    signatures = []
    for name, args, options in steps:
        if BY == "caller":
            options = {**options, "headers": {**options.get("headers", {}), "headers": {"user": 7}}}
        signatures.append(app.tasks[name].si(*args).set(**options))
    result = (chain(*signatures) if len(signatures) > 1 else signatures[0]).apply_async()
    return {"id": result.id, "is_duplicate": isinstance(result, DuplicateResult), "is_nested": is_nested}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(send(json.loads(line))), flush=True)
