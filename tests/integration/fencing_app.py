"""Tasks that write to fenced stores; set up by the environment that a test gives it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from redis import Redis
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.contrib.fencing.redis import fenced_command
from celery_singleton_lock.contrib.fencing.sqlalchemy import Fenced, fenced_get
from tests import recording
from tests.integration.app import app


class Base(DeclarativeBase):
    pass


class Report(Fenced, Base):
    __tablename__ = "report"

    name: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]


def to_redis(fence: int, text: str) -> None:
    with Redis.from_url(os.environ["TEST_EVENTS"]) as client:
        fenced_command(client, fence, "SET", "report", text)


def to_sqlalchemy(fence: int, text: str) -> None:
    engine = create_engine(f"sqlite:///{os.environ['TEST_DATABASE']}", connect_args={"timeout": 30})
    with Session(engine) as session, session.begin():
        report = fenced_get(session, fence, Report, "sqlalchemy")
        assert report is not None
        report.text = text
    engine.dispose()


def to_django(fence: int, text: str) -> None:
    model = django_model()
    model.objects.fenced_update_or_create(fence, name="django", defaults={"text": text})


STORES: dict[str, Callable[[int, str], None]] = {
    "redis": to_redis,
    "sqlalchemy": to_sqlalchemy,
    "django": to_django,
}


def django_model() -> Any:
    if not settings.configured:
        database = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ["TEST_DATABASE"],
            # IMMEDIATE: a transaction that reads before it writes is refused at once if another one has begun to write.
            "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},
        }
        settings.configure(DATABASES={"default": database}, USE_TZ=True)
        django.setup()
    from tests.integration.fencing_models import Report as model

    return model


# The tests look at writes after a lock was lost: by default, the task would usually be aborted before.
@app.task(base=SingletonTask, bind=True, lock_key=["store"], lock_wait=60, on_lock_lost="warn")
def write(self: Any, store: str, text: str, gate: str = "") -> str:
    """Write to the store as soon as the file that it waits for exists."""
    with recording.run(store, self.request.id, self.lock.fence):
        while gate and not Path(gate).exists():
            time.sleep(0.02)
        STORES[store](self.lock.fence, text)
    return text
