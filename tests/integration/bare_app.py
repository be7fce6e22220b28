"""The app before its tasks became exclusive: the code that an old worker still runs."""

from __future__ import annotations

import json
import os

from celery import Celery

import tests.integration.ready  # noqa: F401

app = Celery("tests.integration.bare_app", **json.loads(os.environ["TEST_CONF"]))


@app.task(name="tests.integration.app.exclusive")
def exclusive(job: str) -> str:
    return job
