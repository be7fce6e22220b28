"""The app of a deploy before its tasks became exclusive: it does not know this package, and may run messages that were
sent with a lock.
"""

from __future__ import annotations

import json
import os

from celery import Celery

import tests.integration.ready  # noqa: F401

app = Celery("tests.integration.earlier_deploy", **json.loads(os.environ["TEST_CONF"]))


@app.task(name="queued.until_executed")
def until_executed(job: str) -> str:
    return job


@app.task(name="queued.fails")
def fails(job: str) -> None:
    raise ValueError("as told")
