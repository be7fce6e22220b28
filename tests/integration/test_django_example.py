"""The example project: real workers and beats, a real database."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from tests import programs
from tests.integration.conftest import until
from tests.patience import LIMIT
from tests.programs import ROOT
from tests.redis_server import RedisServer

PROJECT = ROOT / "examples" / "django"

COMMIT_AND_ROLL_BACK = """
from django.db import transaction
from shop.tasks import rebuild_report

def send(tenant_id):
    rebuild_report.apply_async_on_commit((tenant_id,), singleton_lock={"wait": 5})

try:
    with transaction.atomic():
        send(7)
        raise ValueError
except ValueError:
    pass
with transaction.atomic():
    send(8)
"""


class Site:
    """The project with its own server and database."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self._directory = directory
        self.environment = {
            **os.environ,
            "CELERY_BROKER_URL": server.url_of(0),
            "CELERY_RESULT_BACKEND": server.url_of(1),
            "SHOP_DATABASE": str(directory / "database"),
        }

    def manage(self, *arguments: str) -> str:
        """Run Django's command line; returns the output."""
        done = programs.run("manage", arguments, environment=self.environment, directory=PROJECT)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, exits: ExitStack, *arguments: str) -> None:
        """Start a Celery program, which is killed at the end."""
        with (self._directory / "log").open("ab") as log:
            command = [sys.executable, "-m", "celery", "-A", "shop", *arguments, "-l", "INFO"]
            program = subprocess.Popen(
                command, cwd=PROJECT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        exits.callback(program.wait, LIMIT)
        exits.callback(os.killpg, program.pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text(errors="replace")

    def reports(self, *, of: str) -> list[tuple[datetime, datetime]]:
        """Start and end times of the finished reports."""
        finished = "SELECT begun_at, ended_at FROM shop_report WHERE ordered_by = ? AND ended_at NOT NULL"
        with closing(sqlite3.connect(self.environment["SHOP_DATABASE"], timeout=30)) as database:
            rows = database.execute(finished, [of]).fetchall()
        return [(datetime.fromisoformat(begun), datetime.fromisoformat(ended)) for begun, ended in rows]


def test_example_passes_its_checks_without_a_server(tmp_path: Path) -> None:
    with RedisServer() as server:
        site = Site(server, tmp_path)
    assert "no issues" in site.manage("check")
    assert "celery_singleton_lock" not in site.manage("check", "--deploy")


def test_check_fails_where_a_worker_would(own_redis: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "from shop.settings import *\nINSTALLED_APPS.remove('django_celery_beat')\nSINGLETON_LOCK_PREFIX = 'shop'\n"
    )
    site = Site(own_redis, tmp_path)
    site.environment.update(PYTHONPATH=str(tmp_path), DJANGO_SETTINGS_MODULE="wrong")
    with pytest.raises(AssertionError) as failed:
        site.manage("check")
    printed = str(failed.value)
    assert "(celery_singleton_lock.E001) setting singleton_lock_beat_scheduler is 'django_celery_beat" in printed
    assert "(celery_singleton_lock.W002) nothing reads the setting SINGLETON_LOCK_PREFIX" in printed


def test_task_is_sent_when_the_transaction_is_committed(own_redis: RedisServer, tmp_path: Path) -> None:
    site = Site(own_redis, tmp_path)
    site.manage("shell", "-c", COMMIT_AND_ROLL_BACK)
    with own_redis.client() as broker:
        (message,) = broker.lrange("celery", 0, -1)
    headers = json.loads(message)["headers"]
    assert (headers["argsrepr"], headers["singleton_lock"]["call"]) == ("(8,)", {"wait": 5})


def test_docs_tell_the_truth(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "django.md").read_text()
    files = re.findall(r"```python\n# (\w+\.py).*?\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["settings.py", "celery.py", "tasks.py", "tests.py"]
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").write_text("from .celery import app as celery_app\n")
    for name, content in files:
        (shop / name).write_text(content)
    with (shop / "settings.py").open("a") as settings:
        settings.write("DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3'}}\nSECRET_KEY = 'x'\n")
    arguments = ["test", "--settings", "shop.settings"]
    done = programs.run("django", arguments, environment={}, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 1 test" in done.stderr
    assert "System check identified no issues" in done.stdout + done.stderr


@pytest.mark.slow
def test_reports_of_one_tenant_never_overlap(own_redis: RedisServer, tmp_path: Path) -> None:
    site = Site(own_redis, tmp_path)
    site.manage("migrate", "-v0")
    with ExitStack() as exits:
        site.start(exits, "worker", "-c", "3")
        for name in ("one", "two"):
            site.start(exits, "beat", "--pidfile", str(tmp_path / name))
        site.manage("order", "1")
        site.manage("order", "1")
        until(lambda: len(site.reports(of="a customer")) == 2 and len(site.reports(of="beat")) >= 2)
        until(lambda: site.log.count("beat: Starting") == 2)
    runs = sorted([*site.reports(of="a customer"), *site.reports(of="beat")])
    assert all(begun >= ended for (_, ended), (begun, _) in pairwise(runs))
