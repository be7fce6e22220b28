"""An app with one exclusive task, around whose body other people's code stands: in the way that `test_form` says."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery, Task

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask
from tests import recording


class Framework(Task):
    """As Flask's documentation has it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class FrameworkFirst(Framework, SingletonTask):
    pass


class FrameworkBehind(SingletonTask, Framework):
    pass


class Indirect(SingletonTask):
    """What it calls in the end cannot be read here."""

    def in_context(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_context(*args, **kwargs)


def work(self: Any, job: str) -> str:
    with recording.run(job, self.request.id):
        while not recording.may_end(job):
            time.sleep(0.02)
    return job


FORMS = {it.__name__: it for it in (FrameworkFirst, FrameworkBehind, Indirect)}

app = Celery("tests.integration.bases_app", **json.loads(os.environ["TEST_CONF"]))
base = FORMS[app.conf.test_form]
app.task(bind=True, base=base, name="tests.integration.app.exclusive", on_conflict="raise", lock_key=["job"])(work)
