"""The app."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import after_task_publish, beat_init

from celery_singleton_lock import SingletonTask
from tests import recording

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.integration.django_project.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task(base=SingletonTask, bind=True, name="shop.job")
def job(self: Any, name: str) -> None:
    with recording.run(name, self.request.id):
        pass


@after_task_publish.connect
def _linger(**_: Any) -> None:
    """While there is such a file, what was sent is not known to be sent for a while."""
    if Path(os.environ["TEST_DATABASE"]).with_name("linger").exists():
        time.sleep(1.5)


@beat_init.connect
def _watch(**_: Any) -> None:
    """As what reports errors and metrics does: a thread, to which signals may be delivered as well."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
