"""An operator of a shop: runs `celery locks …` as a program or, much faster, in the process of the tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_singleton_lock import SingletonTask, cli
from tests import programs
from tests.integration.conftest import Shop
from tests.integration.workers import environment

APP = "tests.integration.app"

#: A task of the shop's workers; the `lock_name` of its lock is "job".
EXCLUSIVE = f"{APP}.exclusive"


def program(*arguments: str, app: str = APP) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", app, *arguments]


def environment_of(shop: Shop, **conf: Any) -> dict[str, str]:
    return environment({**shop.conf, **conf}, events=shop.events, record=shop.record.path)


def celery(*arguments: str, app: str = APP, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`celery -A … <arguments>` as a program."""
    return programs.run("celery", ["-A", app, *arguments], environment=env)


def locks(*arguments: str, app: str = APP, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`celery -A … locks <arguments>` as a program."""
    return celery("locks", *arguments, app=app, env=env)


def of_shop(shop: Shop, *arguments: str, **conf: Any) -> subprocess.CompletedProcess[str]:
    """`celery locks <arguments>` as a program."""
    return locks(*arguments, env=environment_of(shop, **conf))


def ask(shop: Shop, *arguments: str, answer: str | None = None, **conf: Any) -> Result:
    """`celery locks <arguments>` in this process, for an app with two of the shop's tasks."""
    app = Celery(APP, set_as_current=False)
    app.conf.update({**shop.conf, **conf})
    app.task(name=EXCLUSIVE, shared=False, base=SingletonTask, lock_key=["job"], lock_name="job")(_exclusive)
    app.task(name=f"{APP}.plain", shared=False)(_exclusive)
    context = CLIContext(app=app, no_color=True, workdir=None)
    return CliRunner().invoke(cli.locks, arguments, obj=context, input=answer, catch_exceptions=False)


def _exclusive(job: str, seconds: float = 0.05) -> None: ...
